// The list of runs, and several runs in one chart.

import { get } from "./api.js";
import { LineChart, SERIES_COLORS, legend, sparkline } from "./chart.js";
import { code, fill, findRange, formatAgo, formatCount, formatNumber, formatSeconds, h, isLive, linkRow, notice, setText, statePill } from "./dom.js";
import { href, replaceAddress } from "./routes.js";

export const X_AXES = { step: "step", time: "time since start", tokens: "sampled tokens" };
const TIME_METRIC = "time/unix";
const TOKEN_METRICS = ["tokens/sampled", "rollouts"];
export const AXIS_METRICS = [TIME_METRIC, ...TOKEN_METRICS]; // that a chart needs for its horizontal axis

export async function showRuns() {
  const chosen = new Set();
  const rows = new Map(); // name -> row
  const body = h("tbody", {});
  const compareLink = h("a", { class: "button", href: "#/" });
  const compareHint = h("span", { class: "muted" });
  const summary = h("p", { class: "muted" });
  const page = h("div", {});

  function updateCompare() {
    const names = [...chosen];
    compareLink.href = href(["compare"], { run: names });
    setText(compareLink, `Compare ${names.length} runs`);
    setText(compareHint, names.length ? "Tick another run to compare them" : "Tick two or more runs to compare them");
    compareLink.hidden = names.length < 2;
    compareHint.hidden = names.length >= 2 || rows.size < 2;
    table.classList.toggle("one-run", rows.size < 2);
  }

  function update(runs) {
    const names = runs.map((run) => run.name);
    for (const run of runs) {
      if (!rows.has(run.name)) rows.set(run.name, makeRunRow(run, chosen, updateCompare));
      rows.get(run.name).update(run);
    }
    for (const name of rows.keys()) {
      if (names.includes(name)) continue;
      rows.delete(name);
      chosen.delete(name);
    }
    updateCompare();
    const order = runs.map((run) => rows.get(run.name).node);
    if (order.some((node, at) => body.children[at] !== node) || body.children.length !== order.length) fill(body, order);
    const live = runs.filter((run) => run.state === "running").length;
    setText(summary, `${formatCount(runs.length)} in this folder${live ? `, ${live} running` : ""}`);
    const isEmpty = page.firstChild === empty;
    if (!runs.length && !isEmpty) fill(page, empty);
    if (runs.length && (isEmpty || !page.firstChild)) fill(page, table);
  }

  const empty = notice("No runs yet", "Start one, and it appears here:", code("ramify rl reverse-text -m tiny"));
  const heads = [
    h("th", { scope: "col", class: "run-box" }, "Compare"),
    ["Run", "State", "Reward"].map((name) => h("th", { scope: "col" }, name)),
    h("th", { scope: "col" }, "Curve"),
    h("th", { scope: "col" }, "Steps"),
    h("th", { scope: "col", class: "number" }, "Rollouts"),
    ["Waits for", "Changed"].map((name) => h("th", { scope: "col" }, name)),
  ];
  const table = h(
    "div",
    { class: "table-box" },
    h("table", { class: "runs" }, h("thead", {}, h("tr", {}, heads)), body),
  );
  update(await get("runs"));
  const node = h("section", {}, h("div", { class: "title-row" }, h("h1", {}, "Runs"), summary, h("div", { class: "spacer" }), compareHint, compareLink), page);
  return { node, title: "Runs", update: async () => update(await get("runs")) };
}

function makeRunRow(run, chosen, onChoose) {
  const cells = Object.fromEntries(["state", "reward", "curve", "steps", "rollouts", "waits", "changed"].map((name) => [name, h("td", { class: `run-${name}${name === "rollouts" ? " number" : ""}` })]));
  const box = h("input", {
    type: "checkbox",
    "aria-label": `Compare ${run.name}`,
    onchange: () => {
      if (box.checked) chosen.add(run.name);
      else chosen.delete(run.name);
      onChoose();
    },
  });
  const subtitle = h("span", { class: "muted" });
  const link = h("a", { href: href(["run", run.name]) }, run.name);
  const node = linkRow(h("tr", {}, h("td", { class: "run-box" }, h("label", {}, box)), h("td", { class: "run-name" }, link, subtitle), Object.values(cells)), link);
  let last = "";

  function update(entry) {
    setText(cells.changed, isLive(entry.state) ? "now" : formatAgo(entry.updated));
    const state = JSON.stringify(entry);
    if (state === last) return;
    last = state;
    setText(subtitle, [entry.kind, entry.model, entry.sources.join(", ")].filter(Boolean).join(" · "));
    fill(cells.state, statePill(entry.state));
    fill(cells.reward, formatNumber(entry.reward));
    fill(cells.curve, entry.curve.length > 1 ? sparkline(entry.curve) : null);
    const fraction = entry.max_steps ? Math.min(1, (entry.step ?? 0) / entry.max_steps) : 0;
    fill(cells.steps, entry.step === null ? "–" : [`${formatCount(entry.step)}`, entry.max_steps && h("span", { class: "muted" }, ` / ${formatCount(entry.max_steps)}`), h("span", { class: "meter", "aria-hidden": "true" }, h("span", { style: { width: `${fraction * 100}%` } }))]);
    fill(cells.rollouts, formatCount(entry.rollouts));
    fill(cells.waits, entry.problem ? h("span", { class: "bad" }, entry.problem) : (entry.waits[0] ?? ""));
    cells.waits.title = entry.problem || entry.waits.join("\n");
  }

  return { node, update };
}

export async function showCompare(params) {
  const runs = params.getAll("run");
  const settings = { name: params.get("name") ?? "reward/all/mean", x: params.get("x") ?? "step", log: params.get("log") === "1", smoothing: Number(params.get("smoothing") ?? 0) };
  const chart = new LineChart({ title: "comparison", height: 380 });
  const legendBox = h("div", {});
  const note = h("p", { class: "muted" });
  const points = new Map(); // run -> {name: points}

  async function load() {
    const names = [settings.name, ...AXIS_METRICS];
    const answers = await Promise.all(runs.map((run) => get("metrics", { run, name: names })));
    runs.forEach((run, at) => points.set(run, answers[at]));
    return answers;
  }

  function draw() {
    const series = runs.map((run, at) => ({ label: run, color: SERIES_COLORS[at % SERIES_COLORS.length], points: selectPoints(points.get(run).points, settings.name, settings.x) }));
    const missing = series.filter((entry) => !entry.points.length).map((entry) => entry.label);
    setText(note, missing.length ? `${missing.join(", ")}: no ${settings.name}${settings.x === "step" ? "" : ` by ${X_AXES[settings.x]}`} is stored.` : "");
    const formatX = settings.x === "time" ? formatSeconds : formatCount;
    chart.update(series, { isLog: settings.log, smoothing: settings.smoothing, xLabel: X_AXES[settings.x], formatX });
    fill(legendBox, legend(series));
    replaceAddress(["compare"], { run: runs, name: settings.name, x: settings.x, log: settings.log ? "1" : "", smoothing: settings.smoothing || "" });
  }

  const answers = await load();
  const names = [...new Set(answers.flatMap((answer) => answer.all_names))].sort();
  const labels = Object.fromEntries(names.map((name) => [name, name.replace(/\/age_(\d+)$/, "$& (staleness $1)")]));
  const controls = h(
    "div",
    { class: "controls" },
    chooser("Metric", names, settings.name, async (value) => {
      settings.name = value;
      await load();
      draw();
    }, labels),
    chooser("Horizontal axis", Object.keys(X_AXES), settings.x, (value) => ((settings.x = value), draw()), X_AXES),
    h("label", {}, "Smoothing ", h("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: settings.smoothing, oninput: (event) => ((settings.smoothing = Number(event.target.value)), draw()) })),
    h("label", {}, h("input", { type: "checkbox", checked: settings.log, onchange: (event) => ((settings.log = event.target.checked), draw()) }), " Log axis"),
  );
  const difference = await showDifference(runs);
  const node = h(
    "section",
    {},
    h("div", { class: "title-row" }, h("h1", {}, "Compare"), h("p", { class: "muted" }, runs.join(" · "))),
    h("div", { class: "panel" }, controls, legendBox, chart.node, note),
    difference,
  );
  return { node, title: "Compare", onShow: draw };
}

export function chooser(label, values, selected, onchange, labels = {}) {
  const options = values.map((value) => h("option", { value, selected: value === selected }, labels[value] ?? value));
  return h("label", {}, `${label} `, h("select", { onchange: (event) => onchange(event.target.value) }, options));
}

// The points of a metric by step, time or sampled tokens. A later point of a step replaces an earlier one.
export function selectPoints(points, name, axis) {
  const values = toMap(points[name]);
  const steps = [...values.keys()].filter((step) => values.get(step) !== null).sort((a, b) => a - b);
  if (axis === "step") return steps.map((step) => [step, values.get(step)]);
  const positions = axis === "time" ? timeByStep(points) : tokensByStep(points);
  return steps.filter((step) => positions.has(step)).map((step) => [positions.get(step), values.get(step)]);
}

function toMap(list) {
  return new Map(list ?? []);
}

function timeByStep(points) {
  const times = toMap(points[TIME_METRIC]);
  const [start] = findRange(times.values());
  return new Map([...times].map(([step, time]) => [step, time - start]));
}

function tokensByStep(points) {
  const [tokens, rollouts] = TOKEN_METRICS.map((name) => toMap(points[name]));
  let total = 0;
  return new Map([...tokens.keys()].sort((a, b) => a - b).map((step) => [step, (total += tokens.get(step) * (rollouts.get(step) ?? 0))]));
}

async function showDifference(runs) {
  const pair = runs.slice(0, 2);
  const configs = new Map();
  const body = h("tbody", {});
  const heads = h("tr", {});
  const summary = h("p", { class: "muted" });
  const table = h("div", { class: "table-box" }, h("table", { class: "difference" }, h("thead", {}, heads), body));

  async function draw() {
    for (const run of pair) if (!configs.has(run)) configs.set(run, (await get("config", { run })).values);
    const [left, right] = pair.map((run) => configs.get(run));
    const keys = [...new Set([...Object.keys(left), ...Object.keys(right)])];
    const changed = keys.filter((key) => JSON.stringify(left[key]) !== JSON.stringify(right[key]));
    setText(summary, changed.length ? `${changed.length} of ${keys.length} keys differ` : "The configurations are equal.");
    table.hidden = !changed.length;
    fill(heads, h("th", { scope: "col" }, "Key"), pair.map((run) => h("th", { scope: "col" }, run)));
    fill(body, changed.map((key) => h("tr", {}, h("th", { scope: "row", class: "mono" }, key), [left, right].map((config) => h("td", { class: "mono" }, key in config ? showValue(config[key]) : h("span", { class: "muted" }, "not set"))))));
  }

  await draw();
  const choosers = [0, 1].map((side) => chooser(side ? "and" : "between", runs, pair[side], (value) => ((pair[side] = value), draw())));
  return h(
    "div",
    { class: "panel" },
    h("div", { class: "controls" }, h("h2", {}, "Difference of configurations"), runs.length > 2 ? choosers : null, summary),
    table,
  );
}

function showValue(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}
