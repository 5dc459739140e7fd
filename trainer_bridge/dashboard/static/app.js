// The page: reads the address, loads a view's data, draws it, and does so again when the data changes.

import { ApiError, api, listen } from "./api.js";
import { begin, show } from "./charts.js";
import { h } from "./dom.js";
import { current, other, preferred, t, use, whole } from "./i18n.js";
import { VIEWS, change, href, state as readState } from "./route.js";
import * as compare from "./views/compare.js";
import * as distribution from "./views/distribution.js";
import * as manifest from "./views/manifest.js";
import * as overview from "./views/overview.js";
import * as runs from "./views/runs.js";
import * as sample from "./views/sample.js";
import * as tokens from "./views/tokens.js";
import * as where from "./views/where.js";

const views = { runs, overview, distribution, where, tokens, compare, manifest, sample };
const BY_STEP = ["overview", "distribution", "where", "tokens"];
const main = document.getElementById("main");
let drawing = 0;
let page = null;
// Whether `page` may be behind: only a change heard of, or a broken stream, makes it so.
let stale = true;
let heard = false;

function verdict(state) {
  const first = page.first_unequal;
  const digests = page.digests_total ? t("verdict_digests", { equal: whole(page.digests_equal), total: whole(page.digests_total) }) : "";
  if (!page.tokens) return h("section", { class: "verdict", id: "verdict", "data-verdict": "none" }, h("span", { class: "sign", "aria-hidden": "true" }, "·"), h("div", {}, h("h2", { elementtiming: "verdict" }, t("no_data")), h("p", {}, t("no_steps_hint"))));
  if (page.bitwise_equal) {
    return h("section", { class: "verdict equal", id: "verdict", "data-verdict": "equal" }, h("span", { class: "sign", "aria-hidden": "true" }, "="),
      h("div", {}, h("h2", { elementtiming: "verdict" }, t("verdict_equal")), h("p", {}, t("verdict_equal_text", { equal: whole(page.equal_tokens), tokens: whole(page.tokens), steps: whole(page.steps) }), digests)));
  }
  const token = first.token;
  const causes = first.findings.length ? first.findings : page.findings?.findings ?? [];
  const text = h("div", {}, h("h2", { elementtiming: "verdict" }, t("verdict_unequal", { step: first.step })),
    h("p", {}, t("verdict_unequal_text", { unequal: whole(page.tokens - page.equal_tokens), tokens: whole(page.tokens), steps: whole(page.steps) }), digests),
    token ? h("p", { class: "muted" }, t("verdict_first", { position: whole(token.position), request: token.request_id, sample: token.sample_index })) : null,
    h("div", { class: "cause", id: "cause" }, h("b", {}, `${t("cause")}: `), causes.length ? causes.slice(0, 3).map((cause, i) => [i ? h("br") : null, cause]) : t("cause_unknown")));
  const go = token ? h("a", { class: "button main", id: "show-token", href: href({ run: state.run, view: "sample", step: first.step, request: token.request_id, index: token.sample_index }), "data-link": true }, t("show_token")) : null;
  return h("section", { class: "verdict unequal", id: "verdict", "data-verdict": "unequal" }, h("span", { class: "sign", "aria-hidden": "true" }, "≠"), text, h("div", { class: "actions" }, go));
}

function stepFilter(state) {
  const steps = page.trends.step;
  const at = state.step === null ? -1 : steps.indexOf(state.step);
  const to = (i) => change({ step: i < 0 || i >= steps.length ? null : steps[i] });
  const select = h("select", { id: "step", "aria-label": t("step"), onchange: (event) => go(change({ step: event.target.value })) },
    h("option", { value: "", selected: at < 0 }, t("all_steps")), steps.map((s) => h("option", { value: s, selected: s === state.step }, `${t("step")} ${s}`)));
  const arrow = (text, label, i, off) => h("a", { class: "button small", href: to(i), "data-link": true, "aria-label": label, title: label, "aria-disabled": off ? "true" : null }, text);
  return h("div", { class: "filter" }, arrow("←", t("earlier"), at < 0 ? steps.length - 1 : at - 1, false), select, arrow("→", t("later"), at < 0 ? 0 : at + 1, false),
    state.step === null ? h("span", { class: "muted" }, t("filter_hint")) : h("a", { href: change({ step: null }), "data-link": true }, t("all_steps")));
}

function frame(state, content) {
  const sibling = page.sibling ? h("a", { href: href({ run: state.run, view: "compare", with: page.sibling }), "data-link": true }, t("compare_with_sibling")) : null;
  const title = h("div", { class: "title" }, h("h1", {}, page.run), h("span", { class: "muted" }, [page.model, page.note].filter(Boolean).join(" · ")), sibling);
  if (state.view === "sample") return [...content];
  const tabs = h("nav", { class: "tabs", "aria-label": t("views") }, VIEWS.map((view) => h("a", { href: change({ view }), "data-link": true, "aria-current": view === state.view ? "page" : null }, t(`view_${view}`))));
  return [title, verdict(state), tabs, BY_STEP.includes(state.view) && page.trends.step.length ? stepFilter(state) : null, ...content];
}

function crumbs(state) {
  const parts = state.run === null ? [] : [h("a", { href: "?", "data-link": true }, t("runs")), h("a", { href: href({ run: state.run }), "data-link": true }, state.run)];
  if (state.view === "sample") parts.push(h("span", {}, `${t("step")} ${state.step}`));
  document.getElementById("crumbs").replaceChildren(...parts);
}

function failure(error) {
  const missing = error instanceof ApiError && error.status === 404;
  const text = error instanceof ApiError ? error.message || t("offline") : String(error);
  return h("section", { class: "card empty", id: "failure" }, h("h2", {}, missing ? t("not_found") : t("failed")), h("p", { class: "muted wrap" }, text),
    h("div", { class: "actions" }, h("button", { class: "button", type: "button", onclick: () => draw() }, t("retry")), h("a", { class: "button", href: "?", "data-link": true }, t("all_runs"))));
}

export async function draw({ keep = false } = {}) {
  const mine = (drawing += 1);
  const state = readState();
  if (!keep) document.body.dataset.ready = "false";
  document.body.dataset.complete = "false";
  let nodes;
  try {
    const known = page?.run === state.run && !stale;
    stale = heard && document.getElementById("live").dataset.state !== "on";
    const fresh = state.run === null ? null : known ? page : await api.run(state.run);
    if (mine !== drawing) return;
    page = fresh;
    if (page) document.title = `${page.bitwise_equal ? "=" : page.tokens ? "≠" : "·"} ${page.run} – zerodrift`;
    const data = await views[state.view].load(state, page);
    if (mine !== drawing) return;
    begin();
    const content = views[state.view].render(data, { state, page, go });
    nodes = page ? frame(state, content) : content;
  } catch (error) {
    if (mine !== drawing) return;
    stale = true;
    begin();
    nodes = [failure(error)];
    if (!(error instanceof ApiError)) console.error(error);
  }
  crumbs(state);
  main.replaceChildren(...nodes.filter(Boolean));
  document.body.dataset.view = state.view;
  // Ready: what the screen holds is drawn. Complete: so is what lies below it.
  const latest = () => mine === drawing;
  if (await show(() => { if (latest()) document.body.dataset.complete = "true"; }) && latest()) {
    document.body.dataset.ready = "true";
    performance.mark("drawn");
  }
}

export function go(address) {
  history.pushState(null, "", address);
  draw().then(() => { if (readState().view === "sample") scrollTo(0, 0); });
}

function theme(name) {
  const dark = name ? name === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  const button = document.getElementById("theme");
  button.textContent = dark ? "☀" : "☾";
  button.title = button.ariaLabel = t(dark ? "to_light" : "to_dark");
}

function labels() {
  const language = document.getElementById("language");
  language.textContent = other() === "zh" ? "中文" : "EN";
  language.title = language.ariaLabel = other() === "zh" ? "切换到中文" : "Switch to English";
  document.getElementById("keys").title = document.getElementById("keys").ariaLabel = t("keys");
  const rows = [["← →", t("key_steps")], ["1 – 6", t("key_views")], ["r", t("runs")], ["l", t("key_language")], ["t", t("key_theme")], ["← → n p", t("key_tokens")], ["Esc", t("key_close")]];
  document.getElementById("help").replaceChildren(h("h2", {}, t("keys")), h("dl", { class: "facts", style: { "margin-top": "12px" } }, rows.map(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)])));
}

// Something may have come between the first answer and the stream of changes.
async function catchUp() {
  const { run } = readState();
  if (run === null) return onChange([]);
  const now = await api.run(run).catch(() => null);
  if (now?.revision !== page?.revision) onChange([]);
}

function live(state) {
  const node = document.getElementById("live");
  node.dataset.state = state;
  if (state === "on" && !heard) {
    heard = true;
    catchUp();
  }
  stale = stale || (heard && state !== "on");
  node.replaceChildren(h("span", {}, t(state === "on" ? "live" : "reconnecting")));
}

async function switchLanguage() {
  localStorage.setItem("zerodrift.language", other());
  await use(other());
  labels();
  theme(document.documentElement.dataset.theme);
  live(document.getElementById("live").dataset.state ?? "off");
  await draw();
}

function switchTheme() {
  const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("zerodrift.theme", name);
  theme(name);
  draw({ keep: true });
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const state = readState();
  const { key } = event;
  if (key === "?") return document.getElementById("help").showModal();
  if (key === "t") return switchTheme();
  if (key === "l") return switchLanguage();
  if (key === "r") return go("?");
  if (state.run === null || !page) return;
  if (/^[1-6]$/.test(key)) return go(change({ view: VIEWS[Number(key) - 1] }));
  if ((key === "ArrowLeft" || key === "ArrowRight") && BY_STEP.includes(state.view)) {
    event.preventDefault();
    const steps = page.trends.step;
    const at = steps.indexOf(state.step);
    const next = key === "ArrowRight" ? at + 1 : at < 0 ? steps.length - 1 : at - 1;
    go(change({ step: steps[next] ?? null }));
  }
}

function onClick(event) {
  const link = event.target.closest("a[data-link]");
  const row = event.target.closest("tr[data-href]");
  if (event.defaultPrevented || event.button !== 0 || event.ctrlKey || event.metaKey || event.shiftKey) return;
  const target = link?.getAttribute("href") ?? (row && !event.target.closest("a, button") && !String(getSelection()) ? row.dataset.href : null);
  if (target) { event.preventDefault(); go(target); }
}

let waiting = null;
function onChange(changed) {
  stale = true;
  const state = readState();
  if (state.view === "sample" || (state.run !== null && changed.length && !changed.includes(state.run))) return;
  // A burst of steps draws once.
  clearTimeout(waiting);
  waiting = setTimeout(() => draw({ keep: true }), 150);
}

// Asked for while the words are on their way.
const early = readState().run === null ? null : api.run(readState().run).catch(() => null);
await use(preferred());
theme(localStorage.getItem("zerodrift.theme"));
labels();
live("off");
document.addEventListener("click", onClick);
document.addEventListener("keydown", onKey);
addEventListener("popstate", () => draw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (!localStorage.getItem("zerodrift.theme")) { theme(null); draw({ keep: true }); } });
document.getElementById("language").addEventListener("click", switchLanguage);
document.getElementById("theme").addEventListener("click", switchTheme);
document.getElementById("keys").addEventListener("click", () => document.getElementById("help").showModal());
page = await early;
stale = page === null;
draw();
listen(onChange, live);
