// How large the differences are.

import { api } from "../api.js";
import { bars, colour, density } from "../charts.js";
import { card, h } from "../dom.js";
import { figure, t, whole } from "../i18n.js";

const PER_DECADE = 4;

export const load = ({ run, step }) => api.distribution(run, step);

function filled(rows) {
  const counts = new Map(rows.map(([bin, count]) => [bin, count]));
  const places = rows.map((r) => r[0]);
  const all = [];
  for (let bin = Math.min(...places); bin <= Math.max(...places); bin += 1) all.push([bin, counts.get(bin) ?? 0]);
  return all;
}

export function render(data) {
  const total = data.equal + data.delta.reduce((sum, row) => sum + row[1], 0);
  if (!total) return [h("section", { class: "card empty" }, h("h2", {}, t("no_data")))];
  const deltas = data.delta.length ? filled(data.delta) : [];
  const value = (bin) => 10 ** (bin / PER_DECADE);
  const histogram = h("div", { class: "chart mid" });
  bars(histogram, "delta", {
    labels: ["0", ...deltas.map(([bin]) => (bin % PER_DECADE === 0 ? `1e${bin / PER_DECADE}`.replace("e-", "e−") : ""))],
    values: [data.equal, ...deltas.map((row) => row[1])],
    colours: [colour("ok"), ...deltas.map(() => colour("bad"))],
    xName: "|Δ log p| (nat)",
    tip: (i) => (i === 0 ? t("equal_bits") : `${figure(value(deltas[i - 1][0]))} – ${figure(value(deltas[i - 1][0] + 1))}`),
  });
  const ulps = filled(data.ulp);
  const name = (k) => (k === 0 ? "0" : k === 1 ? "1" : `2^${k - 1}`);
  const ulpNode = h("div", { class: "chart mid" });
  bars(ulpNode, "ulp", {
    labels: ulps.map(([k]) => name(k)), values: ulps.map((row) => row[1]), colours: ulps.map(([k]) => colour(k === 0 ? "ok" : "bad")), xName: "ULP",
    tip: (i) => (ulps[i][0] === 0 ? t("equal_bits") : `${whole(2 ** (ulps[i][0] - 1))} – ${whole(2 ** ulps[i][0] - 1)} ULP`),
  });
  const scatter = h("div", { class: "chart square" });
  const bar = density(scatter, "probability", { cells: data.cells, points: data.probability });
  const off = data.probability.reduce((sum, [x, y, n]) => sum + (x === y ? 0 : n), 0);
  const share = (n) => `${whole(n)} (${figure((100 * n) / total, 4)}%)`;
  const right = card(t("scatter_title"), t("scatter_hint", { tokens: whole(total), off: whole(off) }), scatter, bar);
  right.classList.add("half");
  return [h("div", { class: "grid" },
    h("div", { class: "half columns" }, card(t("delta_title"), t("equal_share", { share: share(data.equal) }), histogram), card(t("ulp_title"), t("ulp_hint"), ulpNode)),
    right)];
}
