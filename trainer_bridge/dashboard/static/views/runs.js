// The run list.

import { api } from "../api.js";
import { h, table } from "../dom.js";
import { bytes, figure, t, when, whole } from "../i18n.js";
import { href } from "../route.js";

export const load = () => api.runs();

export function pill(run) {
  if (!run.tokens) return h("span", { class: "pill" }, t("no_data"));
  return h("span", { class: `pill ${run.bitwise_equal ? "equal" : "unequal"}` }, run.bitwise_equal ? t("equal") : t("unequal"));
}

export function render({ root, runs }) {
  document.title = "zerodrift";
  const title = h("div", { class: "title" }, h("h1", {}, t("runs")), h("span", { class: "muted mono wrap" }, root));
  if (!runs.length) {
    return [title, h("section", { class: "card empty" }, h("h2", {}, t("no_runs")), h("p", { class: "muted" }, t("no_runs_hint")), h("code", {}, `zerodrift demo --record ${root}`))];
  }
  const total = runs.reduce((sum, run) => sum + run.bytes, 0);
  const columns = [
    { label: t("verdict"), cell: pill },
    { label: t("run"), link: true, class: "wrap", cell: (r) => r.run },
    { label: t("note"), class: "muted wrap wide", cell: (r) => r.note || r.model },
    { label: t("steps"), num: true, cell: (r) => whole(r.steps) },
    { label: t("tokens"), num: true, cell: (r) => whole(r.tokens) },
    { label: t("unequal_tokens"), num: true, cell: (r) => h("span", { class: r.tokens - r.equal_tokens ? "bad" : "muted" }, whole(r.tokens - r.equal_tokens)) },
    { label: t("first_unequal_step"), num: true, class: "wide", cell: (r) => r.first_unequal?.step ?? "–" },
    { label: "max |Δ|", num: true, cell: (r) => figure(r.max_abs) },
    { label: t("last_step"), num: true, class: "muted", cell: (r) => when(r.recorded_at) },
    { label: t("size"), num: true, class: "muted wide", cell: (r) => bytes(r.bytes) },
  ];
  const list = table(columns, runs, { cards: true, href: (r) => href({ run: r.run }) });
  return [title, h("section", { class: "card flush" }, list), h("p", { class: "note" }, t("total_size", { runs: whole(runs.length), size: bytes(total) }))];
}
