// Charts as SVG: lines with points, error bars, smoothing, a log axis, and a crosshair that arrow keys move too.

import { fill, findRange, formatCount, formatNumber, h, svg } from "./dom.js";

const MARGIN = { top: 10, right: 14, bottom: 26, left: 48 };

// A line without axes, for tables.
export function sparkline(values, { width = 132, height = 30 } = {}) {
  const finite = values.filter((value) => value !== null);
  const root = svg("svg", { class: "sparkline", width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  if (finite.length < 2) return root;
  const [low, high] = findRange(finite), span = high - low || 1;
  const points = values.map((value, at) => [2 + (at / (values.length - 1)) * (width - 6), height - 4 - ((value - low) / span) * (height - 8)]);
  const line = points.map(([x, y], at) => `${at ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
  const [x, y] = points.at(-1);
  root.append(
    svg("path", { class: "spark-area", d: `${line}L${x.toFixed(1)} ${height}L2 ${height}Z` }),
    svg("path", { class: "spark-line", d: line }),
    svg("circle", { class: "spark-end", cx: x, cy: y, r: 2.4 }),
  );
  return root;
}

// series: [{label, color, points: [[x, y]], errors: Map(x -> half width), dots: bool}]
export class LineChart {
  constructor({ title, height = 220, xLabel = "step", formatX = formatCount }) {
    this.options = { title, height, xLabel, formatX };
    this.series = [];
    this.isLog = false;
    this.smoothing = 0;
    this.cursor = null;
    this.plot = svg("svg", { class: "chart", height, role: "img", tabindex: "0" });
    this.readout = h("div", { class: "readout", "aria-live": "polite" });
    this.node = h("div", { class: "chart-box" }, this.plot, this.readout);
    this.plot.addEventListener("pointermove", (event) => this.moveCursorTo(event.offsetX));
    this.plot.addEventListener("pointerleave", () => this.setCursor(null));
    this.plot.addEventListener("blur", () => this.setCursor(null));
    this.plot.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.draw()).observe(this.node);
  }

  update(series, changes = {}) {
    Object.assign(this, changes);
    if (changes.xLabel) this.options.xLabel = changes.xLabel;
    if (changes.formatX) this.options.formatX = changes.formatX;
    this.series = series;
    this.draw();
  }

  get drawnSeries() {
    return this.series.filter((entry) => entry.points.length);
  }

  draw() {
    const width = this.node.clientWidth;
    if (!width) return;
    const { height, title } = this.options;
    this.plot.setAttribute("width", width);
    this.plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const last = this.drawnSeries.map((entry) => `${entry.label} ${formatNumber(entry.points.at(-1)[1])}`).join(", ");
    this.plot.setAttribute("aria-label", `${title}: ${last || "no points yet"}`);
    if (!this.drawnSeries.length) {
      fill(this.plot, svg("text", { class: "chart-empty", x: width / 2, y: height / 2, "text-anchor": "middle" }, "no points yet"));
      return;
    }
    this.setScales(width, height);
    this.overlay = svg("g", {});
    fill(this.plot, this.drawAxes(width, height), this.drawnSeries.map((entry) => this.drawSeries(entry)), this.overlay);
    this.drawCursor();
  }

  setScales(width, height) {
    const xs = this.drawnSeries.flatMap((entry) => [entry.points[0][0], entry.points.at(-1)[0]]);
    let ys = this.drawnSeries.flatMap((entry) => entry.points.flatMap(([x, y]) => (entry.errors?.has(x) ? [y - entry.errors.get(x), y + entry.errors.get(x)] : [y])));
    if (this.isLog) ys = ys.filter((y) => y > 0);
    let [low, high] = findRange(ys);
    if (!ys.length) [low, high] = [0.1, 1];
    if (low === 0 && high === 0) high = 1;
    else if (low === high) [low, high] = this.isLog ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
    else if (!this.isLog) [low, high] = [low - (high - low) * 0.04, high + (high - low) * 0.04];
    this.yTicks = this.isLog ? logTicks(low, high) : linearTicks(low, high, height < 170 ? 3 : 5);
    const [x0, x1] = findRange(xs);
    const areIntegers = xs.every(Number.isInteger);
    this.xTicks = linearTicks(x0, x1, Math.max(3, Math.min(8, Math.floor(width / 90)))).filter((x) => x >= x0 && x <= x1 && (Number.isInteger(x) || !areIntegers));
    const toUnit = this.isLog ? (y) => (Math.log(y) - Math.log(low)) / (Math.log(high) - Math.log(low)) : (y) => (y - low) / (high - low);
    this.x = (x) => MARGIN.left + (x1 > x0 ? (x - x0) / (x1 - x0) : 0.5) * (width - MARGIN.left - MARGIN.right);
    this.y = (y) => height - MARGIN.bottom - toUnit(y) * (height - MARGIN.top - MARGIN.bottom);
  }

  drawAxes(width, height) {
    const right = width - MARGIN.right, base = height - MARGIN.bottom;
    return [
      this.yTicks.map((y) => [
        svg("line", { class: "grid", x1: MARGIN.left, x2: right, y1: this.y(y), y2: this.y(y) }),
        svg("text", { class: "tick", x: MARGIN.left - 8, y: this.y(y) + 4, "text-anchor": "end" }, formatTick(y, this.yTicks)),
      ]),
      this.xTicks.map((x) => svg("text", { class: "tick", x: this.x(x), y: base + 17, "text-anchor": "middle" }, this.options.formatX(x))),
      svg("text", { class: "tick", x: MARGIN.left - 8, y: base + 17, "text-anchor": "end" }, this.options.xLabel.split(" ")[0]),
    ];
  }

  drawSeries(entry) {
    const points = this.isLog ? entry.points.filter(([, y]) => y > 0) : entry.points;
    if (!points.length) return null;
    const style = { "--series": entry.color };
    const isSmoothed = this.smoothing > 0 && !entry.dots && points.length > 3;
    const marks = entry.dots || points.length === 1
      ? points.map(([x, y]) => [
          entry.errors?.get(x) && svg("line", { class: "error-bar", x1: this.x(x), x2: this.x(x), y1: this.y(y - entry.errors.get(x)), y2: this.y(y + entry.errors.get(x)) }),
          svg("circle", { class: "series-dot", cx: this.x(x), cy: this.y(y), r: 4 }),
        ])
      : [];
    return svg(
      "g",
      { class: `series${entry.dots ? " series-dashed" : ""}`, style },
      svg("path", { class: isSmoothed ? "series-line series-raw" : "series-line", d: this.path(points) }),
      isSmoothed && svg("path", { class: "series-line", d: this.path(smooth(points, this.smoothing)) }),
      marks,
    );
  }

  path(points) {
    return points.map(([x, y], at) => `${at ? "L" : "M"}${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`).join("");
  }

  moveCursorTo(pixelX) {
    const xs = this.listXValues();
    if (!xs.length || !this.x) return;
    this.setCursor(xs.reduce((best, x) => (Math.abs(this.x(x) - pixelX) < Math.abs(this.x(best) - pixelX) ? x : best)));
  }

  onKey(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const xs = this.listXValues();
    if (!step || !xs.length) return;
    event.preventDefault();
    const at = this.cursor === null ? (step > 0 ? -1 : xs.length) : xs.indexOf(this.cursor);
    this.setCursor(xs[Math.max(0, Math.min(xs.length - 1, at + step))]);
  }

  listXValues() {
    return [...new Set(this.drawnSeries.flatMap((entry) => entry.points.map(([x]) => x)))].sort((a, b) => a - b);
  }

  setCursor(x) {
    this.cursor = x;
    this.drawCursor();
  }

  drawCursor() {
    if (!this.overlay) return;
    const values = this.cursor === null ? [] : this.drawnSeries.map((entry) => [entry, entry.points.find(([x]) => x === this.cursor)]).filter(([, point]) => point);
    if (!values.length) {
      fill(this.overlay);
      fill(this.readout);
      return;
    }
    const x = this.x(this.cursor);
    const marks = values.filter(([, [, y]]) => !this.isLog || y > 0);
    fill(
      this.overlay,
      svg("line", { class: "cursor", x1: x, x2: x, y1: MARGIN.top, y2: this.options.height - MARGIN.bottom }),
      marks.map(([entry, [, y]]) => svg("circle", { class: "cursor-dot", cx: x, cy: this.y(y), r: 4, style: { "--series": entry.color } })),
    );
    fill(
      this.readout,
      h("div", { class: "readout-title" }, `${this.options.xLabel} ${this.options.formatX(this.cursor)}`),
      values.map(([entry, [at, y]]) =>
        h("div", {}, swatch(entry.color), `${entry.label} `, h("b", {}, formatNumber(y)), entry.errors?.has(at) ? ` ± ${formatNumber(entry.errors.get(at))}` : null),
      ),
    );
    const isRight = x > this.node.clientWidth / 2;
    this.readout.style.left = isRight ? "" : `${x + 12}px`;
    this.readout.style.right = isRight ? `${this.node.clientWidth - x + 12}px` : "";
  }
}

export function swatch(color) {
  return h("span", { class: "swatch", style: { "--series": color }, "aria-hidden": "true" });
}

export function legend(series) {
  return h("div", { class: "legend" }, series.map((entry) => h("span", { class: "legend-entry" }, swatch(entry.color), entry.label)));
}

export const SERIES_COLORS = [1, 2, 3, 4, 5, 6, 7, 8].map((number) => `var(--series-${number})`);

// An exponential moving average; `amount` in [0, 1) is the weight of the past.
export function smooth(points, amount) {
  let mean = 0, weight = 0;
  return points.map(([x, y]) => {
    mean = amount * mean + (1 - amount) * y;
    weight = amount * weight + (1 - amount);
    return [x, mean / weight];
  });
}

function linearTicks(low, high, count) {
  if (low === high) return [low];
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.72);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) ticks.push(Number(tick.toPrecision(12)));
  return ticks;
}

function logTicks(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) ticks.push(10 ** power);
  const inside = ticks.filter((tick) => tick >= low && tick <= high);
  return inside.length > 1 ? inside : [low, high];
}

function formatTick(value, ticks) {
  const step = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) : Math.abs(value) || 1;
  if (value !== 0 && step < 1e-4) return value.toExponential(Math.min(3, Math.max(0, Math.ceil(Math.log10(Math.abs(value) / step)))));
  if (Math.abs(value) >= 1e4) return formatNumber(value);
  return value.toFixed(Math.max(0, Math.min(5, -Math.floor(Math.log10(step) + 1e-9))));
}
