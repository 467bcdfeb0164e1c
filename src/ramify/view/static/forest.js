// The merged forest of a group: every token once, as wide as the tokens of its path, as high as the attempts that share it.

import { divergingColor } from "./colors.js";
import { fill, findRange, formatCount, formatNumber, formatSigned, h, makeVisible, plural, svg } from "./dom.js";
import { href } from "./routes.js";

const ROW = 26; // height of one attempt
const LABEL_WIDTH = 196;
const TEXT_WIDTH = 7.4; // of a character in a cell
const MIN_CELL = 3; // a path with more tokens than fit is scrolled
const MAX_CELL = 60;
const MAX_CELL_CHARS = 9; // a longer text of a token is cut; the tooltip has all of it
const CONTEXT_CELL = 3.2; // width of a token that is not trained
const CONTEXT_RUN = 240; // largest width of consecutive tokens that no attempt trains, such as a long result of a tool
const MAX_DRAWN = 12000; // token cells with a text; more are drawn as stripes
const MAX_WIDTH = 30000; // of a forest with texts, which is scrolled
const HEADER = 22; // height of the names of the columns

export function drawForest(run, forest, { width = 1100, selected = null } = {}) {
  const layout = layOutRows(forest);
  const depth = Math.max(1, findRange(forest.segments.map((segment) => segment.depth + segment.length))[1]);
  const maxAdvantage = Math.max(0.001, findRange(forest.segments.flatMap((segment) => segment.values.map((value) => Math.abs(value ?? 0))))[1]);
  const columns = layOutColumns(forest, depth, width - LABEL_WIDTH - 16);
  const height = layout.rows.length * ROW + 4 + HEADER;
  const tooltip = h("div", { class: "forest-tip", role: "status" });
  const area = svg("svg", { class: "forest", width: columns.total + 2, height, viewBox: `0 0 ${columns.total + 2} ${height}`, role: "img", "aria-label": describeForest(forest) });
  forest.segments.forEach((segment, number) => segment.attempts.length && area.append(drawSegment(segment, layout.rowRanges[number], columns, maxAdvantage)));
  const labels = svg("svg", { class: "forest-labels", width: LABEL_WIDTH, height, viewBox: `0 0 ${LABEL_WIDTH} ${height}` }, [["Attempt", 10, "start"], ["Reward", 116, "end"], ["Advantage", 190, "end"]].map(([name, x, anchor]) => svg("text", { class: "tick", x, y: 14, "text-anchor": anchor }, name)), layout.rows.map((number, row) => drawLabel(run, forest.attempts[number], row, selected)));
  area.addEventListener("pointermove", (event) => showTip(tooltip, event, forest));
  area.addEventListener("pointerleave", () => fill(tooltip));
  return h("div", { class: "forest-box" }, h("div", { class: "forest-scroll", tabindex: "0", role: "group", "aria-label": "Forest" }, area), labels, tooltip);
}

export function describeForest(forest) {
  const tokens = `${formatCount(forest.flat_tokens)} tokens of ${plural(forest.attempts.length, "attempt")}`;
  if (forest.flat_tokens <= forest.tokens) return `${tokens}, none of them shared`;
  return `${tokens} are computed as ${formatCount(forest.tokens)}: ${(forest.flat_tokens / forest.tokens).toFixed(1)} × fewer`;
}

// Give every branch of every attempt one row, in depth-first order, and every segment the rows of the paths through it.
function layOutRows(forest) {
  const rows = []; // the attempt of each row
  const children = forest.segments.map(() => []);
  const rowRanges = forest.segments.map(() => [0, 0]);
  forest.segments.forEach((segment, number) => segment.parent >= 0 && children[segment.parent].push(number));
  const visit = (number) => {
    const start = rows.length;
    const sortedChildren = [...children[number]].sort((a, b) => meanAdvantage(forest, b) - meanAdvantage(forest, a));
    sortedChildren.forEach(visit);
    const continuing = new Set(sortedChildren.flatMap((child) => forest.segments[child].attempts));
    rows.push(...forest.segments[number].attempts.filter((attempt) => !continuing.has(attempt))); // those that end here
    rowRanges[number] = [start, rows.length];
  };
  forest.segments.forEach((segment, number) => segment.parent < 0 && visit(number));
  return { rows, rowRanges };
}

function meanAdvantage(forest, number) {
  const values = forest.segments[number].attempts.map((attempt) => forest.attempts[attempt].advantage ?? 0);
  return values.reduce((sum, value) => sum + value, 0) / (values.length || 1);
}

// The width of each depth: as wide as its longest text, if everything fits; else all are equal.
function layOutColumns(forest, depth, availableWidth) {
  const widths = new Array(depth).fill(8);
  let cells = 0;
  for (const segment of forest.segments) {
    cells += segment.length;
    segment.texts?.forEach((text, at) => {
      const isTrained = segment.values[at] !== null;
      const size = isTrained ? shortToken(text).length * TEXT_WIDTH + 9 : CONTEXT_CELL;
      widths[segment.depth + at] = Math.max(widths[segment.depth + at] === 8 ? 0 : widths[segment.depth + at], size);
    });
  }
  compressContext(widths);
  const total = widths.reduce((sum, width) => sum + width, 0);
  const isReadable = forest.segments[0]?.texts && total <= MAX_WIDTH && cells <= MAX_DRAWN;
  const equal = Math.max(MIN_CELL, Math.min(MAX_CELL, availableWidth / depth));
  const scale = isReadable && total < availableWidth ? Math.min(1.6, availableWidth / total) : 1;
  const starts = [0];
  for (let at = 0; at < depth; at++) starts.push(starts[at] + (isReadable ? widths[at] * scale : depth * MIN_CELL > 6000 ? 6000 / depth : equal));
  return { starts, total: starts[depth], isReadable };
}

// Narrow the columns that hold only tokens that are not trained, so that the trained ones stay readable.
function compressContext(widths) {
  for (let start = 0; start < widths.length; start++) {
    if (widths[start] !== CONTEXT_CELL) continue;
    let stop = start;
    while (widths[stop] === CONTEXT_CELL) stop++;
    widths.fill(Math.min(CONTEXT_CELL, CONTEXT_RUN / (stop - start)), start, stop);
    start = stop;
  }
}

function drawSegment(segment, [top, bottom], columns, maxAdvantage) {
  const y = top * ROW + 2 + HEADER, height = (bottom - top) * ROW - 2;
  const group = svg("g", {});
  const count = segment.values.length;
  const perCell = segment.length / count; // tokens per value; more than one for bins
  const cells = []; // neighbouring tokens that are not trained are one cell
  for (let at = 0; at < count; at++) {
    const from = segment.depth + at * perCell, to = segment.depth + (at + 1) * perCell;
    const value = segment.values[at];
    const previous = cells.at(-1);
    if (value === null && previous?.value === null) previous.to = to;
    else cells.push({ from, to, value, text: segment.texts?.[at] });
  }
  for (const cell of cells) {
    const x = interpolate(columns.starts, cell.from), width = Math.max(0.6, interpolate(columns.starts, cell.to) - x - (columns.isReadable ? 1.5 : 0));
    const rect = svg("rect", { class: cell.value === null ? "cell cell-context" : "cell", x, y, width, height, rx: columns.isReadable ? 3 : 0, style: cell.value === null ? {} : { fill: divergingColor(cell.value, maxAdvantage) || "transparent" } });
    rect.tip = { segment, cell };
    group.append(rect);
    if (cell.value !== null && columns.isReadable) group.append(svg("text", { class: "cell-text", x: x + width / 2, y: y + height / 2 + 4.5, "text-anchor": "middle" }, shortToken(cell.text)));
    else if (cell.value === null && width > 60) group.append(contextText(segment, cell, x, y, width, height));
  }
  return group;
}

function contextText(segment, cell, x, y, width, height) {
  const texts = segment.texts?.slice(cell.from - segment.depth, cell.to - segment.depth).join("") ?? "";
  const lineChars = Math.floor((width - 14) / 6.6), lines = [];
  const words = makeVisible(texts).replace(/\s+/g, " ").trim();
  for (let at = 0; at < words.length && lines.length < Math.max(1, Math.floor((height - 26) / 16)); at += lineChars) lines.push(words.slice(at, at + lineChars));
  const first = y + height / 2 - (lines.length * 16) / 2 + 12;
  return svg("g", { class: "context-text" }, lines.map((line, number) => svg("text", { x: x + 8, y: first + number * 16 }, line)));
}

function drawLabel(run, attempt, row, selected) {
  const y = row * ROW + ROW / 2 + 5 + HEADER;
  const isSelected = attempt.id === selected;
  return svg(
    "a",
    { href: href(["run", run, "rollout", attempt.id]), class: `forest-label${isSelected ? " forest-selected" : ""}` },
    svg("rect", { x: 2, y: row * ROW + 2 + HEADER, width: LABEL_WIDTH - 2, height: ROW - 2, rx: 4 }),
    svg("text", { class: "forest-id", x: 10, y }, attempt.id.length > 8 ? `…${attempt.id.slice(-7)}` : attempt.id),
    svg("text", { class: "forest-reward", x: 116, y, "text-anchor": "end" }, formatNumber(attempt.reward)),
    svg("text", { class: (attempt.advantage ?? 0) < 0 ? "forest-low" : "forest-high", x: 190, y, "text-anchor": "end" }, formatSigned(attempt.advantage)),
  );
}

function showTip(tooltip, event, forest) {
  const tip = event.target.tip;
  if (!tip) return fill(tooltip);
  const { segment, cell } = tip;
  const attempts = segment.attempts.map((number) => forest.attempts[number].id);
  const rewards = segment.attempts.map((number) => forest.attempts[number].reward).filter((reward) => reward !== null);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / (rewards.length || 1);
  fill(
    tooltip,
    h("div", {}, cell.value === null ? "context, not trained" : [h("b", { class: "mono" }, showToken(cell.text ?? "")), ` advantage ${formatSigned(cell.value)}`]),
    h("div", { class: "muted" }, `${attempts.length} of ${forest.attempts.length} attempts, mean reward ${formatNumber(mean)}`),
    h("div", { class: "muted" }, `tokens ${Math.floor(cell.from)} to ${Math.ceil(cell.to) - 1}`),
  );
  const box = tooltip.parentElement.getBoundingClientRect();
  tooltip.style.left = `${Math.min(event.clientX - box.left + 14, box.width - 260)}px`;
  tooltip.style.top = `${event.clientY - box.top + 16}px`;
}

export function showToken(text) {
  return makeVisible(text).replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "·";
}

function shortToken(text) {
  const shown = showToken(text);
  return shown.length > MAX_CELL_CHARS ? `${shown.slice(0, MAX_CELL_CHARS - 1)}…` : shown;
}

function interpolate(starts, at) {
  const low = Math.floor(at);
  return low >= starts.length - 1 ? starts.at(-1) : starts[low] + (at - low) * (starts[low + 1] - starts[low]);
}
