// The worst tokens, and the samples that are kept.

import { api } from "../api.js";
import { h, narrow, table } from "../dom.js";
import { figure, t, whole } from "../i18n.js";
import { change, href } from "../route.js";

export async function load({ run, step }, page) {
  const shown = step ?? page.first_unequal?.step ?? page.last_step;
  const [worst, samples] = await Promise.all([api.worst(run, step), shown === null ? { rows: [], total: 0 } : api.samples(run, shown)]);
  return { worst, samples, shown };
}

export function render({ worst, samples, shown }, { state }) {
  const sample = (r, step) => href({ run: state.run, view: "sample", step, request: r.request_id, index: r.sample_index });
  const visible = (text) => text.replaceAll("\n", "⏎");
  const columns = [
    { label: t("step"), num: true, cell: (r) => r.step },
    { label: t("token_in_context"), class: "context", cell: (r) => (r.text || r.before ? [visible(r.before), h("mark", {}, visible(r.text) || "∅"), visible(r.after)] : `id ${r.token_id}`) },
    { label: "|Δ|", num: true, cell: (r) => h("span", { class: "bad", title: String(r.abs_delta) }, figure(r.abs_delta)) },
    { label: "ULP", num: true, cell: (r) => whole(r.ulp) },
    { label: t("rollout"), num: true, cell: (r) => figure(r.rollout_logprob, 5) },
    { label: t("trainer"), num: true, cell: (r) => figure(r.trainer_logprob, 5) },
    { label: t("position"), num: true, cell: (r) => whole(r.position) },
    { label: t("sample"), link: true, class: "name", cell: (r) => `${r.request_id} · ${r.sample_index}` },
  ];
  const bad = worst.rows.length
    ? h("section", { class: "card flush", id: "worst" }, h("header", {}, h("h3", {}, t("worst_title")), h("p", {}, t("worst_hint", { shown: whole(worst.rows.length) }))), table(columns, worst.rows, { cards: true, limit: narrow() ? 6 : 15, more: t("show_all", { total: whole(worst.rows.length) }), href: (r) => sample(r, r.step) }))
    : h("section", { class: "card empty small", id: "worst" }, h("h2", { class: "ok" }, t("no_unequal")), h("p", { class: "muted" }, t("no_unequal_hint")));
  const sampleColumns = [
    { label: t("sample"), link: true, class: "name", cell: (r) => `${r.request_id} · ${r.sample_index}` },
    { label: t("tokens"), num: true, cell: (r) => whole(r.tokens) },
    { label: t("unequal_tokens"), num: true, cell: (r) => h("span", { class: r.unequal ? "bad" : "muted" }, whole(r.unequal)) },
    { label: "max |Δ|", num: true, cell: (r) => figure(r.max_abs) },
    { label: t("reward"), num: true, cell: (r) => figure(r.reward) },
    { label: t("finish"), cell: (r) => r.finish ?? "–" },
    { label: t("replica"), cell: (r) => r.replica ?? "–" },
  ];
  const kept = samples.rows.length
    ? h("section", { class: "card flush" }, h("header", {}, h("h3", {}, t("samples_of", { step: shown })), h("p", {}, t("samples_kept", { total: whole(samples.total) }))), table(sampleColumns, samples.rows, { cards: true, limit: narrow() ? 6 : 12, more: t("show_all", { total: whole(samples.rows.length) }), href: (r) => sample(r, shown) }))
    : h("section", { class: "card empty small" }, h("h2", {}, t("no_samples")), h("p", { class: "muted" }, t("no_samples_hint")),
      state.step === null ? null : h("div", { class: "actions" }, h("a", { class: "button", href: change({ step: null }), "data-link": true }, t("all_steps"))));
  return [h("div", { class: "stack" }, bad, kept)];
}
