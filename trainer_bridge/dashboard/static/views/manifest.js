// What each side says about itself.

import { h, table } from "../dom.js";
import { t, whole } from "../i18n.js";

export const load = async () => null;

function flat(value, prefix = "") {
  if (value === null || typeof value !== "object") return [[prefix, value]];
  return Object.entries(value).flatMap(([key, item]) => flat(item, prefix ? `${prefix}.${key}` : key));
}

export function render(_, { page }) {
  const both = Object.keys(page.trainer_manifest).length > 0;
  const differing = new Map(page.differences.map((d) => [d.key, d]));
  const keys = [...new Set([...Object.keys(page.manifest), ...Object.keys(page.trainer_manifest)])].sort((a, b) => differing.has(b) - differing.has(a) || a.localeCompare(b));
  const harmful = page.differences.filter((d) => d.can_change_bits).length;
  const state = (key) => {
    const found = differing.get(key);
    if (!both) return "";
    if (!found) return h("span", { class: "pill equal" }, t("same"));
    return h("span", { class: `pill ${found.can_change_bits ? "unequal" : "warn"}` }, found.can_change_bits ? t("changes_bits") : t("differs"));
  };
  const columns = [
    { label: t("key"), class: "mono", cell: (key) => key },
    { label: t("rollout"), class: "mono wrap", cell: (key) => page.manifest[key] ?? "–" },
    ...(both ? [{ label: t("trainer"), class: "mono wrap", cell: (key) => page.trainer_manifest[key] ?? "–" }, { label: t("verdict"), cell: state }] : []),
  ];
  const search = h("input", { type: "search", placeholder: t("search_keys"), "aria-label": t("search_keys") });
  const list = table(columns, keys, { cards: true });
  search.addEventListener("input", () => {
    [...list.querySelectorAll("tbody tr")].forEach((row, i) => { row.hidden = !keys[i].includes(search.value.toLowerCase()); });
  });
  const manifest = keys.length
    ? h("section", { class: "card flush" }, h("header", {}, h("div", {}, h("h3", {}, t("manifest")), h("p", {}, both ? t("manifest_hint", { keys: whole(keys.length), differing: whole(page.differences.length), harmful: whole(harmful) }) : t("manifest_one_side"))), search), list)
    : h("section", { class: "card empty small" }, h("h2", {}, t("no_manifest")), h("p", { class: "muted" }, t("no_manifest_hint")));
  const certificate = Object.keys(page.certificate).length
    ? h("section", { class: "card flush" }, h("header", {}, h("h3", {}, t("certificate"))), table([{ label: t("key"), class: "mono", cell: (r) => r[0] }, { label: t("value"), class: "mono wrap", cell: (r) => String(r[1]) }], flat(page.certificate), { cards: true }))
    : h("section", { class: "card empty small" }, h("h2", {}, t("no_certificate")), h("p", { class: "muted" }, t("no_certificate_hint")), h("code", {}, "zerodrift certify"));
  return [h("div", { class: "stack" }, manifest, certificate)];
}
