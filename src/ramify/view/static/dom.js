// Elements and number formats. All text becomes text nodes with visible characters: nothing that a model wrote is parsed
// as HTML, and nothing in it can change how the text around it is shown.

const ITEMS_PER_CHUNK = 40;
const CHUNK_INTERVAL = 30; // milliseconds between two chunks, in which the page answers the reader
const TEXT_ATTRIBUTES = /^(title|alt|aria-.*)$/;
const INVISIBLE = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]/;

export function h(tag, props, ...children) {
  return build(document.createElement(tag), props, children);
}

export function svg(tag, props, ...children) {
  return build(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);
}

function build(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, entry] of Object.entries(value)) element.style.setProperty(key, entry);
    else if (name === "value" && "value" in element) element.value = value;
    else element.setAttribute(name, value === true ? "" : TEXT_ATTRIBUTES.test(name) ? makeVisible(String(value)) : value);
  }
  appendAll(element, children);
  return element;
}

// One by one: a call takes at most about 100,000 arguments.
function appendAll(element, children) {
  for (const child of flatten(children)) element.append(child);
}

function flatten(children) {
  const shown = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  return shown.map((child) => (typeof child === "string" ? makeVisible(child) : child));
}

// Colours of a terminal are left out. Other control characters are shown as symbols, and marks that would change the
// direction of the text around them by their code.
export function makeVisible(text) {
  if (!INVISIBLE.test(text)) return text;
  return text
    .replace(/\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)/g, "")
    .replace(/\r\n/g, "\n")
    .replace(/[\x00-\x08\x0b-\x1f]/g, (character) => String.fromCharCode(0x2400 + character.charCodeAt(0)))
    .replace(new RegExp(INVISIBLE, "g"), (character) => `⟦U+${character.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟧`);
}

// Replace the children of an element.
export function fill(element, ...children) {
  element.replaceChildren();
  appendAll(element, children);
  return element;
}

// Append the element that `build` returns for each item: some at once and the others in chunks, so that the first ones are
// shown early. `appendUntil` appends at least the elements before an index.
export class IncrementalList {
  constructor(container, items, build) {
    Object.assign(this, { container, items, build, count: 0 });
    this.appendUntil(ITEMS_PER_CHUNK);
    this.schedule();
  }

  schedule() {
    if (this.count < this.items.length) this.timer = setTimeout(() => (this.appendUntil(this.count + ITEMS_PER_CHUNK), this.schedule()), CHUNK_INTERVAL);
  }

  appendUntil(index) {
    if (index <= this.count) return;
    const stop = Math.min(index, this.items.length);
    for (; this.count < stop; this.count++) this.container.append(this.build(this.items[this.count]));
  }

  close() {
    clearTimeout(this.timer);
  }
}

// Let a click anywhere in a table row do what a click on its link does. Other links and controls keep their own click, and
// text can be selected.
export function linkRow(row, link) {
  row.classList.add("linked-row");
  row.addEventListener("click", (event) => {
    if (event.target.closest("a, button, label") || !getSelection().isCollapsed) return;
    const { ctrlKey, metaKey, shiftKey } = event;
    link.dispatchEvent(new MouseEvent("click", { cancelable: true, ctrlKey, metaKey, shiftKey }));
  });
  return row;
}

// Replace the text only if it changed, so that a selection in a live page survives.
export function setText(element, text) {
  const visible = makeVisible(text);
  if (element.textContent !== visible) element.textContent = visible;
}

// The smallest and the largest value; [Infinity, -Infinity] without values.
export function findRange(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

// The one format of rewards, metrics and values of tokens: a number looks the same wherever it is shown.
export function formatNumber(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.0005 || size >= 1e9)) return value.toExponential(1);
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(size >= 1e5 ? 0 : 1)} k`;
  return value.toFixed(size >= 100 ? 1 : 3);
}

export function formatCount(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en");
}

export function formatSigned(value) {
  return `${value > 0 ? "+" : ""}${formatNumber(value)}`;
}

export function formatPercent(fraction) {
  return fraction === null || fraction === undefined ? "–" : `${(100 * fraction).toFixed(1)} %`;
}

export function formatSeconds(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.0995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 129600 ? `${(seconds / 3600).toFixed(1)} h` : `${Math.round(seconds / 86400)} d`;
}

export function formatAgo(time) {
  if (!time) return "–";
  const seconds = Math.max(0, Date.now() / 1000 - time);
  return seconds < 5 ? "now" : `${formatSeconds(seconds)} ago`;
}

export function formatTime(time) {
  return new Date(time * 1000).toLocaleString("en-GB", { dateStyle: "short", timeStyle: "medium" });
}

export function plural(count, noun) {
  return `${formatCount(count)} ${noun}${count === 1 ? "" : "s"}`;
}

const STATE_LABELS = {
  starting: "starting",
  running: "running",
  unresponsive: "no answer",
  finished: "finished",
  stopped: "stopped",
  ended: "ended",
  planned: "not started",
  damaged: "damaged",
};

export function statePill(state) {
  return h("span", { class: `pill pill-${state}` }, h("span", { class: "dot", "aria-hidden": "true" }), STATE_LABELS[state] ?? state);
}

export function isLive(state) {
  return state === "running" || state === "starting" || state === "unresponsive";
}

// A message about something that is missing or broken, in place of a view.
export function notice(title, ...content) {
  return h("div", { class: "notice" }, h("h2", {}, title), content.map((line) => h("p", {}, line)));
}

export function code(text) {
  return h("code", {}, text);
}
