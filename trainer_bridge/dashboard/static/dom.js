// Building nodes. Text always goes in as text, so nothing recorded can become markup.

export function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, item] of Object.entries(value)) node.style.setProperty(key, item);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function card(title, subtitle, ...children) {
  return h("section", { class: "card" }, h("header", {}, h("h3", {}, title), subtitle ? h("p", {}, subtitle) : null), ...children);
}

// Rows beyond `limit` are built when they are asked for.
export function table(columns, rows, options = {}) {
  const head = h("thead", {}, h("tr", {}, columns.map((c) => h("th", { class: c.num ? "num" : null, scope: "col" }, c.label))));
  const line = (row) => {
    const href = options.href?.(row);
    const cells = columns.map((c) => {
      const value = c.cell(row);
      const content = c.link && href ? h("a", { href, "data-link": true }, value) : value;
      return h("td", { class: [c.num ? "num" : "", c.class ?? ""].join(" ").trim() || null, "data-label": c.label }, content);
    });
    return h("tr", href ? { class: "go", "data-href": href } : {}, cells);
  };
  const limit = options.limit ?? Infinity;
  const body = h("tbody", {}, rows.slice(0, limit).map(line));
  const inner = h("div", { class: options.limited ? "scroll limited" : "scroll", tabindex: options.limited ? "0" : null }, h("table", { class: options.cards ? "cards" : null }, head, body));
  if (rows.length <= limit) return inner;
  const more = h("button", { class: "button small", type: "button" }, options.more);
  more.addEventListener("click", () => { body.append(...rows.slice(limit).map(line)); more.parentNode.remove(); });
  return h("div", {}, inner, h("div", { class: "more" }, more));
}

// A phone: long lists start short.
export const narrow = () => matchMedia("(max-width: 720px)").matches;

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

export function copyButton(text, label, done) {
  const button = h("button", { class: "button small", type: "button" }, label);
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    button.textContent = done;
    setTimeout(() => { button.textContent = label; }, 1500);
  });
  return button;
}
