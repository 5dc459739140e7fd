// ECharts in the page's colours. Charts are listed in window.__charts by name, for tests and for the curious.

import { figure, t, whole } from "./i18n.js";
import { h } from "./dom.js";

// A megabyte, run when the first chart is drawn: figures and text do not wait for it.
let library = null;
const load = () => (library ??= import("./vendor/echarts.esm.min.mjs"));
window.__charts = {};
const sizes = new ResizeObserver(async (entries) => {
  const { getInstanceByDom } = await load();
  for (const { target } of entries) getInstanceByDom(target)?.resize();
});
const colours = new Map();
let wanted = [];
let round = 0;

export function colour(name) {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return colours.get(name);
}

// Forget what a view asked for that is not shown; before every new view.
export function begin() {
  wanted = [];
  round += 1;
  colours.clear();
}

// Ask for a chart; `show` draws it. `after` gets the chart when it stands.
export function draw(node, name, option, { onClick, after } = {}) {
  node.setAttribute("role", "img");
  wanted.push({ node, name, option, onClick, after });
  return node;
}

function dispose(chart) { sizes.unobserve(chart.getDom()); chart.dispose(); }

function paint(echarts, { node, name, option, onClick, after }) {
  if (!node.isConnected) return;
  const held = window.__charts[name];
  // A chart of the same name only gets new data: quicker than a new one, and nothing flickers.
  if (held) {
    held.getDom().style.height = node.style.height;
    node.replaceWith(held.getDom());
  }
  const chart = held ?? echarts.init(node, null, { renderer: "canvas" });
  chart.off("click");
  for (const event of ["mousemove", "globalout", "click"]) chart.getZr().off(event);
  chart.setOption({
    animation: false,
    aria: { enabled: true },
    textStyle: { fontFamily: getComputedStyle(document.documentElement).fontFamily, color: colour("muted") },
    ...option,
  }, true);
  if (onClick) chart.on("click", onClick);
  after?.(chart);
  window.__charts[name] = chart;
  if (!held) sizes.observe(node);
}

const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));

// Draw what was asked for: first what is on the screen, which ends the wait, then a chart a frame. False: a newer view came.
export async function show(done) {
  const mine = round;
  if (!library && wanted.length) await frame().then(frame);
  const echarts = wanted.length ? await load() : null;
  if (mine !== round) return false;
  const names = new Set(wanted.map((one) => one.name));
  for (const [name, chart] of Object.entries(window.__charts)) {
    if (!names.has(name)) { dispose(chart); delete window.__charts[name]; }
  }
  const seen = (one) => one.node.getBoundingClientRect().top < innerHeight;
  const first = wanted.filter(seen);
  const rest = wanted.filter((one) => !first.includes(one));
  for (const one of first) paint(echarts, one);
  await frame();
  if (mine !== round) return false;
  (async () => {
    for (const one of rest) {
      await frame();
      if (mine !== round) return;
      paint(echarts, one);
    }
    done();
  })();
  return true;
}

const axisLook = () => ({
  axisLine: { lineStyle: { color: colour("line") } },
  axisTick: { show: false },
  axisLabel: { color: colour("muted"), fontSize: 11, hideOverlap: true },
  splitLine: { lineStyle: { color: colour("line"), opacity: 0.7 } },
  nameTextStyle: { color: colour("muted"), fontSize: 11 },
});

const tooltipLook = () => ({
  confine: true,
  backgroundColor: colour("surface"),
  borderColor: colour("line"),
  textStyle: { color: colour("text"), fontSize: 12 },
});

const escape = (text) => String(text).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

// Zero has no logarithm and matters most here: it gets a place of its own one decade below the least positive value.
export function logScale(values) {
  const positive = values.filter((v) => v > 0).map(Math.log10);
  const infinite = values.some((v) => typeof v === "string");
  if (!positive.length && !infinite) return null;
  const top = Math.ceil(Math.max(...positive, -6)) + (infinite ? 1 : 0);
  const least = Math.floor(Math.min(...positive, top)) - 1;
  // Marks are whole steps apart, and 0 stands on one.
  const interval = Math.max(1, Math.ceil((top - least) / 4));
  const floor = top - interval * Math.ceil((top - least) / interval);
  return {
    floor, top, interval,
    // Infinite ones come as text.
    place: (v) => (v === null || v === undefined ? null : typeof v === "string" ? top : v > 0 ? Math.log10(v) : floor),
    label: (x) => (x === floor ? "0" : infinite && x === top ? "∞" : `1e${x}`.replace("e-", "e−")),
  };
}

export function trend(node, name, { steps, series, log = false, selected = null, onStep, integer = false, floorZero = false, limits = {} }) {
  const values = series.flatMap((s) => s.values).filter((v) => v !== null && v !== undefined);
  const scale = log ? logScale(values) : null;
  const place = scale ? scale.place : (v) => (typeof v === "number" ? v : null);
  const y = scale
    ? { type: "value", min: scale.floor, max: scale.top, interval: scale.interval, axisLabel: { ...axisLook().axisLabel, formatter: scale.label } }
    : { type: "value", scale: !floorZero, minInterval: integer ? 1 : 0, ...limits, axisLabel: { ...axisLook().axisLabel, formatter: (v) => figure(v, 6) } };
  const allZero = log && !scale;
  if (allZero) Object.assign(y, { min: 0, max: 1, axisLabel: { ...axisLook().axisLabel, formatter: (v) => (v === 0 ? "0" : "") }, splitLine: { show: false } });
  return draw(node, name, {
    graphic: allZero ? [{ type: "text", left: "center", top: "middle", silent: true, style: { text: t("all_zero"), fill: colour("ok"), fontSize: 13 } }] : undefined,
    grid: { left: 8, right: 12, top: series.length > 1 ? 30 : 12, bottom: 4, containLabel: true },
    legend: series.length > 1 ? { top: 0, left: 0, icon: "roundRect", itemWidth: 12, itemHeight: 3, itemGap: 14, textStyle: { color: colour("muted"), fontSize: 11 } } : undefined,
    tooltip: {
      ...tooltipLook(), trigger: "axis",
      formatter: (points) => [`${escape(t("step"))} ${points[0].axisValue}`, ...points.map((p) => `${p.marker} ${escape(p.seriesName)} <b>${escape(figure(series[p.seriesIndex].values[p.dataIndex], 5))}</b>`)].join("<br>"),
    },
    xAxis: { type: "category", data: steps, boundaryGap: false, ...axisLook(), splitLine: { show: false } },
    yAxis: { ...axisLook(), ...y },
    series: series.map((s, i) => ({
      name: s.name, type: "line", step: integer ? "end" : undefined, symbol: "circle", symbolSize: 4, showSymbol: steps.length <= 60, data: s.values.map(place),
      lineStyle: { width: s.minor ? 1.2 : 1.8, type: s.dashed ? "dashed" : "solid" }, color: colour(s.colour ?? ["accent", "series-2", "series-3", "series-4"][i]), connectNulls: false, sampling: "lttb",
      markLine: selected !== null && i === 0 && steps.includes(selected) ? { silent: true, symbol: "none", label: { show: false }, lineStyle: { color: colour("text"), type: "dotted" }, data: [{ xAxis: steps.indexOf(selected) }] } : undefined,
    })),
  }, { onClick: onStep ? (event) => onStep(steps[event.dataIndex]) : undefined });
}

export function bars(node, name, { labels, values, colours, xName, tip }) {
  return draw(node, name, {
    grid: { left: 8, right: 12, top: 16, bottom: xName ? 22 : 4, containLabel: true },
    tooltip: { ...tooltipLook(), trigger: "axis", axisPointer: { type: "shadow" }, formatter: ([p]) => `${escape(tip ? tip(p.dataIndex) : p.axisValue)}<br><b>${escape(whole(values[p.dataIndex]))}</b> ${escape(t("tokens_unit"))}` },
    xAxis: { type: "category", data: labels, name: xName, nameLocation: "middle", nameGap: 26, ...axisLook(), splitLine: { show: false } },
    yAxis: { type: "log", min: 0.5, logBase: 10, ...axisLook(), axisLabel: { ...axisLook().axisLabel, formatter: (v) => (v < 1 ? "" : figure(v)) } },
    series: [{ type: "bar", barCategoryGap: "12%", data: values.map((v, i) => ({ value: v || null, itemStyle: { color: colours[i], borderRadius: [2, 2, 0, 0] } })) }],
  });
}

// ---- cells: thousands of them are one picture -----------------------------------------------------------------------

function mixed(stops) {
  const parts = stops.map((stop) => [1, 3, 5].map((i) => parseInt(stop.slice(i, i + 2), 16)));
  return (share) => {
    const place = Math.min(1, Math.max(0, share)) * (parts.length - 1);
    const low = Math.min(parts.length - 2, Math.floor(place));
    const [a, b] = [parts[low], parts[low + 1]];
    return `rgb(${a.map((v, i) => Math.round(v + (b[i] - v) * (place - low))).join(" ")})`;
  };
}

function picture(columns, rows, cells) {
  const wide = Math.max(1, Math.ceil(720 / columns));
  const high = Math.max(1, Math.ceil(480 / rows));
  const canvas = h("canvas", { width: columns * wide, height: rows * high });
  const pen = canvas.getContext("2d");
  for (const { x, y, fill } of cells) {
    pen.fillStyle = fill;
    pen.fillRect(x * wide, y * high, wide, high);
  }
  return canvas;
}

// A grid of cells {x, y from the top, fill, tip, click}; axes hold as many categories as there are columns and rows.
function cellChart(node, name, { xAxis, yAxis, grid, columns, rows, cells, raw }) {
  const image = picture(columns, rows, cells);
  const at = new Map(cells.map((cell) => [cell.y * columns + cell.x, cell]));
  const tip = h("div", { class: "tip", hidden: true });
  const after = (chart) => {
    chart.cells = raw;
    const dom = chart.getDom();
    dom.querySelector(".tip")?.remove();
    dom.append(tip);
    const found = ({ offsetX, offsetY }) => {
      if (!chart.containPixel({ gridIndex: 0 }, [offsetX, offsetY])) return null;
      const [x, y] = chart.convertFromPixel({ gridIndex: 0 }, [offsetX, offsetY]);
      return at.get((yAxis.inverse ? y : rows - 1 - y) * columns + x) ?? null;
    };
    const pointer = chart.getZr();
    pointer.on("mousemove", (event) => {
      const cell = found(event);
      tip.hidden = !cell;
      if (!cell) return;
      tip.replaceChildren(...cell.tip().map((line) => h("div", {}, line)));
      const left = event.offsetX + 14 + tip.offsetWidth > dom.clientWidth ? event.offsetX - 14 - tip.offsetWidth : event.offsetX + 14;
      tip.style.transform = `translate(${Math.max(0, left)}px, ${Math.max(0, event.offsetY - tip.offsetHeight - 8)}px)`;
    });
    pointer.on("globalout", () => { tip.hidden = true; });
    pointer.on("click", (event) => found(event)?.click?.());
  };
  return draw(node, name, {
    grid, xAxis, yAxis,
    series: [{
      type: "custom", data: [[0, 0]], silent: true, encode: { x: 0, y: 1 },
      renderItem: ({ coordSys: { x, y, width, height } }) => ({ type: "image", style: { image, x, y, width, height } }),
    }],
  }, { after });
}

export function scaleBar(low, high, stops) {
  return h("p", { class: "legend scale" }, h("span", {}, low), h("i", { style: { background: `linear-gradient(90deg, ${stops.map((s) => `var(--${s})`).join(", ")})` } }), h("span", {}, high));
}

const DENSITY = ["density-0", "density-1"];
const HEAT = ["heat-0", "heat-1", "heat-2", "heat-3"];

// Returns the bar that explains the colours.
export function density(node, name, { cells, points }) {
  const most = Math.max(1, ...points.map((p) => p[2]));
  const fill = mixed(DENSITY.map(colour));
  const edge = (i) => (i / cells).toFixed(2);
  const axis = (title) => ({ type: "category", data: Array.from({ length: cells }, (_, i) => edge(i)), name: title, nameLocation: "middle", nameGap: 28, ...axisLook(), splitLine: { show: false }, axisLabel: { ...axisLook().axisLabel, interval: cells / 4 - 1 } });
  cellChart(node, name, {
    grid: { left: 52, right: 14, top: 10, bottom: 44 }, columns: cells, rows: cells, raw: points,
    xAxis: axis(t("rollout_probability")), yAxis: { ...axis(t("trainer_probability")), nameGap: 36 },
    cells: points.map(([x, y, n, u]) => ({
      x, y: cells - 1 - y, fill: fill(most > 1 ? Math.log10(n) / Math.log10(most) : 1),
      tip: () => [`${t("rollout")} ${edge(x)}–${edge(x + 1)}`, `${t("trainer")} ${edge(y)}–${edge(y + 1)}`, `${whole(n)} ${t("tokens_unit")}, ${whole(u)} ${t("unequal")}`],
    })),
  });
  return scaleBar(whole(1), `${whole(most)} ${t("tokens_unit")}`, DENSITY);
}

// Returns the bar that explains the colours, or null where every cell is quiet.
export function heat(node, name, { rows, positions, points, perRow, measure, onStep }) {
  const scale = measure === "max_abs" ? logScale(points.map((p) => p[4])) : null;
  const values = points.map((p) => (measure === "max_abs" ? (scale ? scale.place(p[4]) : 0) : p[3] / p[2]));
  const low = scale ? scale.floor : 0;
  let high = scale ? scale.floor + 1 : 1e-9;
  for (const v of values) high = Math.max(high, v);
  const quiet = points.every((p) => p[3] === 0);
  const fill = mixed(HEAT.map(colour));
  const row = new Map(rows.map((step, i) => [step, i]));
  const column = new Map(positions.map((position, i) => [position, i]));
  cellChart(node, name, {
    grid: { left: 8, right: 12, top: 26, bottom: 26, containLabel: true }, columns: positions.length, rows: rows.length, raw: points,
    xAxis: { type: "category", data: positions, name: t("position"), nameLocation: "middle", nameGap: 26, ...axisLook(), splitLine: { show: false } },
    yAxis: { type: "category", data: rows, inverse: true, name: t("step"), nameLocation: "start", nameGap: 8, ...axisLook(), splitLine: { show: false } },
    cells: points.map((p, i) => ({
      x: column.get(p[1]), y: row.get(p[0]), fill: fill(quiet ? 0 : (values[i] - low) / (high - low)), click: onStep ? () => onStep(p[0]) : undefined,
      tip: () => [`${t("step")} ${p[0]}${perRow > 1 ? `–${p[0] + perRow - 1}` : ""}, ${t("position")} ${p[1]}+`, `${whole(p[3])} / ${whole(p[2])} ${t("unequal")}`, `max |Δ| ${figure(p[4], 5)}`],
    })),
  });
  if (quiet) return null;
  return scaleBar("0", scale ? figure(10 ** high, 2) : `${(high * 100).toFixed(0)}%`, HEAT);
}
