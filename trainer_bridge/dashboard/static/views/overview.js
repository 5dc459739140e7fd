// What happened, step by step.

import { api } from "../api.js";
import { trend } from "../charts.js";
import { card, h } from "../dom.js";
import { figure, t, whole } from "../i18n.js";
import { change } from "../route.js";

export async function load({ run, step }, page) {
  const shown = step ?? page.last_step;
  return shown === null ? null : shown === page.last_step ? page.last : api.step(run, shown);
}

function tile(name, value, exact, unit) {
  return h("div", { class: "tile" }, h("dt", {}, name), h("dd", { title: exact === null || exact === undefined ? null : String(exact), "data-exact": exact ?? "" }, value, unit ? h("small", {}, ` ${unit}`) : null));
}

export function strip(page, selected) {
  const { step: steps, tokens, equal_tokens: equal } = page.trends;
  const width = Math.ceil(steps.length / 240);
  const cells = [];
  for (let i = 0; i < steps.length; i += width) {
    const part = steps.slice(i, i + width);
    const all = tokens.slice(i, i + width).reduce((a, b) => a + b, 0);
    const same = equal.slice(i, i + width).reduce((a, b) => a + b, 0);
    const first = part.find((_, k) => tokens[i + k] !== equal[i + k]) ?? part[0];
    const label = t("strip_cell", { step: part.length > 1 ? `${part[0]}–${part.at(-1)}` : part[0], equal: whole(same), tokens: whole(all) });
    cells.push(h("a", { href: change({ step: first }), "data-link": true, class: same === all ? "" : "unequal", "aria-current": part.includes(selected) ? "true" : null, "aria-label": label, title: label, tabindex: "-1" }));
  }
  return h("section", { class: "card" }, h("header", {}, h("h3", {}, t("every_step")), h("p", {}, t("every_step_hint"))), h("div", { class: "strip", id: "strip" }, cells),
    h("div", { class: "ends" }, h("span", {}, `${t("step")} ${steps[0]}`), h("span", {}, `${t("step")} ${steps.at(-1)}`)));
}

export function render(step, { state, page, go }) {
  if (step === null) return [h("section", { class: "card empty" }, h("h2", {}, t("no_steps")), h("p", { class: "muted" }, t("no_steps_hint")))];
  const { trends } = page;
  const tiles = h("dl", { class: "tiles", id: "tiles" },
    tile(t("equal_of", { step: step.step }), `${whole(step.equal_tokens)} / ${whole(step.tokens)}`, step.equal_tokens),
    tile("max |Δ log p|", figure(step.max_abs), step.max_abs, "nat"),
    tile("k3 KL", figure(step.k3), step.k3, "nat"),
    tile(t("ess"), figure(step.ess, 5), step.ess),
    tile(t("reward"), figure(step.mean_reward), step.mean_reward),
    tile(t("throughput"), figure(step.tokens_per_s), step.tokens_per_s, t("tokens_per_s")));
  const onStep = (chosen) => go(change({ step: chosen }));
  const chart = (name, title, subtitle, series, options = {}) => {
    const node = h("div", { class: "chart" });
    trend(node, name, { steps: trends.step, selected: state.step, onStep, series, ...options });
    const box = card(title, subtitle, node);
    box.classList.add("third");
    return box;
  };
  const line = (name, key, more = {}) => ({ name, values: trends[key], ...more });
  return [
    h("div", { class: "grid" },
      strip(page, state.step), tiles,
      chart("abs", "|Δ log p|", "nat", [line("max", "max_abs", { colour: "bad" }), line("p99", "p99_abs", { colour: "series-3" }), line("p90", "p90_abs", { colour: "series-2", minor: true }), line("p50", "p50_abs", { colour: "series-4", minor: true })], { log: true }),
      chart("k3", t("k3_title"), "nat", [line("k3", "k3")], { log: true }),
      chart("probs", t("probs_title"), "rollout_probs_diff", [line("max", "probs_diff_max", { colour: "bad" }), line(t("mean"), "probs_diff_mean")], { log: true }),
      chart("ess", t("ess"), t("ess_hint"), [line("ESS", "ess")], { limits: { max: 1 } }),
      chart("reward", t("reward"), t("mean"), [line(t("reward"), "mean_reward", { colour: "ok" })]),
      chart("throughput", t("throughput"), t("tokens_per_s"), [line(t("tokens_per_s"), "tokens_per_s", { colour: "series-2" })], { floorZero: true }),
      chart("unequal", t("unequal_tokens"), t("per_step"), [{ name: t("unequal_tokens"), values: trends.tokens.map((n, i) => n - trends.equal_tokens[i]), colour: "bad" }], { floorZero: true }),
      chart("pearson", t("pearson"), t("pearson_hint"), [line("r", "pearson", { colour: "series-2" })], { limits: { max: 1 } }),
      chart("version", t("weight_version"), t("version_hint"), [line(t("weight_version"), "weight_version", { colour: "series-4" })], { integer: true }))];
}
