// Two languages, strings in strings/*.json, the same keys in both.

const LANGUAGES = ["en", "zh"];
let strings = {};
let language = "en";

export function current() { return language; }

export function preferred() {
  const asked = new URLSearchParams(location.search).get("lang") ?? localStorage.getItem("zerodrift.language");
  if (LANGUAGES.includes(asked)) return asked;
  return navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en";
}

export async function use(name) {
  strings = await (await fetch(`static/strings/${name}.json`)).json();
  language = name;
  document.documentElement.lang = name === "zh" ? "zh-CN" : "en";
  for (const node of document.querySelectorAll("[data-i18n]")) node.textContent = t(node.dataset.i18n);
}

export function other() { return LANGUAGES[1 - LANGUAGES.indexOf(language)]; }

export function t(key, values = {}) {
  const text = strings[key];
  if (text === undefined) throw new Error(`no string ${key} in ${language}`);
  return text.replace(/\{(\w+)\}/g, (_, name) => String(values[name]));
}

const locale = () => (language === "zh" ? "zh-CN" : "en-US");

export function whole(value) { return value === null || value === undefined ? "–" : new Intl.NumberFormat(locale()).format(value); }

// A figure to read: 0 is exactly 0, small ones keep three digits. The exact value stands in the title of its node.
export function figure(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e-3 && size < 1e6) return new Intl.NumberFormat(locale(), { maximumSignificantDigits: Math.max(digits, String(Math.trunc(size)).length) }).format(value);
  return value.toExponential(digits - 1).replace("e-", "e−").replace("e+", "e");
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (value >= 1024 && place < units.length - 1) { value /= 1024; place += 1; }
  return `${value.toFixed(place && value < 10 ? 1 : 0)} ${units[place]}`;
}

export function when(seconds) {
  if (!seconds) return "–";
  const ago = Date.now() / 1000 - seconds;
  const relative = new Intl.RelativeTimeFormat(locale(), { numeric: "auto", style: "short" });
  if (ago < 60) return relative.format(-Math.max(0, Math.round(ago)), "second");
  if (ago < 3600) return relative.format(-Math.round(ago / 60), "minute");
  if (ago < 86400) return relative.format(-Math.round(ago / 3600), "hour");
  return new Intl.DateTimeFormat(locale(), { dateStyle: "medium", timeStyle: "short" }).format(seconds * 1000);
}
