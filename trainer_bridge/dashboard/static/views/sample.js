// One sample: every token, both log-probs, and the commands that go deeper.

import { api } from "../api.js";
import { card, copyButton, facts, h, narrow, table } from "../dom.js";
import { figure, t, whole } from "../i18n.js";
import { change } from "../route.js";

export async function load({ run, step, request, index }) {
  const [sample, figures, explainer] = await Promise.all([api.sample(run, step, request, index), api.step(run, step), api.explainer()]);
  return { sample, figures, explainer };
}

function tokens(sample) {
  const c = sample.columns;
  return c.position.map((position, i) => ({
    position, id: c.token_id[i], mask: c.mask[i], piece: sample.pieces[i] ?? `[${c.token_id[i]}]`,
    rollout: c.rollout_logprob[i], trainer: c.trainer_logprob[i], rolloutBits: c.rollout_bits[i], trainerBits: c.trainer_bits[i],
    delta: c.abs_delta[i], ulp: c.ulp[i], rolloutDigest: c.rollout_digest[i], trainerDigest: c.trainer_digest[i],
    version: sample.spans.find((s) => s.start <= position && position < s.end)?.version ?? null,
  }));
}

// Colour by |Δ| on a logarithmic scale from 1e-7 to 1 nat.
function depth(token) {
  if (!token.ulp) return 0;
  return Math.round(25 + 75 * Math.min(1, Math.max(0, (Math.log10(Math.max(token.delta, 1e-7)) + 7) / 7)));
}

function detail(token) {
  return facts([
    [t("position"), whole(token.position)],
    [t("token"), h("span", {}, h("span", { class: "mono" }, JSON.stringify(token.piece)), ` · id ${token.id}`)],
    [t("rollout"), h("span", { class: "mono" }, `${token.rollout ?? "–"}  ${token.rolloutBits}`)],
    [t("trainer"), h("span", { class: "mono" }, `${token.trainer ?? "–"}  ${token.trainerBits}`)],
    ["|Δ|", token.mask ? h("span", { class: token.ulp ? "bad" : "ok" }, token.ulp ? `${token.delta} nat` : t("equal_bits")) : t("masked")],
    ["ULP", token.mask ? whole(token.ulp) : null],
    [t("weight_version"), token.version === null ? null : `v${token.version}`],
    [t("row_digest"), token.rolloutDigest ? h("span", { class: `mono ${token.rolloutDigest === token.trainerDigest ? "ok" : "bad"}` }, `${token.rolloutDigest} ${token.trainerDigest}`) : null],
  ]);
}

function ribbon(sample, all, show) {
  const buttons = all.map((token) => {
    const label = t("token_label", { position: token.position, state: !token.mask ? t("masked") : token.ulp ? `|Δ| ${figure(token.delta)}` : t("equal") });
    return h("button", {
      type: "button", class: token.mask ? null : "masked", "aria-label": `${token.piece} ${label}`, title: label, "aria-pressed": "false", "data-position": token.position, tabindex: "-1",
      style: token.mask && token.ulp ? { "--tone": "var(--bad)", "--depth": `${depth(token)}%` } : {}, onclick: () => show(token.position),
    }, token.piece || "∅");
  });
  // One stop for Tab; arrows walk the tokens, n and p the unequal ones.
  const unequal = all.filter((token) => token.mask && token.ulp).map((token) => token.position);
  const walk = (event) => {
    const at = Number(event.target.dataset.position);
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1, n: unequal.find((p) => p > at), p: unequal.findLast((p) => p < at) }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey || !(next in all)) return;
    event.preventDefault();
    show(next);
    buttons[next].focus();
  };
  return h("div", { class: "ribbon", id: "ribbon", onkeydown: walk }, h("span", { class: "prompt" }, sample.prompt_text || t("prompt_ids", { count: whole(sample.prompt_ids.length) })), buttons);
}

// The verdict in its own words and how it was reached, where the explanation has them; else all of it.
function explained(explanation) {
  const sentence = explanation.verdict;
  const rows = Array.isArray(explanation.evidence) ? explanation.evidence.filter((row) => row.question) : [];
  const columns = [
    { label: t("question"), cell: (r) => r.question },
    { label: t("answer"), class: "wrap", cell: (r) => h("span", { class: r.clean === false ? "bad" : "muted" }, String(r.answer)) },
  ];
  return [
    sentence ? h("p", { class: "cause" }, h("b", {}, `${t("cause")}: `), sentence) : null,
    rows.length ? table(columns, rows, { cards: true }) : null,
    h("details", { open: !sentence && !rows.length }, h("summary", { class: "note" }, "JSON"), h("pre", { class: "out" }, JSON.stringify(explanation, null, 1))),
  ].filter(Boolean);
}

function words(text) { return /^[\w./:@=+-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`; }

function saver(state, file, side) {
  const button = h("button", { class: "button", type: "button" }, t("download", { file }));
  button.addEventListener("click", async () => {
    const url = URL.createObjectURL(await api.sampleFile(state.run, state.step, state.request, state.index, side));
    h("a", { href: url, download: file }).click();
    URL.revokeObjectURL(url);
  });
  return button;
}

// Commands and the button both need the weights that sampled; which these were is said where it is known.
function deeper(state, page, sample, figures, explainer) {
  const [file, other] = ["sample.jsonl", "trainer.jsonl"];
  const model = page.model ? ` ${words(`model.path=${page.model}`)}` : "";
  const digest = figures.weight_digest ? ` --weights-digest ${words(figures.weight_digest)}` : "";
  const lines = [
    [t("command_compare"), `zerodrift compare ${file}${model}`],
    [t("command_replay"), `zerodrift replay ${file}${digest}${model}`],
    [t("command_explain"), `zerodrift explain ${file} --trainer ${other}${model}`],
  ];
  const out = h("div", { id: "explanation", role: "status" });
  const button = h("button", { class: "button", type: "button", id: "explain", disabled: !explainer.available }, t("explain"));
  button.addEventListener("click", async () => {
    button.disabled = true;
    out.replaceChildren(h("p", { class: "note" }, t("explaining")));
    try {
      const { explanation } = await api.explain(state.run, state.step, state.request, state.index);
      out.replaceChildren(...explained(explanation));
    } catch (error) {
      out.replaceChildren(h("p", { class: "bad note" }, error.message || t("offline")));
    }
    button.disabled = false;
  });
  const who = !explainer.available ? explainer.reason || t("explain_missing") : explainer.address ? t("explain_asks", { address: explainer.address }) : t("explain_loads");
  const version = sample.spans.at(-1)?.version;
  return card(t("go_deeper"), t("go_deeper_hint"),
    h("div", { class: "actions" }, button, saver(state, file, "rollout"), saver(state, other, "trainer")),
    h("p", { class: "note", id: "explain-note" }, who, version ? ` ${t("explain_weights", { version })}` : ""), out,
    lines.map(([what, line]) => h("div", {}, h("p", { class: "note" }, what), h("div", { class: "command" }, h("code", {}, line), copyButton(line, t("copy"), t("copied"))))));
}

export function render({ sample, figures, explainer }, { state, page }) {
  const all = tokens(sample);
  const unequal = all.filter((token) => token.mask && token.ulp);
  const panel = h("div", { id: "token", "aria-live": "polite" });
  const show = (position) => {
    for (const node of document.querySelectorAll("#ribbon button")) {
      const chosen = Number(node.dataset.position) === position;
      node.setAttribute("aria-pressed", String(chosen));
      node.tabIndex = chosen ? 0 : -1;
    }
    panel.replaceChildren(detail(all[position]));
  };
  const first = unequal[0] ?? all.find((token) => token.mask) ?? all[0];
  requestAnimationFrame(() => first && panel.isConnected && show(first.position));
  const causes = figures.findings;
  const head = h("section", { class: `verdict ${unequal.length ? "unequal" : "equal"}` },
    h("span", { class: "sign", "aria-hidden": "true" }, unequal.length ? "≠" : "="),
    h("div", {}, h("h2", {}, unequal.length ? t("sample_unequal", { unequal: whole(unequal.length), tokens: whole(sample.compared) }) : t("sample_equal", { tokens: whole(sample.compared) })),
      h("p", { class: "muted" }, `${t("step")} ${sample.step} · ${sample.request_id} · ${t("sample")} ${sample.sample_index}`),
      causes.length ? h("div", { class: "cause", id: "cause" }, h("b", {}, `${t("cause")}: `), causes.map((cause, i) => [i ? h("br") : null, cause])) : null),
    h("div", { class: "actions" }, h("a", { class: "button", href: change({ view: "tokens" }), "data-link": true }, t("back_to_tokens"))));
  const legend = h("p", { class: "legend" }, h("span", {}, h("i", { style: { background: "var(--ok)" } }), t("equal_bits")),
    [1e-6, 1e-3, 1].map((d) => h("span", {}, h("i", { style: { background: `color-mix(in srgb, var(--bad) ${depth({ ulp: 1, delta: d })}%, transparent)` } }), `|Δ| ${figure(d, 1)}`)),
    sample.columns.mask.includes(false) ? h("span", {}, t("masked_hint")) : null);
  const text = card(t("sample_text"), t("sample_text_hint"), ribbon(sample, all, show), legend);
  text.classList.add("two-thirds");
  const chosen = card(t("token"), null, panel);
  chosen.classList.add("third");
  const known = card(t("about_sample"), null, facts([
    [t("seed"), sample.seed], [t("temperature"), String(sample.temperature)], [t("mode"), sample.mode], [t("filter"), sample.filter], [t("finish"), sample.finish],
    [t("reward"), sample.reward === null ? null : figure(sample.reward)], [t("replica"), sample.replica],
    [t("spans"), sample.spans.map((s) => `v${s.version} [${s.start}, ${s.end})`).join(", ")],
    [t("prompt_tokens"), whole(sample.prompt_ids.length)], [t("manifest_digest"), sample.manifest_digest ? h("span", { class: "mono" }, sample.manifest_digest) : null]]));
  known.classList.add("half");
  const further = deeper(state, page, sample, figures, explainer);
  further.classList.add("half");
  const columns = [
    { label: t("position"), num: true, cell: (r) => whole(r.position) },
    { label: t("token"), class: "mono", cell: (r) => JSON.stringify(r.piece) },
    { label: t("rollout"), class: "mono", cell: (r) => `${r.rollout} ${r.rolloutBits}` },
    { label: t("trainer"), class: "mono", cell: (r) => `${r.trainer} ${r.trainerBits}` },
    { label: "|Δ|", num: true, cell: (r) => figure(r.delta) },
    { label: "ULP", num: true, cell: (r) => whole(r.ulp) },
  ];
  const list = unequal.length ? h("section", { class: "card flush" }, h("header", {}, h("h3", {}, t("unequal_here")), h("p", {}, whole(unequal.length))), table(columns, unequal, { cards: true, limit: narrow() ? 4 : 12, more: t("show_all", { total: whole(unequal.length) }) })) : null;
  return [h("div", { class: "grid" }, head, text, chosen, known, further, list)];
}
