// One rollout as the tree it is: an outline that folds, and the messages or tokens of the branch that is selected.

import { buildUrl, get, isExport } from "./api.js";
import { IncrementalList, code, fill, formatCount, formatNumber, formatSeconds, h, plural } from "./dom.js";
import { codeBlock, prettyJson, renderText } from "./highlight.js";
import { href, replaceAddress } from "./routes.js";
import { advantageText } from "./rollouts.js";
import { describeGroupState } from "./terms.js";
import { TokenPane } from "./tokens.js";

// The phases of a rollout in their order, each with the number of its colour.
const PHASES = [["boot", 8], ["setup", 3], ["model", 1], ["harness", 4], ["finalize", 6], ["scoring", 2], ["stalled", 5]];

export async function showRollout(run, id, params) {
  const rollout = await get("rollout", { run, id });
  const state = {
    trace: Math.min(Number(params.get("trace") ?? 0), rollout.traces.length - 1),
    tab: params.get("tab") === "tokens" ? "tokens" : "messages",
    node: params.has("node") ? Number(params.get("node")) : null,
    measure: params.get("measure") ?? "",
  };
  const body = h("div", {});
  const tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "Messages or tokens" });
  let pane = null;

  function updateAddress() {
    if (!isExport) replaceAddress(["run", run, "rollout", id], { trace: state.trace || "", tab: state.tab === "tokens" ? "tokens" : "", node: state.node ?? "", measure: state.measure });
  }

  function openTab(name) {
    state.tab = name;
    draw();
    showCostliest();
  }

  function showCostliest() {
    if (state.tab === "tokens" && state.node === null) pane.showCostliest();
  }

  function draw() {
    pane?.close();
    const trace = rollout.traces[state.trace];
    fill(tabs, ["messages", "tokens"].map((name) => h("button", { type: "button", role: "tab", "aria-selected": String(state.tab === name), onclick: () => openTab(name) }, name === "messages" ? "Messages" : "Tokens")), rollout.traces.length > 1 ? agentButtons() : null);
    const tree = makeTree(trace);
    const messages = h("div", { class: "messages" });
    const outline = h("nav", { class: "outline", "aria-label": "Outline of the rollout" });
    const select = (node, token = null) => {
      state.node = node;
      drawBranch();
      updateAddress();
      messages.querySelector(`[data-node="${node}"]`)?.scrollIntoView({ block: "start" });
      if (token) pane.goTo(token);
    };
    const folded = new Set();
    const drawBranch = () => {
      pane?.close();
      const path = tree.pathThrough(state.node ?? tree.lastNode);
      fill(outline, drawOutline(tree, new Set(path), state.node, select, folded, drawBranch));
      if (state.tab === "tokens") {
        pane = new TokenPane(run, rollout, state.trace, path.map((index) => trace.nodes[index]), state.measure, (measure) => ((state.measure = measure), updateAddress()), select);
        fill(messages, pane.node);
      } else {
        fill(messages);
        pane = new IncrementalList(messages, path, (index) => drawMessage(run, rollout, state.trace, trace.nodes[index], tree, state.node, select));
      }
      pane.appendUntil(path.indexOf(state.node) + 1);
    };
    drawBranch();
    fill(body, h("div", { class: "rollout-columns" }, outline, messages));
    updateAddress();
  }

  function agentButtons() {
    return rollout.traces.map((trace, number) => h("button", { type: "button", role: "tab", "aria-selected": String(number === state.trace), onclick: () => ((state.trace = number), (state.node = null), draw()) }, trace.agent || `agent ${number}`));
  }

  draw();
  const node = h("section", {}, drawHeader(run, rollout), tabs, body);
  const onShow = () => {
    if (state.node !== null) body.querySelector(`[data-node="${state.node}"]`)?.scrollIntoView({ block: "start" });
    showCostliest();
  };
  return { node, title: `Rollout ${id}`, onShow, close: () => pane?.close(), keepsScroll: false };
}

// The tree of a trace: children by node, and paths from a root through a node to the last leaf below it.
export function makeTree(trace) {
  const children = trace.nodes.map(() => []);
  const roots = [];
  for (const node of trace.nodes) (node.parent < 0 ? roots : children[node.parent]).push(node.index);
  const pathThrough = (index) => {
    const path = [];
    for (let at = index; at >= 0; at = trace.nodes[at].parent) path.unshift(at);
    for (let at = index; children[at]?.length; ) path.push((at = children[at].at(-1)));
    return path;
  };
  return { nodes: trace.nodes, children, roots, pathThrough, lastNode: trace.nodes.length - 1, siblings: (node) => (node.parent < 0 ? roots : children[node.parent]) };
}

function drawHeader(run, rollout) {
  const trace = rollout.traces[0];
  const { group } = rollout;
  const groupLink = group ? href(["run", run, "group", group.number], { rollout: rollout.id }) : href(["run", run, "group", "task"], { source: rollout.source, task: rollout.task, rollout: rollout.id });
  const facts = [
    ["Reward", formatNumber(rollout.reward), listRewards(trace)],
    group && ["Advantage", advantageText(rollout.advantage), describeGroupState(group)],
    ...Object.entries(trace.metrics).map(([name, value]) => [name, formatNumber(value), "metric"]),
    ["End", rollout.failure ?? (rollout.stop || "–"), rollout.truncated ? "a reply was truncated" : ""],
    ["Tokens", formatCount(sum(rollout.traces, "tokens")), `${formatCount(sum(rollout.traces, "sampled"))} sampled`],
    ["Branches", formatCount(sum(rollout.traces, "branches")), rollout.traces.length > 1 ? `${rollout.traces.length} agents` : ""],
  ].filter(Boolean);
  return h(
    "div",
    {},
    h(
      "div",
      { class: "title-row" },
      h("h1", {}, "Rollout ", h("span", { class: "mono-title" }, rollout.id)),
      h("span", { class: "muted" }, rollout.source),
      h("div", { class: "spacer" }),
      h("a", { class: "button", href: groupLink }, group ? `Group ${group.number}: all attempts` : "All attempts"),
      isExport ? null : [h("a", { class: "button", href: buildUrl("file", { run, id: rollout.id, format: "json" }), download: true }, "JSON"), h("a", { class: "button", href: buildUrl("file", { run, id: rollout.id, format: "md" }), download: true }, "Markdown")],
    ),
    h(
      "div",
      { class: "panel" },
      h("dl", { class: "facts" }, facts.map(([name, value, detail]) => h("div", { class: "fact" }, h("dt", {}, name), h("dd", {}, value, detail ? [" ", h("small", {}, detail)] : null)))),
      drawTiming(rollout.timing),
      trace.errors.map((error) => h("p", { class: "bad" }, h("b", {}, error.name), ` (${error.blame}) ${error.message}`)),
      trace.refusals.map((entry) => h("p", { class: "bad" }, `The gateway refused ${entry.path}: ${entry.status} ${entry.name}: ${entry.message}`)),
      keyValues("Task and info", [...Object.entries(trace.task), ...Object.entries(trace.info)]),
    ),
  );
}

function keyValues(title, entries) {
  if (!entries.length) return null;
  return h("details", { class: "more" }, h("summary", {}, title), h("dl", { class: "key-values" }, entries.map(([name, value]) => [h("dt", {}, name), h("dd", { dir: "auto" }, String(value))])));
}

function listRewards(trace) {
  const describe = ([value, weight]) => `${formatNumber(value)}${weight === 1 ? "" : ` with weight ${Number(weight.toFixed(3))}`}`;
  return Object.entries(trace.rewards).map(([name, entry]) => `${name} ${entry ? describe(entry) : "missing"}`).join(", ");
}

function sum(traces, name) {
  return traces.reduce((total, trace) => total + trace[name], 0);
}

function drawTiming(timing) {
  // `harness` includes `model` and `stalled`, which are shown beside its rest.
  const rest = Math.max(0, (timing.harness ?? 0) - (timing.model ?? 0) - (timing.stalled ?? 0));
  const phases = PHASES.map(([name, color]) => [name, name === "harness" ? rest : (timing[name] ?? 0), color]).filter(([, seconds]) => seconds > 0);
  if (!phases.length) return null;
  const total = phases.reduce((seconds, phase) => seconds + phase[1], 0);
  return h(
    "div",
    {},
    h("div", { class: "timing", "aria-hidden": "true" }, phases.map(([, seconds, color]) => h("span", { style: { "flex-grow": String(seconds / total), "--series": `var(--series-${color})` } }))),
    h("div", { class: "legend" }, phases.filter(([, seconds]) => seconds / total > 0.001).map(([name, seconds, color]) => h("span", { class: "legend-entry" }, h("span", { class: "swatch", style: { "--series": `var(--series-${color})` } }), `${name} ${formatSeconds(seconds)}`))),
  );
}

// Nodes without a fork form a list; a fork opens a level, one part per branch, that can be folded.
function drawOutline(tree, path, selected, select, folded, redraw) {
  const drawChain = (start) => {
    const chain = [start];
    while (tree.children[chain.at(-1)].length === 1) chain.push(tree.children[chain.at(-1)][0]);
    const last = chain.at(-1), list = h("div", {});
    new IncrementalList(list, chain, (index) => outlineRow(tree.nodes[index], path, selected, select));
    return tree.children[last].length ? [list, drawFork(last, tree.children[last])] : list;
  };
  const drawFork = (key, starts) => {
    const isFolded = folded.has(key);
    const toggle = () => {
      if (isFolded) folded.delete(key);
      else folded.add(key);
      redraw();
    };
    return h(
      "div",
      {},
      h("button", { type: "button", class: "outline-fold", "aria-expanded": String(!isFolded), onclick: toggle }, `${isFolded ? "▸" : "▾"} ${plural(starts.length, "branch").replace("branchs", "branches")}`),
      isFolded ? null : starts.map((start) => h("div", { class: "outline-fork" }, drawChain(start))),
    );
  };
  return tree.roots.length === 1 ? drawChain(tree.roots[0]) : drawFork(-1, tree.roots);
}

function outlineRow(node, path, selected, select) {
  const text = node.text.replace(/```+\w*/g, "").trim().slice(0, 80) || node.calls?.map((call) => `→ ${call.name}`).join(" ") || "–";
  return h(
    "button",
    { type: "button", class: `outline-row role-${node.role}${path.has(node.index) ? "" : " off-path"}`, "aria-current": node.index === selected ? "true" : null, title: `${node.role}, ${plural(node.tokens, "token")}`, onclick: () => select(node.index) },
    h("span", { class: "role-dot", "aria-hidden": "true" }),
    h("span", { class: "hidden" }, node.role),
    h("span", { class: "outline-text", dir: "auto" }, text),
    h("span", { class: "outline-count" }, node.sampled ? formatCount(node.sampled) : ""),
  );
}

export function messageHead(node, tree, select) {
  const siblings = tree.siblings(node);
  const at = siblings.indexOf(node.index);
  return h(
    "header",
    {},
    h("b", {}, node.role),
    h("span", { class: "mono" }, `[${node.index}]`),
    node.tokens ? h("span", {}, plural(node.tokens, "token"), node.sampled ? `, ${formatCount(node.sampled)} sampled` : "") : node.usage ? h("span", {}, `${formatCount(node.usage.prompt_tokens)} in, ${formatCount(node.usage.completion_tokens)} out`) : null,
    node.finish ? h("span", {}, node.finish) : null,
    node.seconds && node.seconds[1] > node.seconds[0] ? h("span", {}, formatSeconds(node.seconds[1] - node.seconds[0])) : null,
    siblings.length > 1
      ? h("span", { class: "branch-switch" }, h("button", { type: "button", disabled: at === 0, "aria-label": "Previous branch", onclick: () => select(siblings[at - 1]) }, "‹"), `branch ${at + 1} of ${siblings.length}`, h("button", { type: "button", disabled: at === siblings.length - 1, "aria-label": "Next branch", onclick: () => select(siblings[at + 1]) }, "›"))
      : null,
    node.fork ? h("span", { class: "badge badge-fork", title: node.fork.detail ?? "" }, `fork: ${node.fork.reason ?? "branch"}`) : null,
    node.untrained ? h("span", { class: "badge badge-untrained" }, node.untrained) : null,
  );
}

function drawMessage(run, rollout, trace, node, tree, selected, select) {
  const text = h("div", {}, renderText(node.text));
  return h(
    "article",
    { class: `message role-${node.role}${node.index === selected ? " selected" : ""}`, "data-node": node.index, style: { "contain-intrinsic-size": `auto ${60 + Math.min(900, Math.ceil(node.chars / 110) * 21)}px` } },
    messageHead(node, tree, select),
    h(
      "div",
      { class: "message-body" },
      node.reasoning ? h("details", { class: "reasoning", open: true }, h("summary", {}, "Reasoning"), renderText(node.reasoning)) : null,
      text,
      node.chars > node.shown ? (isExport ? h("p", { class: "muted" }, `${formatCount(node.chars - node.shown)} more characters are not in this file.`) : moreButton(run, rollout, trace, node, text)) : null,
      (node.media ?? []).map((media) => drawMedia(run, rollout, media)),
      (node.calls ?? []).map((call) => h("div", { class: "call" }, h("span", { class: "call-name" }, `→ ${call.name}`), codeBlock(prettyJson(call.arguments) ?? call.arguments))),
      !node.chars && !node.calls && !node.media && !node.reasoning ? h("span", { class: "muted" }, "empty") : null,
    ),
  );
}

// A long message is shown from its beginning; the rest is fetched in parts and shown as plain text. Positions come from
// the server, which counts code points: a character of a JavaScript string may be half of one.
function moreButton(run, rollout, trace, node, container) {
  let shown = node.shown;
  const button = h("button", { type: "button", onclick: load }, label());
  function label() {
    return `Show more: ${formatCount(node.chars - shown)} of ${formatCount(node.chars)} characters are hidden`;
  }
  async function load() {
    const part = await get("message", { run, id: rollout.id, trace, node: node.index, start: shown });
    container.append(h("div", { class: "prose", dir: "auto" }, part.text));
    shown = part.stop;
    button.textContent = label();
    button.hidden = shown >= node.chars;
  }
  return button;
}

function drawMedia(run, rollout, media) {
  const label = `${media.mime || "media"} ${media.hash.slice(0, 12)}`;
  if (isExport || !media.mime.startsWith("image/")) return h("p", { class: "muted" }, code(label));
  const image = h("img", { src: buildUrl("media", { run, id: rollout.id, hash: media.hash }), alt: label, loading: "lazy" });
  image.addEventListener("error", () => image.replaceWith(h("p", { class: "muted" }, code(label), " is not stored with the run.")));
  return image;
}

