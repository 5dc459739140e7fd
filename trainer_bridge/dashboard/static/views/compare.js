// Two runs side by side.

import { api } from "../api.js";
import { trend } from "../charts.js";
import { card, h, table } from "../dom.js";
import { figure, t, whole } from "../i18n.js";
import { change } from "../route.js";

export async function load(state, page) {
  const { runs } = await api.runs();
  const others = runs.map((r) => r.run).filter((name) => name !== state.run);
  const wanted = state.with ?? (others.includes(page.sibling) ? page.sibling : null);
  return { others, wanted, other: wanted ? await api.run(wanted) : null };
}

// Values of both runs over the union of their steps.
function aligned(steps, page, key) {
  const place = new Map(page.trends.step.map((s, i) => [s, page.trends[key][i]]));
  return steps.map((s) => place.get(s) ?? null);
}

export function render({ others, wanted, other }, { page, go }) {
  const choice = h("select", { id: "with", "aria-label": t("compare_with"), onchange: (event) => go(change({ with: event.target.value })) },
    h("option", { value: "", selected: !wanted }, t("choose_run")), others.map((name) => h("option", { value: name, selected: name === wanted }, name)));
  const bar = h("div", { class: "filter" }, h("span", { class: "muted" }, t("compare_with")), choice);
  if (!other) return [bar, h("section", { class: "card empty" }, h("h2", {}, others.length ? t("choose_run") : t("no_other_run")), h("p", { class: "muted" }, t("compare_hint")),
    h("div", { class: "actions" }, others.slice(0, 8).map((name) => h("a", { class: "button", href: change({ with: name }), "data-link": true }, name))))];
  const steps = [...new Set([...page.trends.step, ...other.trends.step])].sort((a, b) => a - b);
  const pair = (key) => [{ name: page.run, values: aligned(steps, page, key), colour: "accent" }, { name: other.run, values: aligned(steps, other, key), colour: "series-3" }];
  const chart = (name, title, subtitle, key, options = {}) => {
    const node = h("div", { class: "chart" });
    trend(node, name, { steps, series: pair(key), ...options });
    const box = card(title, subtitle, node);
    box.classList.add("half");
    return box;
  };
  const last = (run, key) => run.trends[key].findLast((v) => v !== null) ?? null;
  const most = (run, key) => run.trends[key].reduce((a, b) => (b !== null && (a === null || b > a) ? b : a), null);
  const rows = [
    [t("tokens"), (r) => whole(r.tokens)],
    [t("unequal_tokens"), (r) => h("span", { class: r.tokens - r.equal_tokens ? "bad" : "ok" }, whole(r.tokens - r.equal_tokens))],
    [t("first_unequal_step"), (r) => r.first_unequal?.step ?? "–"],
    ["max |Δ log p|", (r) => figure(r.max_abs, 5)],
    [`k3 KL, ${t("largest")}`, (r) => figure(most(r, "k3"), 5)],
    [`rollout_probs_diff_max, ${t("largest")}`, (r) => figure(most(r, "probs_diff_max"), 5)],
    [`${t("ess")}, ${t("last")}`, (r) => figure(last(r, "ess"), 6)],
    [`${t("reward")}, ${t("last")}`, (r) => figure(last(r, "mean_reward"))],
  ];
  const columns = [
    { label: t("figure"), cell: ([name]) => name },
    { label: page.run, num: true, cell: ([, cell]) => cell(page) },
    { label: other.run, num: true, cell: ([, cell]) => cell(other) },
  ];
  return [bar, h("div", { class: "grid" }, h("section", { class: "card flush" }, table(columns, rows)),
    chart("pair_abs", "max |Δ log p|", "nat", "max_abs", { log: true }), chart("pair_k3", t("k3_title"), "nat", "k3", { log: true }),
    chart("pair_ess", t("ess"), t("ess_hint"), "ess", { limits: { max: 1 } }), chart("pair_reward", t("reward"), t("mean"), "mean_reward"))];
}
