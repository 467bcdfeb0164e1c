// The tokens of a branch, coloured by a measure. The tokens of a message are fetched when it comes into view.

import { get } from "./api.js";
import { scaleFor } from "./colors.js";
import { PartList, fill, formatCount, formatNumber, h, makeVisible } from "./dom.js";
import { showToken } from "./forest.js";

const NODES_PER_REQUEST = 12, NODES_OF_FIRST_REQUEST = 3;
const TOKENS_PER_PART = 4000; // of a message that are shown at once; a button shows more
const MEASURE_NAMES = { reward_change: "reward change at forks", advantage: "advantage", logprob: "logprob", entropy: "entropy", reference_kl: "KL to teacher or reference", mismatch: "mismatch of trainer and sampler", version: "policy version", weight: "loss weight" };

export class TokenPane {
  constructor(run, rollout, trace, nodes, measure, onMeasure, select) {
    this.request = { run, id: rollout.id, trace };
    this.nodes = nodes;
    this.select = select;
    this.onMeasure = onMeasure;
    this.measures = rollout.traces[trace].measures;
    this.measure = this.measures.find((entry) => entry.name === measure) ?? this.measures.find((entry) => entry.min !== entry.max) ?? this.measures[0];
    this.tokens = new Map(); // node -> tokens
    this.queue = new Set();
    this.tip = h("div", { class: "token-tip", role: "status" });
    this.bar = h("div", { class: "token-bar" });
    this.places = new Map(); // node -> place, of the messages that are shown so far
    this.observer = new IntersectionObserver((entries) => this.onVisible(entries), { rootMargin: "900px 0px" });
    const list = h("div", {});
    this.parts = new PartList(list, nodes, (node) => this.addPlace(node));
    this.node = h("div", { class: "token-pane" }, this.bar, list, this.tip);
    this.node.addEventListener("pointerover", (event) => this.showTip(event.target));
    this.node.addEventListener("pointerleave", () => fill(this.tip));
    this.node.addEventListener("keydown", (event) => this.onKey(event));
    this.drawBar();
  }

  close() {
    this.observer.disconnect();
    this.parts.close();
  }

  appendUntil(index) {
    this.parts.appendUntil(index);
  }

  addPlace(node) {
    const place = this.makePlace(node);
    this.places.set(node.index, place);
    this.observer.observe(place.article);
    return place.article;
  }

  makePlace(node) {
    const body = h("div", { class: "tokens", tabindex: "0", "aria-label": `Tokens of message ${node.index}; arrow keys move`, role: "group" }, h("span", { class: "muted" }, node.tokens ? "…" : node.text));
    const more = h("button", { type: "button", class: "more-tokens", hidden: true, onclick: () => this.drawMore(node.index, this.places.get(node.index).drawn + TOKENS_PER_PART) });
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
    const scale = scaleFor(this.measure);
    const options = this.measures.map((entry) => h("option", { value: entry.name, selected: entry === this.measure }, MEASURE_NAMES[entry.name] ?? entry.name));
    const onchange = (event) => {
      this.measure = this.measures.find((entry) => entry.name === event.target.value);
      this.onMeasure(this.measure.name);
      this.drawBar();
      for (const index of this.tokens.keys()) this.color(index);
    };
    const { extremes } = this.measure;
    fill(
      this.bar,
      h("label", {}, "Colour by ", h("select", { onchange }, options)),
      h("span", { class: "scale" }, h("span", { class: "muted" }, formatNumber(scale.ends[0], 2)), h("span", { class: `scale-bar scale-${scale.isDiverging ? "diverging" : "sequential"}`, "aria-hidden": "true" }), h("span", { class: "muted" }, formatNumber(scale.ends[1], 2))),
      h("span", { class: "muted" }, h("span", { class: "token token-masked" }, "struck out"), ": not trained"),
      h("p", { class: "muted" }, `${MEASURE_NAMES[this.measure.name] ?? this.measure.name}: ${this.measure.description}`),
      extremes.length ? h("div", { class: "extremes" }, h("span", { class: "muted" }, "stands out:"), extremes.map((entry) => h("button", { type: "button", class: "mono", style: { background: scale.color(entry.value) }, onclick: () => this.goTo(entry) }, `${showToken(entry.text)} ${formatNumber(entry.value, 2)}`))) : null,
    );
  }

  onVisible(entries) {
    for (const entry of entries) {
      const index = Number(entry.target.dataset.node);
      if (entry.isIntersecting && !this.tokens.has(index) && this.places.get(index).node.tokens) this.queue.add(index);
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
          this.draw(tokens);
          await new Promise((resolve) => setTimeout(resolve)); // scrolling goes on between two messages
        }
      }
    } catch (error) {
      fill(this.tip, error.message);
    } finally {
      this.isLoading = false;
    }
  }

  draw(tokens) {
    this.tokens.set(tokens.node, tokens);
    const place = this.places.get(tokens.node);
    fill(place.body);
    place.drawn = 0;
    this.drawMore(tokens.node, TOKENS_PER_PART);
    if (this.target?.node === tokens.node) this.mark();
  }

  drawMore(index, until) {
    const tokens = this.tokens.get(index), place = this.places.get(index);
    const [start, stop] = tokens.sampled, first = place.drawn, total = tokens.ids.length;
    place.drawn = Math.min(until, total);
    for (let at = first; at < place.drawn; at++) {
      const isSampled = at >= start && at < stop;
      const isMasked = isSampled && (place.node.untrained || tokens.values.weight?.[at] === 0);
      place.body.append(h("span", { class: `token${isSampled ? "" : " token-context"}${isMasked ? " token-masked" : ""}`, "data-at": at }, showText(tokens.texts[at])));
    }
    this.color(index, first);
    place.more.hidden = place.drawn === total;
    fill(place.more, `Show more: ${formatCount(total - place.drawn)} of ${formatCount(total)} tokens are hidden`);
  }

  color(index, first = 0) {
    const { body, drawn } = this.places.get(index);
    const values = this.measure ? this.tokens.get(index).values[this.measure.name] : null;
    const scale = this.measure && scaleFor(this.measure);
    const spans = [...body.children];
    for (let at = first; at < drawn; at++) spans[at].style.background = values && values[at] !== null ? scale.color(values[at]) : "";
  }

  goTo(target) {
    this.target = target;
    this.appendUntil(this.nodes.findIndex((node) => node.index === target.node) + 1);
    if (!this.places.has(target.node)) {
      this.select(target.node, target);
      return;
    }
    if (this.tokens.has(target.node)) this.mark();
    else {
      this.queue.add(target.node);
      this.load();
    }
  }

  mark() {
    for (const span of this.node.querySelectorAll(".token-found")) span.classList.remove("token-found");
    const { node, token } = this.target;
    if (token >= this.places.get(node).drawn) this.drawMore(node, token + TOKENS_PER_PART);
    const span = this.places.get(node).body.children[token];
    span?.classList.add("token-found");
    span?.scrollIntoView({ block: "center" });
    if (span) this.showTip(span);
  }

  onKey(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const body = event.target.closest(".tokens");
    if (!step || !body) return;
    event.preventDefault();
    const spans = [...body.querySelectorAll(".token")];
    const at = spans.findIndex((span) => span.classList.contains("token-current"));
    spans[at]?.classList.remove("token-current");
    const next = spans[Math.max(0, Math.min(spans.length - 1, at + step))];
    next?.classList.add("token-current");
    next?.scrollIntoView({ block: "nearest" });
    if (next) this.showTip(next);
  }

  showTip(element) {
    const span = element.closest?.(".token[data-at]");
    if (!span) return fill(this.tip);
    const index = Number(span.closest("article").dataset.node), at = Number(span.dataset.at);
    const tokens = this.tokens.get(index);
    const lines = Object.entries(tokens.values).filter(([, values]) => values[at] !== null);
    fill(
      this.tip,
      h("div", {}, h("b", { class: "mono" }, showToken(tokens.texts[at])), h("span", { class: "muted" }, ` id ${tokens.ids[at]}, token ${at} of message ${index}`)),
      lines.length ? lines.map(([name, values]) => h("div", {}, `${MEASURE_NAMES[name] ?? name} `, h("b", {}, formatNumber(values[at], 4)))) : h("div", { class: "muted" }, "not sampled by the policy"),
    );
    const box = this.node.getBoundingClientRect(), place = span.getClientRects()[0];
    this.tip.style.left = `${Math.max(0, Math.min(place.left - box.left, box.width - 320))}px`;
    const height = this.tip.offsetHeight + 6, hasRoom = place.bottom + height <= window.innerHeight;
    this.tip.style.top = `${(hasRoom ? place.bottom + 6 : place.top - height) - box.top}px`;
    return null;
  }
}

function showText(text) {
  if (text === "") return h("span", { class: "token-break" }, "·");
  return makeVisible(text).split("\n").flatMap((line, at) => (at ? [h("span", { class: "token-break" }, "⏎"), `\n${line}`] : [line]));
}
