// Where the differences lie.

import { api } from "../api.js";
import { heat } from "../charts.js";
import { card, h, table } from "../dom.js";
import { figure, t, whole } from "../i18n.js";
import { change } from "../route.js";

export const load = ({ run, step }) => api.where(run, step);

export function render(data, { state, go }) {
  if (!data.heat.length) return [h("section", { class: "card empty" }, h("h2", {}, t("no_data")))];
  const measure = state.measure === "share" ? "share" : "max_abs";
  const rows = [...new Set(data.heat.map((p) => p[0]))].sort((a, b) => a - b);
  const positions = [...new Set(data.heat.map((p) => p[1]))].sort((a, b) => a - b);
  const node = h("div", { class: "chart tall", style: { height: `${Math.min(460, Math.max(170, 70 + rows.length * 20))}px` } });
  const bar = heat(node, "heat", { rows, positions, points: data.heat, perRow: data.steps_per_row, measure, onStep: (step) => go(change({ step })) });
  const choice = h("div", { class: "actions" }, ["max_abs", "share"].map((name) =>
    h("a", { class: "button small", href: change({ measure: name === "max_abs" ? null : name }), "data-link": true, "aria-current": name === measure ? "true" : null }, name === "max_abs" ? "max |Δ|" : t("unequal_share"))));
  const box = h("section", { class: "card" }, h("header", {}, h("h3", {}, t("heat_title")), choice), node,
    bar ?? h("p", { class: "note" }, t("heat_quiet")));
  const groups = Object.entries(data.groups).map(([name, cells]) => {
    const columns = [
      { label: t(`group_${name}`), class: "wrap", cell: (r) => (name === "length" ? `${whole(r[0])}–${whole(2 * r[0] - 1)}` : name === "version" && /^\d+$/.test(r[0]) ? `v${r[0]}` : r[0] === "unknown" ? t("unknown") : r[0] === "none" ? t("none") : r[0]) },
      { label: t("tokens"), num: true, cell: (r) => whole(r[1]) },
      { label: t("unequal_tokens"), num: true, cell: (r) => h("span", { class: r[2] ? "bad" : "muted" }, whole(r[2])) },
      { label: "max |Δ|", num: true, cell: (r) => figure(r[3]) },
      { label: t("mean_abs"), num: true, cell: (r) => typeof r[4] === "string" ? r[4] : figure(r[4] / r[1]) },
    ];
    return h("section", { class: "card flush half" }, h("header", {}, h("h3", {}, t(`by_${name}`))), table(columns, cells, { limited: true, limit: 60, more: t("show_all", { total: whole(cells.length) }) }));
  });
  return [h("div", { class: "grid" }, box, groups)];
}
