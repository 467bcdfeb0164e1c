// A group as a unit: its attempts as one forest, and side by side.

import { get } from "./api.js";
import { code, formatCount, formatNumber, h, plural } from "./dom.js";
import { describeForest, drawForest } from "./forest.js";
import { renderText } from "./highlight.js";
import { advantageText, rewardBar } from "./rollouts.js";
import { href } from "./routes.js";
import { describeGroupState } from "./terms.js";

export async function showGroup(run, number, params) {
  const key = number === "task" ? { source: params.get("source") ?? "", task: params.get("task") } : { group: number };
  const [data, forest] = await Promise.all([get("group", { run, ...key }), get("forest", { run, ...key })]);
  const { group } = data;
  const forestBox = h("div", {});
  const cards = [...data.attempts].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity)).map((attempt) => drawCard(run, attempt));
  const node = h(
    "section",
    {},
    h("div", { class: "title-row" }, h("h1", {}, group ? `Group ${group.number}` : `Attempts at ${data.task}`), group && h("span", { class: "pill" }, h("span", {}, describeGroupState(group))), h("span", { class: "muted" }, data.source)),
    h(
      "div",
      { class: "panel" },
      h("div", { class: "panel-head" }, h("h2", {}, plural(data.attempts.length, "attempt"), " as one forest"), h("span", { class: "muted" }, describeForest(forest)), h("div", { class: "spacer" }), forestLegend(group)),
      forestBox,
      h("p", { class: "muted forest-note", hidden: true }, "The tokens are too many to be written out: point at a stripe, or open an attempt."),
      forest.left_out.length ? h("p", { class: "muted" }, `Left out of the batch: ${forest.left_out.map((at) => forest.attempts[at].id).join(", ")}.`) : null,
      forest.overlong ? h("p", { class: "muted" }, `${plural(forest.overlong, "call")} longer than seq_len: not trained.`) : null,
    ),
    h("div", { class: "panel" }, h("h2", {}, "Prompt"), h("div", { class: "message-body" }, renderText(data.prompt))),
    data.dropped_attempts.length ? h("p", { class: "muted" }, data.dropped_attempts.map((entry) => `Attempt ${entry.attempt} has no rollout: ${entry.reason ?? "not finished"} ${entry.detail}`).join(" ")) : null,
    h("div", { class: "cards" }, cards),
  );
  const draw = () => {
    if (!forestBox.clientWidth) return;
    forestBox.replaceChildren(drawForest(run, forest, { width: forestBox.clientWidth, selected: params.get("rollout") }));
    node.querySelector(".forest-note").hidden = Boolean(forestBox.querySelector(".cell-text"));
  };
  const observer = new ResizeObserver(draw);
  return { node, title: group ? `Group ${group.number}` : "Attempts", onShow: () => observer.observe(forestBox), close: () => observer.disconnect() };
}

export function forestLegend(group) {
  const text = group ? "advantage" : "reward minus mean";
  return h("span", { class: "scale" }, h("span", { class: "muted" }, `low ${text}`), h("span", { class: "scale-bar scale-diverging", "aria-hidden": "true" }), h("span", { class: "muted" }, "high"));
}

function drawTurn({ agent, role, text, calls, is_cut }) {
  return h(
    "div",
    { class: `turn role-${role}` },
    h("div", { class: "turn-role muted" }, h("span", { class: "role-dot", "aria-hidden": "true" }), [agent, role].filter(Boolean).join(" ")),
    text ? renderText(text) : null,
    calls.map((name) => h("div", { class: "call-name" }, `→ ${name}`)),
    is_cut ? h("span", { class: "muted" }, "… open the rollout for all of it") : null,
  );
}

function drawCard(run, attempt) {
  return h(
    "article",
    { class: "card" },
    h("header", {}, h("a", { class: "mono", href: href(["run", run, "rollout", attempt.id]) }, attempt.id), h("span", { class: "spacer" }), rewardBar(attempt.reward), h("b", {}, formatNumber(attempt.reward)), advantageText(attempt.advantage)),
    h("div", { class: "message-body card-text" }, attempt.messages.length ? attempt.messages.map(drawTurn) : h("span", { class: "muted" }, "no reply")),
    h("footer", { class: "muted" }, `${plural(attempt.calls, "call")} · ${formatCount(attempt.tokens)} tokens · `, attempt.stop ? code(attempt.stop) : null),
  );
}
