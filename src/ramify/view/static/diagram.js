// Small diagrams of a run: its processes and who waits for whom, and how many groups are in each state of the ledger.

import { isExport } from "./api.js";
import { formatCount, h, svg } from "./dom.js";
import { href } from "./routes.js";
import { term } from "./terms.js";

const BOX_SIZE = { width: 132, height: 46 };
const BOX_POSITIONS = { envs: [16, 20], orchestrator: [214, 20], trainer: [412, 20], engine: [214, 124] };
const BOX_LABELS = { envs: "env servers", orchestrator: "orchestrator", trainer: "trainer", engine: "inference" };
// By the `who` of a wait: the box that waits, and the one that it waits for.
const WAIT_EDGES = {
  sampling: ["orchestrator", "envs"],
  orchestrator: ["orchestrator", "trainer"],
  trainer: ["trainer", "orchestrator"],
  weights: ["orchestrator", "engine"],
  client: ["orchestrator", "engine"],
  scoring: ["orchestrator", "engine"],
  "env servers": ["envs", "engine"],
};
const EDGES = [["orchestrator", "envs"], ["orchestrator", "trainer"], ["orchestrator", "engine"], ["envs", "engine"]];

export function drawProcesses(description) {
  const waits = description.wait_list.map((wait) => WAIT_EDGES[wait.who] ?? (wait.who.startsWith("eval ") ? ["orchestrator", "envs"] : null)).filter(Boolean);
  const isWaiting = (from, to) => waits.some(([a, b]) => a === from && b === to);
  const text = description.wait_list.map((wait) => `${wait.who} waits for ${wait.waits_for}`).join("; ") || "nothing is waiting";
  return svg(
    "svg",
    { class: "processes", viewBox: "0 0 560 188", role: "img", "aria-label": text },
    svg("defs", {}, svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" }, svg("path", { d: "M0 0L8 4L0 8Z" }))),
    EDGES.map(([a, b]) => drawEdge(a, b, isWaiting(a, b), isWaiting(b, a))),
    Object.keys(BOX_POSITIONS).map((box) => drawBox(box, description.processes.filter((process) => belongsTo(process.name, box)))),
  );
}

function belongsTo(process, box) {
  if (box === "envs") return process.startsWith("env/");
  if (box === "engine") return process.startsWith("inference") || process.startsWith("model");
  return process === box || process.startsWith(`${box}/`);
}

function drawBox(box, processes) {
  const [x, y] = BOX_POSITIONS[box];
  const states = [...new Set(processes.map((process) => process.state))];
  const restarts = processes.reduce((sum, process) => sum + (process.restarts ?? 0), 0);
  const detail = [processes.length > 1 ? `${processes.length} ×` : "", states.join(", ") || "external", restarts ? `↻ ${restarts}` : ""].filter(Boolean).join(" ");
  const state = states.length === 1 && states[0] === "ready" ? "ready" : states.length ? "busy" : "external";
  return svg(
    "g",
    { class: `process process-${state}` },
    svg("rect", { x, y, width: BOX_SIZE.width, height: BOX_SIZE.height, rx: 8 }),
    svg("text", { class: "process-name", x: x + BOX_SIZE.width / 2, y: y + 20, "text-anchor": "middle" }, BOX_LABELS[box]),
    svg("text", { class: "process-state", x: x + BOX_SIZE.width / 2, y: y + 36, "text-anchor": "middle" }, detail),
  );
}

function drawEdge(a, b, forward, backward) {
  const [ax, ay] = BOX_POSITIONS[a], [bx, by] = BOX_POSITIONS[b];
  const from = { x: ax + BOX_SIZE.width / 2, y: ay + BOX_SIZE.height / 2 }, to = { x: bx + BOX_SIZE.width / 2, y: by + BOX_SIZE.height / 2 };
  let d;
  if (ay === by) {
    const sign = Math.sign(to.x - from.x);
    d = `M${from.x + (sign * BOX_SIZE.width) / 2 + sign * 4} ${from.y}L${to.x - (sign * BOX_SIZE.width) / 2 - sign * 4} ${to.y}`;
  } else if (ax === bx) {
    d = `M${from.x} ${ay + BOX_SIZE.height + 4}L${to.x} ${by - 4}`;
  } else {
    d = `M${from.x} ${ay + BOX_SIZE.height + 4}C${from.x} ${to.y} ${from.x} ${to.y} ${bx - 4} ${to.y}`;
  }
  return svg("path", { class: `edge${forward || backward ? " edge-waiting" : ""}`, d, "marker-end": forward ? "url(#arrow)" : null, "marker-start": backward ? "url(#arrow)" : null });
}

const FLOW_STATES = ["issued", "sampled", "scored", "batched", "trained"];

export function drawFlow(run, description) {
  const { flow, drops } = description;
  const total = Object.values(flow).reduce((sum, count) => sum + count, 0) || 1;
  const dropped = flow.dropped ?? 0;
  const link = (state, content) => isExport ? h("span", {}, content) : h("a", { href: href(["run", run, "rollouts"], { state }) }, content);
  const bar = h("div", { class: "flow-bar", "aria-hidden": "true" }, [...FLOW_STATES].reverse().concat("dropped").map((state) => h("span", { class: `flow-${state}`, style: { "flex-grow": String(flow[state] ?? 0) } })));
  const boxes = FLOW_STATES.flatMap((state, at) => [
    at ? h("span", { class: "flow-arrow", "aria-hidden": "true" }, "→") : null,
    h("div", { class: `flow-box flow-box-${state}` }, link(state, [h("b", {}, formatCount(flow[state] ?? 0)), h("span", {}, state)])),
  ]);
  const reasons = drops.map((drop) => h("li", {}, h("b", {}, formatCount(drop.groups)), ` ${drop.reason ?? "?"}`, drop.detail ? h("span", { class: "muted" }, " ", term(drop.detail)) : null));
  return h(
    "div",
    { class: "flow" },
    h("p", { class: "muted" }, `${formatCount(total)} groups issued so far; where they are now:`),
    h("div", { class: "flow-boxes" }, boxes),
    bar,
    h("div", { class: "flow-dropped" }, link("dropped", [h("b", {}, formatCount(dropped)), " dropped"]), h("span", { class: "muted" }, ` ${Math.round((100 * dropped) / total)} % of all groups`), h("ul", {}, reasons)),
  );
}
