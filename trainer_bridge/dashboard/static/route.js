// The address holds the whole state of the page: run, view, step, sample, other run. A link shows the same to everyone.

const KEYS = ["run", "view", "step", "request", "index", "with", "measure"];
export const VIEWS = ["overview", "distribution", "where", "tokens", "compare", "manifest"];

export function state() {
  const query = new URLSearchParams(location.search);
  const found = Object.fromEntries(KEYS.map((key) => [key, query.get(key)]));
  const step = found.step !== null && /^\d+$/.test(found.step) ? Number(found.step) : null;
  const view = found.run === null ? "runs" : [...VIEWS, "sample"].includes(found.view) ? found.view : "overview";
  return { ...found, step, view, index: Number(found.index ?? 0) };
}

export function href(values) {
  const query = new URLSearchParams();
  for (const key of KEYS) {
    const value = values[key];
    if (value !== null && value !== undefined && value !== "" && !(key === "view" && value === "overview")) query.set(key, value);
  }
  return `?${query}`;
}

// The same page with some of its state changed.
export function change(values) {
  const { run, view, step, with: other, measure } = state();
  return href({ run, view, step, with: other, measure, ...values });
}
