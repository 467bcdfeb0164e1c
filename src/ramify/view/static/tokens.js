// The tokens of a branch, coloured by a measure. The tokens of a message are fetched when it comes into view.

import { get } from "./api.js";
import { makeScale } from "./colors.js";
import { IncrementalList, fill, formatCount, formatNumber, h, makeVisible } from "./dom.js";
import { showToken } from "./forest.js";

const NODES_PER_REQUEST = 12, NODES_OF_FIRST_REQUEST = 3;
const TOKENS_PER_PART = 4000; // of a message that are shown at once; a button shows more
const MEASURE_NAMES = { reward_change: "reward change at forks", advantage: "advantage", logprob: "logprob", entropy: "entropy", reference_kl: "KL to teacher or reference", mismatch: "mismatch of trainer and sampler", version: "policy version", weight: "loss weight" };

// The tooltip describes the token under the pointer, or else the selected one, which a click and the arrow keys choose.
export class TokenPane {
  constructor(run, rollout, trace, nodes, measure, onMeasure, selectMessage) {
    this.request = { run, id: rollout.id, trace };
    this.nodes = nodes;
    this.selectMessage = selectMessage;
    this.selected = null; // the element of a token
    this.onMeasure = onMeasure;
    this.measures = rollout.traces[trace].measures;
    this.hasUntrained = rollout.traces[trace].nodes.some((node) => node.untrained) || this.measures.some(({ name, min }) => name === "weight" && min === 0);
    this.measure = this.measures.find((entry) => entry.name === measure) ?? this.measures.find((entry) => entry.min !== entry.max) ?? this.measures[0];
    this.tokens = new Map(); // node -> tokens
    this.queue = new Set();
    this.tooltip = h("div", { class: "token-tip", role: "status" });
    this.bar = h("div", { class: "token-bar" });
    this.messages = new Map(); // index -> elements and number of drawn tokens, of the messages that are shown so far
    this.observer = new IntersectionObserver((entries) => this.onVisible(entries), { rootMargin: "900px 0px" });
    const list = h("div", {});
    this.list = new IncrementalList(list, nodes, (node) => this.addMessage(node));
    this.node = h("div", { class: "token-pane" }, this.bar, list, this.tooltip);
    // Not `pointerover`: that also fires when the page scrolls under a pointer at rest.
    this.node.addEventListener("pointermove", (event) => this.showTooltip(findToken(event.target) ?? this.selected));
    this.node.addEventListener("pointerleave", () => this.showTooltip(this.selected));
    this.node.addEventListener("click", (event) => this.onClick(event));
    this.node.addEventListener("keydown", (event) => this.onKey(event));
    this.drawBar();
  }

  close() {
    this.observer.disconnect();
    this.list.close();
  }

  appendUntil(index) {
    this.list.appendUntil(index);
  }

  addMessage(node) {
    const message = this.makeMessage(node);
    this.messages.set(node.index, message);
    this.observer.observe(message.article);
    return message.article;
  }

  makeMessage(node) {
    const body = h("div", { class: "tokens", tabindex: "0", "aria-label": `Tokens of message ${node.index}; arrow keys move`, role: "group" }, h("span", { class: "muted" }, node.tokens ? "…" : node.text));
    const more = h("button", { type: "button", class: "more-tokens", hidden: true, onclick: () => this.drawMore(node.index, this.messages.get(node.index).drawn + TOKENS_PER_PART) });
    const shown = Math.min(1, TOKENS_PER_PART / (node.tokens || 1));
    const height = 46 + Math.max(1, Math.ceil((shown * Math.max(node.chars, node.tokens * 1.2)) / 92)) * 26;
    const article = h(
      "article",
      { class: `message role-${node.role}`, "data-node": node.index, style: { "contain-intrinsic-size": `auto ${height}px` } },
      h("header", {}, h("b", {}, node.role), h("span", { class: "mono" }, `[${node.index}]`), h("span", {}, `${formatCount(node.tokens)} tokens${node.sampled ? `, ${formatCount(node.sampled)} sampled` : ""}`), node.untrained ? h("span", { class: "badge badge-untrained" }, node.untrained) : null),
      body,
      more,
    );
    return { node, body, article, more, drawn: 0 };
  }

  drawBar() {
    if (!this.measure) {
      fill(this.bar, h("span", { class: "muted" }, "No values are stored for the tokens of this rollout."));
      return;
    }
    const scale = makeScale(this.measure);
    const options = this.measures.map((entry) => h("option", { value: entry.name, selected: entry === this.measure }, MEASURE_NAMES[entry.name] ?? entry.name));
    const onchange = (event) => {
      this.measure = this.measures.find((entry) => entry.name === event.target.value);
      this.onMeasure(this.measure.name);
      this.drawBar();
      for (const index of this.tokens.keys()) this.colorTokens(index);
    };
    const { extremes } = this.measure;
    fill(
      this.bar,
      h("label", {}, "Colour by ", h("select", { onchange }, options)),
      h("span", { class: "scale" }, h("span", { class: "muted" }, formatMeasure(this.measure.name, scale.ends[0])), h("span", { class: `scale-bar scale-${scale.isDiverging ? "diverging" : "sequential"}`, "aria-hidden": "true" }), h("span", { class: "muted" }, formatMeasure(this.measure.name, scale.ends[1]))),
      this.hasUntrained && h("span", { class: "muted" }, h("span", { class: "token token-masked" }, "abc"), " sampled, but not trained"),
      h("p", { class: "muted" }, `${MEASURE_NAMES[this.measure.name] ?? this.measure.name}: ${this.measure.description}`),
      extremes.length ? h("div", { class: "extremes" }, h("span", { class: "muted" }, "stands out:"), extremes.map((entry) => h("button", { type: "button", class: "mono", style: { background: scale.color(entry.value) }, onclick: () => this.goTo(entry, { focus: true }) }, `${showToken(entry.text)} ${formatMeasure(this.measure.name, entry.value)}`))) : null,
    );
  }

  onVisible(entries) {
    for (const entry of entries) {
      const index = Number(entry.target.dataset.node);
      if (entry.isIntersecting && !this.tokens.has(index) && this.messages.get(index).node.tokens) this.queue.add(index);
    }
    this.load();
  }

  async load() {
    if (this.isLoading) return;
    this.isLoading = true;
    try {
      while (this.queue.size) {
        const indices = [...this.queue].slice(0, this.tokens.size ? NODES_PER_REQUEST : NODES_OF_FIRST_REQUEST);
        for (const index of indices) this.queue.delete(index);
        for (const tokens of await get("tokens", { ...this.request, node: indices })) {
          this.drawTokens(tokens);
          await new Promise((resolve) => setTimeout(resolve)); // scrolling goes on between two messages
        }
      }
    } catch (error) {
      fill(this.tooltip, error.message);
    } finally {
      this.isLoading = false;
    }
  }

  drawTokens(tokens) {
    this.tokens.set(tokens.node, tokens);
    const message = this.messages.get(tokens.node);
    fill(message.body);
    message.drawn = 0;
    this.drawMore(tokens.node, TOKENS_PER_PART);
    if (this.target?.node === tokens.node) this.selectTarget();
  }

  drawMore(index, until) {
    const tokens = this.tokens.get(index), message = this.messages.get(index);
    const [start, stop] = tokens.sampled, first = message.drawn, total = tokens.ids.length;
    message.drawn = Math.min(until, total);
    for (let at = first; at < message.drawn; at++) {
      const isSampled = at >= start && at < stop;
      const isMasked = isSampled && (message.node.untrained || tokens.values.weight?.[at] === 0);
      message.body.append(h("span", { class: `token${isSampled ? "" : " token-context"}${isMasked ? " token-masked" : ""}`, "data-at": at }, showText(tokens.texts[at])));
    }
    this.colorTokens(index, first);
    message.more.hidden = message.drawn === total;
    fill(message.more, `Show more: ${formatCount(total - message.drawn)} of ${formatCount(total)} tokens are hidden`);
  }

  colorTokens(index, first = 0) {
    const { body, drawn } = this.messages.get(index);
    const values = this.measure ? this.tokens.get(index).values[this.measure.name] : null;
    const scale = this.measure && makeScale(this.measure);
    const spans = [...body.children];
    for (let at = first; at < drawn; at++) spans[at].style.background = values && values[at] !== null ? scale.color(values[at]) : "";
  }

  // The token whose reward change is the largest drop, if it is in the branch that is shown.
  showCostliest() {
    const entry = this.measure?.name === "reward_change" ? this.measure.extremes[0] : null;
    if (entry && this.nodes.some((node) => node.index === entry.node)) this.goTo(entry);
  }

  goTo({ node, token }, { focus = false } = {}) {
    this.target = { node, token, focus };
    this.appendUntil(this.nodes.findIndex((entry) => entry.index === node) + 1);
    if (!this.messages.has(node)) {
      this.selectMessage(node, { node, token });
      return;
    }
    if (this.tokens.has(node)) this.selectTarget();
    else {
      this.queue.add(node);
      this.load();
    }
  }

  selectTarget() {
    const { node, token, focus } = this.target;
    if (token >= this.messages.get(node).drawn) this.drawMore(node, token + TOKENS_PER_PART);
    const { body } = this.messages.get(node);
    this.select(body.children[token]);
    if (focus) body.focus({ preventScroll: true }); // arrow keys go on from there
  }

  select(token) {
    this.selected?.classList.remove("token-selected");
    this.selected = token ?? null;
    this.selected?.classList.add("token-selected");
    this.selected?.scrollIntoView({ block: "nearest" });
    this.showTooltip(this.selected);
  }

  onClick(event) {
    const token = findToken(event.target);
    if (token) this.select(token);
  }

  onKey(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const body = event.target.closest(".tokens");
    if (event.key === "Escape") this.select(null);
    if (!step || !body) return;
    event.preventDefault();
    const tokens = [...body.querySelectorAll(".token")];
    this.select(tokens[Math.max(0, Math.min(tokens.length - 1, tokens.indexOf(this.selected) + step))]);
  }

  showTooltip(token) {
    if (!token) {
      fill(this.tooltip);
      return;
    }
    const index = Number(token.closest("article").dataset.node), at = Number(token.dataset.at);
    const { ids, texts, values } = this.tokens.get(index);
    const lines = Object.entries(values).filter(([, column]) => column[at] !== null);
    fill(
      this.tooltip,
      h("div", {}, h("b", { class: "mono" }, showToken(texts[at])), h("span", { class: "muted" }, ` id ${ids[at]}, token ${at} of message ${index}`)),
      lines.length ? lines.map(([name, column]) => h("div", {}, `${MEASURE_NAMES[name] ?? name} `, h("b", {}, formatMeasure(name, column[at])))) : h("div", { class: "muted" }, "not sampled by the policy"),
    );
    const pane = this.node.getBoundingClientRect(), box = token.getClientRects()[0];
    this.tooltip.style.left = `${Math.max(0, Math.min(box.left - pane.left, pane.width - 320))}px`;
    const height = this.tooltip.offsetHeight + 6, hasRoom = box.bottom + height <= window.innerHeight;
    this.tooltip.style.top = `${(hasRoom ? box.bottom + 6 : box.top - height) - pane.top}px`;
  }
}

function formatMeasure(name, value) {
  return name === "version" ? formatCount(value) : formatNumber(value);
}

function findToken(element) {
  return element.closest?.(".token[data-at]");
}

function showText(text) {
  if (text === "") return h("span", { class: "token-break" }, "·");
  return makeVisible(text).split("\n").flatMap((line, at) => (at ? [h("span", { class: "token-break" }, "⏎"), `\n${line}`] : [line]));
}
