// ECharts in the page's colours. Charts are listed in window.__charts by name, for tests and for the curious.

import * as echarts from "./vendor/echarts.esm.min.mjs";
import { figure, t, whole } from "./i18n.js";

window.__charts = {};
const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) echarts.getInstanceByDom(target)?.resize();
});

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export function disposeAll() {
  for (const chart of Object.values(window.__charts)) { sizes.unobserve(chart.getDom()); chart.dispose(); }
  window.__charts = {};
}

// Draws once the node has a size, that is after it is on the page.
export function draw(node, name, option, onClick) {
  node.setAttribute("role", "img");
  requestAnimationFrame(() => {
    if (!node.isConnected) return;
    const chart = echarts.init(node, null, { renderer: "canvas" });
    chart.setOption({
      animation: false,
      aria: { enabled: true },
      textStyle: { fontFamily: getComputedStyle(document.documentElement).fontFamily, color: colour("muted") },
      ...option,
    });
    if (onClick) chart.on("click", onClick);
    window.__charts[name] = chart;
    sizes.observe(node);
  });
  return node;
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
  if (!positive.length) return null;
  const floor = Math.floor(Math.min(...positive)) - 1;
  return {
    floor,
    top: Math.ceil(Math.max(...positive)),
    place: (v) => (v === null || v === undefined ? null : v > 0 ? Math.log10(v) : floor),
    label: (x) => (x === floor ? "0" : `1e${x}`.replace("e-", "e−")),
  };
}

export function trend(node, name, { steps, series, log = false, selected = null, onStep, integer = false, floorZero = false, limits = {} }) {
  const values = series.flatMap((s) => s.values).filter((v) => typeof v === "number");
  const scale = log ? logScale(values) : null;
  const place = scale ? scale.place : (v) => (typeof v === "number" ? v : null);
  const y = scale
    ? { type: "value", min: scale.floor, max: scale.top, interval: Math.max(1, Math.ceil((scale.top - scale.floor) / 4)), axisLabel: { ...axisLook().axisLabel, formatter: scale.label } }
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
  }, onStep ? (event) => onStep(steps[event.dataIndex]) : undefined);
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

export function density(node, name, { cells, points }) {
  const most = Math.max(1, ...points.map((p) => p[2]));
  const edge = (i) => (i / cells).toFixed(2);
  const axis = (title) => ({ type: "category", data: Array.from({ length: cells }, (_, i) => edge(i)), name: title, nameLocation: "middle", nameGap: 28, ...axisLook(), splitLine: { show: false }, axisLabel: { ...axisLook().axisLabel, interval: cells / 4 - 1 } });
  return draw(node, name, {
    grid: { left: 52, right: 14, top: 10, bottom: 44 },
    tooltip: { ...tooltipLook(), formatter: (p) => `${escape(t("rollout"))} ${edge(p.value[0])}–${edge(p.value[0] + 1)}<br>${escape(t("trainer"))} ${edge(p.value[1])}–${edge(p.value[1] + 1)}<br><b>${escape(whole(p.value[3]))}</b> ${escape(t("tokens_unit"))}, ${escape(whole(p.value[4]))} ${escape(t("unequal"))}` },
    visualMap: { show: false, min: 0, max: Math.log10(most) || 1, dimension: 2, inRange: { color: [colour("density-0"), colour("density-1")] } },
    xAxis: axis(t("rollout_probability")),
    yAxis: { ...axis(t("trainer_probability")), nameGap: 36 },
    series: [{ type: "heatmap", data: points.map(([x, y, n, u]) => [x, y, Math.log10(n), n, u]), progressive: 0, itemStyle: { borderWidth: 0 } }],
  });
}

export function heat(node, name, { rows, positions, points, perRow, measure, onStep }) {
  const scale = measure === "max_abs" ? logScale(points.map((p) => p[4])) : null;
  const value = (p) => (measure === "max_abs" ? (scale ? scale.place(p[4]) : 0) : p[3] / p[2]);
  const all = points.map(value);
  const low = scale ? scale.floor : 0;
  const high = Math.max(...all, scale ? scale.floor + 1 : 1e-9);
  const quiet = points.every((p) => p[3] === 0);
  return draw(node, name, {
    grid: { left: 8, right: quiet ? 12 : 74, top: 12, bottom: 26, containLabel: true },
    tooltip: { ...tooltipLook(), formatter: ({ data }) => `${escape(t("step"))} ${rows[data[1]]}${perRow > 1 ? `–${rows[data[1]] + perRow - 1}` : ""}, ${escape(t("position"))} ${positions[data[0]]}+<br>${escape(whole(data[4]))} / ${escape(whole(data[3]))} ${escape(t("unequal"))}<br>max |Δ| <b>${escape(figure(data[5], 5))}</b>` },
    visualMap: quiet
      ? { show: false, min: 0, max: 1, dimension: 2, inRange: { color: [colour("heat-0"), colour("heat-0")] } }
      : { min: low, max: high, dimension: 2, calculable: false, right: 0, top: "middle", itemHeight: 150, itemWidth: 10, textStyle: { color: colour("muted"), fontSize: 11 },
        text: scale ? [figure(10 ** high, 2), "0"] : [`${(high * 100).toFixed(0)}%`, "0"], inRange: { color: ["heat-0", "heat-1", "heat-2", "heat-3"].map(colour) } },
    xAxis: { type: "category", data: positions, name: t("position"), nameLocation: "middle", nameGap: 26, ...axisLook(), splitLine: { show: false } },
    yAxis: { type: "category", data: rows, inverse: true, name: t("step"), nameLocation: "start", ...axisLook(), splitLine: { show: false } },
    series: [{ type: "heatmap", progressive: 0, data: points.map((p) => [positions.indexOf(p[1]), rows.indexOf(p[0]), value(p), p[2], p[3], p[4]]), itemStyle: { borderWidth: 0 } }],
  }, onStep ? ({ data }) => onStep(rows[data[1]]) : undefined);
}
