// One run: curves, who waits for whom, the flow of groups through the ledger, failures.

import { get, isExport } from "./api.js";
import { LineChart, SERIES_COLORS, legend } from "./chart.js";
import { drawFlow, drawProcesses } from "./diagram.js";
import { fill, formatCount, formatNumber, formatPercent, formatSeconds, formatTime, h, isLive, linkRow, notice, plural, statePill } from "./dom.js";
import { href } from "./routes.js";
import { AXIS_METRICS, X_AXES, chooser, selectPoints } from "./runs.js";
import { term } from "./terms.js";

const IDLE_POLLS = 2; // a run that is not running is asked once in this many polls
// The charts below the reward, by heading. The first two headings have a chart for each name that the run has, see
// `listCharts`; the others have these metrics.
const CHART_GROUPS = [
  ["Rewards and metrics of the taskset", []],
  ["Evals", []],
  ["Policy and loss", [
    ["entropy", "Entropy of the policy"],
    ["mismatch_kl", "Mismatch of trainer and sampler (KL)"],
    ["masked", "Fraction of trained tokens that the loss masks"],
    ["reference_kl", "KL to teacher or reference"],
    ["train/loss", "Loss"],
    ["train/grad_norm", "Gradient norm"],
    ["train/lr", "Learning rate"],
  ]],
  ["Rollouts", [
    ["trainable", "Fraction of groups that can be trained"],
    ["truncated", "Fraction of rollouts with a truncated reply"],
    ["tokens/sampled", "Sampled tokens per rollout"],
    ["turns/mean", "Model calls per rollout"],
    ["staleness/mean", "Staleness in steps, mean and maximum"],
    ["forest/token_ratio", "Tokens of all rollouts per forest token"],
  ]],
  ["Time and throughput", [
    ["time/step", "Seconds of a step"],
    ["time/train", "Seconds of a training step"],
    ["time/swap", "Seconds of a weight update"],
    ["tokens_per_s", "Sampled tokens per second"],
    ["train/tokens_per_second", "Trained tokens per second"],
    ["train/mfu", "Model FLOPs utilization"],
    ["utilization", "Least possible time of a step over its time"],
  ]],
];
const EVAL_CHARTS = { truncated: "Fraction of rollouts with a truncated reply", seconds: "Seconds of an eval", missing: "Rollouts without a reward" };
export async function showRun(run) {
  const data = { description: await get("run", { run }), points: {}, last: 0, names: [], polls: 0 };
  const page = makeRunPage(run, data);

  async function loadMetrics() {
    const known = new Set(data.names);
    const first = await get("metrics", { run });
    data.names = first.all_names;
    const wanted = listMetrics(data.names);
    if (!wanted.length) return;
    const isNew = wanted.some((name) => !known.has(name));
    const answer = await get("metrics", { run, name: wanted, after: isNew ? "" : data.last });
    if (isNew) data.points = {};
    for (const [name, points] of Object.entries(answer.points)) data.points[name] = (data.points[name] ?? []).concat(points);
    data.last = answer.last;
  }

  async function update() {
    if (!isLive(data.description.state) && ++data.polls % IDLE_POLLS) return; // it may be started or continued
    const before = JSON.stringify(data.description);
    data.description = await get("run", { run });
    if (!isLive(data.description.state) && JSON.stringify(data.description) === before) return;
    if (hasData(data.description)) await loadMetrics();
    page.update();
  }

  if (hasData(data.description)) await loadMetrics();
  return { node: page.node, title: run, update: isExport ? null : update, onShow: page.update };
}

function hasData(description) {
  return description.state !== "damaged" && description.state !== "planned";
}

function listMetrics(names) {
  const drawn = new Set(listCharts(names).flatMap((chart) => chart.series.map((series) => series.name)));
  return names.filter((name) => drawn.has(name) || AXIS_METRICS.includes(name) || isRewardMetric(name) || /^eval\/.+\/(avg|error)$/.test(name));
}

// The charts of a run with these metrics: heading, key, title and series. A reward or metric of the taskset has one chart,
// with a series for each source and each eval.
function listCharts(names) {
  const charts = new Map();
  const add = (group, key, title, name, label, dots = false) => {
    if (!charts.has(key)) charts.set(key, { group, key, title, series: [] });
    charts.get(key).series.push({ name, label, dots });
  };
  for (const name of names.filter((name) => !isRewardMetric(name))) {
    const [, kind, source, score] = name.match(/^(reward|metric)\/([^/]+)\/(.+)$/) ?? [];
    if (kind) add(0, `${kind}/${score}`, score, name, source);
    const [, evalName, evalKind, evalScore] = name.match(/^eval\/(.+?)\/(reward|metric)\/(.+)$/) ?? [];
    if (evalKind) add(0, `${evalKind}/${evalScore}`, evalScore, name, `eval/${evalName}`, true);
    const [, passEval, pass] = name.match(/^eval\/(.+)\/(pass[@^]\d+)$/) ?? [];
    if (pass && pass !== "pass^1") add(1, `pass/${passEval}`, `Pass rates of ${passEval}`, name, pass, true);
    const [, otherEval, other] = name.match(/^eval\/([^/]+)\/(truncated|seconds|missing)$/) ?? [];
    if (other) add(1, `eval/${other}`, EVAL_CHARTS[other], name, otherEval, true);
  }
  for (const [group, [, entries]] of CHART_GROUPS.entries()) {
    for (const [name, title] of entries.filter(([name]) => names.includes(name))) {
      add(group, name, title, name, name);
      if (name === "staleness/mean" && names.includes("staleness/max")) add(group, name, title, "staleness/max", "staleness/max");
    }
  }
  for (const chart of charts.values()) chart.series.sort((a, b) => a.dots - b.dots); // sources before evals
  const isLate = ({ group, key }) => Number(group === 1 && !key.startsWith("pass/")); // pass rates before the other evals
  return [...charts.values()].sort((a, b) => a.group - b.group || isLate(a) - isLate(b));
}

function isRewardMetric(name) {
  return /^reward\/.+\/mean$/.test(name);
}

export function runTabs(run, current) {
  const tabs = [["Overview", ["run", run]], ["Rollouts", ["run", run, "rollouts"]], ["Configuration", ["run", run, "config"]]];
  if (isExport) tabs.pop();
  return h("nav", { class: "tabs", "aria-label": "Parts of the run" }, tabs.map(([name, parts]) => h("a", { href: href(parts), "aria-current": name === current ? "page" : null }, name)));
}

function makeRunPage(run, data) {
  const settings = { x: "step", smoothing: 0, log: false };
  const head = h("div", { class: "title-row" });
  const stats = h("div", { class: "stats" });
  const rewardChart = new LineChart({ title: "reward", height: 280 });
  const rewardLegend = h("div", {});
  const flow = h("div", {});
  const processes = h("div", {});
  const waits = h("tbody", {});
  const failures = h("div", {});
  const events = h("div", {});
  const scores = h("div", {});
  const smallCharts = new Map(); // key -> chart, its panel and its legend
  let drawnCharts = []; // what `listCharts` returned last
  const grid = h("div", {});
  const summary = h("div", {});
  const controls = h(
    "div",
    { class: "controls" },
    chooser("Horizontal axis", Object.keys(X_AXES), settings.x, (value) => ((settings.x = value), drawCurves()), X_AXES),
    h("label", {}, "Smoothing ", h("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: 0, oninput: (event) => ((settings.smoothing = Number(event.target.value)), drawCurves()) })),
    h("label", {}, h("input", { type: "checkbox", onchange: (event) => ((settings.log = event.target.checked), drawCurves()) }), " Log axis"),
  );
  const rewardPanel = h("div", { class: "panel" }, h("div", { class: "panel-head" }, h("h2", {}, "Reward"), rewardLegend, h("div", { class: "spacer" }), controls), rewardChart.node);
  const waitPanel = h("div", { class: "panel" }, h("h2", {}, "Who waits for whom"), processes, h("div", { class: "waits-box", tabindex: "0", role: "group", "aria-label": "Waits" }, h("table", { class: "waits" }, h("thead", {}, h("tr", {}, ["Component", "Waits for", "Since"].map((name) => h("th", { scope: "col", class: name === "Since" ? "number" : null }, name)))), waits)));
  const flowPanel = h("div", { class: "panel" }, h("h2", {}, "Groups in the ledger"), flow);
  const columns = h("div", { class: "columns" });
  const tabs = runTabs(run, "Overview");
  const sections = [stats, scores, summary, rewardPanel, columns, failures, grid, events];
  const node = h("section", {}, head, tabs, sections);

  function layOutCharts() {
    const charts = listCharts(data.names);
    if (JSON.stringify(charts) === JSON.stringify(drawnCharts)) return;
    drawnCharts = charts;
    for (const { key, title, series } of charts) {
      if (smallCharts.has(key)) continue;
      const chart = new LineChart({ title, height: 150 }), legendBox = h("div", {});
      const name = series.length > 1 || series[0].name === title ? null : h("code", { class: "muted" }, series[0].name);
      smallCharts.set(key, { chart, legendBox, panel: h("div", { class: "panel" }, h("h3", {}, title, " ", name), legendBox, chart.node) });
    }
    const groups = CHART_GROUPS.map(([heading], group) => [heading, charts.filter((chart) => chart.group === group)]);
    fill(grid, groups.filter(([, members]) => members.length).map(([heading, members]) => h("section", { class: "chart-group" }, h("h2", {}, heading), h("div", { class: "chart-grid" }, members.map(({ key }) => smallCharts.get(key).panel)))));
  }

  function drawCurves() {
    const formatX = settings.x === "time" ? formatSeconds : formatCount;
    const changes = { smoothing: settings.smoothing, isLog: settings.log, xLabel: X_AXES[settings.x], formatX };
    const series = listRewardSeries(data, settings.x);
    rewardChart.update(series, changes);
    fill(rewardLegend, legend(series));
    for (const { key, series } of drawnCharts) {
      const entries = series.map(({ name, label, dots }, at) => ({ label, dots, color: SERIES_COLORS[at % SERIES_COLORS.length], points: selectPoints(data.points, name, settings.x) }));
      const { chart, legendBox } = smallCharts.get(key);
      chart.update(entries, changes);
      fill(legendBox, entries.length > 1 ? legend(entries) : null);
    }
  }

  function update() {
    const { description } = data;
    fill(head, h("h1", {}, run), statePill(description.state), h("span", { class: "muted" }, [description.kind, description.model, description.sources.join(", ")].filter(Boolean).join(" · ")), h("div", { class: "spacer" }), description.rollouts > 0 && !isExport && [worstLink(run, description), h("a", { class: "button", href: href(["run", run, "rollouts"], { error: "any" }) }, "Rollouts with errors")]);
    if (!hasData(description)) {
      const text = description.state === "damaged" ? [description.problem, "ramify why RUN --audit checks every file of a run."] : ["The run has a configuration, but it was not started."];
      fill(node, head, tabs, notice(description.state === "damaged" ? "This run cannot be read" : "Not started", ...text));
      return;
    }
    if (stats.parentElement !== node) fill(node, head, tabs, sections);
    fill(stats, makeStats(data).map(([label, value, detail]) => h("div", { class: "stat" }, h("div", { class: "stat-label" }, label), h("div", { class: "stat-value" }, value), h("div", { class: "stat-detail" }, detail ?? ""))));
    fill(scores, description.scores.length ? showScores(description.scores) : null);
    fill(summary, description.summary.length ? showSummary(description.summary) : null);
    const isTraining = description.kind !== "eval";
    rewardPanel.hidden = !isTraining || !data.names.some(isRewardMetric);
    fill(processes, description.state === "running" ? drawProcesses(description) : null);
    fill(waits, listWaits(description));
    fill(flow, Object.keys(description.flow).length ? drawFlow(run, description) : null);
    const panels = [isLive(description.state) && description.kind === "rl" ? waitPanel : null, Object.keys(description.flow).length ? flowPanel : null].filter(Boolean);
    if (panels.length !== columns.children.length || panels.some((panel, at) => columns.children[at] !== panel)) fill(columns, panels);
    fill(failures, description.failures.length ? showFailures(run, description.failures) : null);
    fill(events, showEvents(description.events));
    layOutCharts();
    drawCurves();
  }

  return { node, update };
}

function worstLink(run, description) {
  return h("a", { class: "button", href: href(["run", run, "rollouts"], { sort: "reward", order: "asc", source: description.kind === "rl" ? description.sources[0] : "" }) }, "Worst rollouts");
}

function listRewardSeries(data, axis) {
  const sources = data.names.filter((name) => isRewardMetric(name) && name !== "reward/all/mean");
  const names = sources.length > 1 ? ["reward/all/mean", ...sources] : sources.length ? sources : data.names.filter(isRewardMetric);
  const evals = data.names.filter((name) => /^eval\/.+\/avg$/.test(name));
  return [
    ...names.map((name, at) => ({ label: name.split("/").slice(1, -1).join("/"), color: SERIES_COLORS[at % SERIES_COLORS.length], points: selectPoints(data.points, name, axis) })),
    ...evals.map((name, at) => {
      const errors = selectPoints(data.points, name.replace(/avg$/, "error"), axis).map(([x, error]) => [x, 1.96 * error]);
      return { label: `${name.split("/").slice(0, -1).join("/")} (95 %)`, color: SERIES_COLORS[(names.length + at) % SERIES_COLORS.length], points: selectPoints(data.points, name, axis), errors: new Map(errors), dots: true };
    }),
  ];
}

function lastValue(data, name) {
  return data.points[name]?.at(-1)?.[1] ?? null;
}

function makeStats(data) {
  const { description } = data;
  if (description.kind === "eval") return [["Rollouts", formatCount(description.rollouts)], ["Reward", formatNumber(description.reward), "mean of counted rollouts"], ["Tasks", formatCount(description.scores[0]?.tasks)]];
  if (description.kind === "sft") return [["Loss", formatNumber(lastValue(data, "train/loss"))], makeStepStat(description), ["Tokens per second", formatCount(lastValue(data, "train/tokens_per_second")), "trained"]];
  const first = data.points["reward/all/mean"]?.[0]?.[1];
  const evalName = data.names.find((name) => /^eval\/.+\/avg$/.test(name));
  const error = evalName ? lastValue(data, evalName.replace(/avg$/, "error")) : null;
  const status = description.status;
  return [
    ["Reward", formatNumber(description.reward), first === undefined ? "" : `from ${formatNumber(first)}`],
    evalName && [evalName.split("/").slice(0, -1).join("/"), formatNumber(lastValue(data, evalName)), error === null ? "" : `± ${formatNumber(1.96 * error)} (95 %)`],
    makeStepStat(description),
    ["Rollouts", formatCount(description.rollouts), status.rollouts_per_s ? `${formatNumber(status.rollouts_per_s)} per second` : ""],
    ["Tokens per second", formatCount(status.tokens_per_s || lastValue(data, "tokens_per_s")), "sampled"],
    ["Staleness", formatNumber(lastValue(data, "staleness/mean")), `at most ${formatCount(lastValue(data, "staleness/max"))}`],
    ["Truncated", formatPercent(lastValue(data, "truncated")), "of the rollouts of the last step"],
    ["Shared prefixes", lastValue(data, "forest/token_ratio") === null ? "–" : `${formatNumber(lastValue(data, "forest/token_ratio"))} ×`, "tokens per forest token"],
  ].filter(Boolean);
}

function makeStepStat({ status, progress, step, max_steps }) {
  const detail = status.eta_s ? `${formatSeconds(status.eta_s)} left` : progress?.committed ? `checkpoint at step ${formatCount(progress.committed)}` : "";
  return ["Steps", `${formatCount(step)}${max_steps ? ` / ${formatCount(max_steps)}` : ""}`, detail];
}

function showScores(scores) {
  const rows = scores.map((score) => {
    const [low, high] = score.interval ?? [score.mean, score.mean];
    const bar = h("span", { class: "interval", "aria-hidden": "true" }, h("span", { class: "interval-range", style: { left: `${clip(low) * 100}%`, width: `${Math.max(0.4, (clip(high) - clip(low)) * 100)}%` } }), h("span", { class: "interval-mean", style: { left: `${clip(score.mean) * 100}%` } }));
    return h("tr", {}, h("th", { scope: "row" }, score.name), h("td", { class: "number" }, formatNumber(score.mean)), h("td", {}, bar), h("td", { class: "muted" }, score.interval ? `${formatNumber(low)} to ${formatNumber(high)}` : "one task"), h("td", { class: "muted" }, plural(score.tasks, "task")));
  });
  return h("div", { class: "panel" }, h("h2", {}, "Scores"), h("div", { class: "table-box" }, h("table", { class: "scores" }, h("thead", {}, h("tr", {}, ["Score", "Mean", "0 to 1", "95 % interval", "Tasks"].map((name) => h("th", { scope: "col", class: name === "Mean" ? "number" : null }, name)))), h("tbody", {}, rows))));
}

function showSummary(summary) {
  return h("div", { class: "panel" }, h("h2", {}, "Rewards, metrics, truncation and timing"), h("dl", { class: "key-values" }, summary.map(([name, value]) => [h("dt", {}, name), h("dd", { dir: "auto" }, value)])));
}

function clip(value) {
  return Math.max(0, Math.min(1, value));
}

function listWaits(description) {
  const waits = [...description.wait_list].sort((a, b) => (b.since_s ?? 0) - (a.since_s ?? 0));
  if (!waits.length) return h("tr", {}, h("td", { class: "muted" }, "Nothing is waiting."));
  return waits.map((wait) =>
    h("tr", { title: wait.detail ?? "" }, h("th", { scope: "row" }, wait.who), h("td", {}, wait.waits_for), h("td", { class: "number" }, formatSeconds(wait.since_s ?? 0), wait.deadline_s ? h("span", { class: "muted" }, ` of ${formatSeconds(wait.deadline_s)}`) : null)),
  );
}

function showFailures(run, failures) {
  const rows = failures.map((failure) => {
    const link = h("a", { href: href(["run", run, "rollouts"], { error: failure.name }) }, failure.name);
    const row = h(
      "tr",
      {},
      h("td", { class: "number" }, formatCount(failure.count)),
      h("th", { scope: "row" }, isExport ? failure.name : link),
      h("td", {}, h("span", { class: `blame blame-${failure.blame}` }, failure.blame)),
      h("td", {}, failure.origin),
      h("td", { class: "failure-message", title: failure.message }, failure.message),
    );
    return isExport ? row : linkRow(row, link);
  });
  return h("div", { class: "panel" }, h("h2", {}, "Failures"), h("div", { class: "table-box" }, h("table", { class: "failures" }, h("thead", {}, h("tr", {}, ["Count", "Name", "Blame", "Where", "Last message"].map((name, at) => h("th", { scope: "col", class: at ? null : "number" }, name)))), h("tbody", {}, rows))));
}

function showEvents(events) {
  if (!events.length) return null;
  const showField = ([name, value], at) => [at ? ", " : "", term(name), ` ${typeof value === "object" ? JSON.stringify(value) : value}`];
  const rows = [...events].reverse().map((event) => h("li", {}, h("time", { class: "muted" }, formatTime(event.time)), " ", h("b", {}, event.kind.replaceAll("_", " ")), " ", Object.entries(event.fields).map(showField)));
  return h("div", { class: "panel" }, h("h2", {}, "Events"), h("ul", { class: "events" }, rows));
}

export async function showConfig(run) {
  const config = await get("config", { run });
  const text = config.text || "The run has no config.toml that can be read.";
  return { node: h("section", {}, h("div", { class: "title-row" }, h("h1", {}, run)), runTabs(run, "Configuration"), h("pre", { class: "panel code-block", tabindex: "0" }, text)), title: `${run} configuration` };
}
