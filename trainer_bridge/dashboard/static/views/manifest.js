// What each side says about itself.

import { card, facts, h, table } from "../dom.js";
import { bytes, t, when, whole } from "../i18n.js";

export const load = async () => null;

function flat(value, prefix = "") {
  if (value === null || typeof value !== "object") return [[prefix, value]];
  return Object.entries(value).flatMap(([key, item]) => flat(item, prefix ? `${prefix}.${key}` : key));
}

// `zerodrift certify` names families of checks; any other JSON is shown key by key.
function certificateCard(certificate) {
  if (!Object.keys(certificate).length) {
    return h("section", { class: "card empty small", id: "certificate" }, h("h2", {}, t("no_certificate")), h("p", { class: "muted" }, t("no_certificate_hint")), h("code", {}, "zerodrift certify"));
  }
  const { families, ...rest } = certificate;
  const holds = families ? certificate.holds : certificate.passed;
  const sign = holds === undefined ? null : h("span", { class: `pill ${holds ? "equal" : "unequal"}` }, t(holds ? "holds" : "holds_not"));
  const good = (f) => f.checks > 0 && !f.failures.length && f.control_caught;
  const columns = [
    { label: t("family"), cell: (f) => f.title || f.name },
    { label: t("verdict"), cell: (f) => h("span", { class: `pill ${good(f) ? "equal" : "unequal"}` }, t(good(f) ? "holds" : "holds_not")) },
    { label: t("checks"), num: true, cell: (f) => whole(f.checks) },
    { label: t("elements"), num: true, cell: (f) => whole(f.compared) },
    { label: t("control"), class: "wrap", cell: (f) => h("span", { class: f.control_caught ? "muted" : "bad" }, f.control) },
    { label: t("failures"), class: "wrap", cell: (f) => (f.failures.length ? h("span", { class: "bad" }, f.failures.join("; ")) : "–") },
  ];
  delete rest.manifest;
  const known = flat(rest).filter(([key]) => key !== "holds");
  return h("section", { class: "card flush", id: "certificate" }, h("header", {}, h("h3", {}, t("certificate")), sign),
    families ? table(columns, families, { cards: true }) : null,
    h("div", { class: "inset" }, facts(known.map(([key, value]) => [key, h("span", { class: "mono" }, String(value))]))));
}

function recordCard(page) {
  return card(t("record"), null, facts([
    [t("size"), bytes(page.bytes)], [t("kept"), t("kept_of", { kept: whole(page.kept_tokens), tokens: whole(page.tokens), samples: whole(page.kept_samples) })],
    [t("writers"), whole(page.writers)], [t("last_step"), when(page.recorded_at)],
    [t("retention"), h("span", { class: "mono" }, "zerodrift runs --keep N --max-bytes N")]]));
}

export function render(_, { page }) {
  const both = Object.keys(page.trainer_manifest).length > 0;
  const differing = new Map(page.differences.map((d) => [d.key, d]));
  const weight = (key) => (differing.get(key)?.can_change_bits ? 2 : differing.has(key) ? 1 : 0);
  const keys = [...new Set([...Object.keys(page.manifest), ...Object.keys(page.trainer_manifest)])].sort((a, b) => weight(b) - weight(a) || a.localeCompare(b));
  const harmful = page.differences.filter((d) => d.can_change_bits).length;
  const state = (key) => {
    const found = differing.get(key);
    if (!both) return "";
    if (!found) return h("span", { class: "pill equal" }, t("same"));
    return h("span", { class: `pill ${found.can_change_bits ? "unequal" : "warn"}` }, found.can_change_bits ? t("changes_bits") : t("differs"));
  };
  const columns = [
    { label: t("key"), class: "mono", cell: (key) => key },
    { label: t("rollout"), class: "mono wrap", cell: (key) => page.manifest[key] || "–" },
    ...(both ? [{ label: t("trainer"), class: "mono wrap", cell: (key) => page.trainer_manifest[key] || "–" }, { label: t("verdict"), cell: state }] : []),
  ];
  const search = h("input", { type: "search", placeholder: t("search_keys"), "aria-label": t("search_keys") });
  const list = table(columns, keys, { cards: true });
  search.addEventListener("input", () => {
    [...list.querySelectorAll("tbody tr")].forEach((row, i) => { row.hidden = !keys[i].includes(search.value.toLowerCase()); });
  });
  const manifest = keys.length
    ? h("section", { class: "card flush" }, h("header", {}, h("div", {}, h("h3", {}, t("manifest")), h("p", {}, both ? t("manifest_hint", { keys: whole(keys.length), differing: whole(page.differences.length), harmful: whole(harmful) }) : t("manifest_one_side"))), search), list)
    : h("section", { class: "card empty small" }, h("h2", {}, t("no_manifest")), h("p", { class: "muted" }, t("no_manifest_hint")));
  return [h("div", { class: "stack" }, manifest, certificateCard(page.certificate), recordCard(page))];
}
