// The table of rollouts: filtered, sorted and paged by the server.

import { get, isExport } from "./api.js";
import { fill, formatCount, formatNumber, formatSeconds, formatSigned, h, linkRow, makeVisible, plural, setText } from "./dom.js";
import { href, replaceAddress } from "./routes.js";
import { runTabs } from "./run.js";

const COLUMNS = [
  ["Rollout", null],
  ["Reward", "reward"],
  ["Advantage", null],
  ["Rewards and metrics", null],
  ["Source", null],
  ["Step", null],
  ["Calls", "calls"],
  ["Tokens", "tokens"],
  ["Time", "seconds"],
  ["End", null],
  ["Last reply", null],
];
const FILTERS = ["source", "state", "stop", "error", "step", "min_reward", "max_reward", "text"];
const GROUP_STATES = ["issued", "sampled", "scored", "batched", "trained", "dropped"];
const TYPING_PAUSE = 250; // milliseconds after the last key before a filter is applied
const RETRY_INDEX = 700; // milliseconds until a page of a run that is being indexed is asked for again

export async function showRollouts(run, params) {
  const settings = Object.fromEntries([...FILTERS, "sort", "order", "page"].map((name) => [name, params.get(name) ?? ""]));
  settings.sort ||= "newest";
  settings.order ||= "desc";
  const body = h("tbody", {});
  const heads = h("tr", {});
  const count = h("span", { class: "muted", role: "status" });
  const pager = h("div", { class: "pager" });
  const lists = {}; // the lists of the filters, by name
  let latestRequest = 0, timer = 0, answer = null;

  async function load() {
    const request = ++latestRequest;
    clearTimeout(timer);
    const result = isExport ? await get("rollouts", { run }) : await get("rollouts", { run, ...settings });
    if (request !== latestRequest) return;
    answer = result;
    draw();
    if (!isExport) replaceAddress(["run", run, "rollouts"], settings);
    if (result.indexed < 1) timer = setTimeout(reload, RETRY_INDEX);
    const ids = result.rows.map((row) => row.id);
    const excerpts = ids.length ? await get("excerpts", { run, id: ids }) : {};
    if (request === latestRequest) for (const cell of body.querySelectorAll("[data-rollout]")) cell.textContent = makeVisible(excerpts[cell.dataset.rollout] ?? "");
  }

  function reload() {
    load().catch((error) => setText(count, error.message));
  }

  function change(name, value) {
    settings[name] = value;
    settings.page = "";
    clearTimeout(timer);
    timer = setTimeout(reload, ["text", "step", "min_reward", "max_reward"].includes(name) ? TYPING_PAUSE : 0);
  }

  function draw() {
    const progress = answer.indexed < 1 ? ` · ${settings.text ? "reading messages" : "indexing"}: ${Math.floor(answer.indexed * 100)} %` : "";
    count.textContent = isExport ? `${formatCount(answer.total)} of ${plural(answer.run_total, "rollout")} are in this file` : `${plural(answer.total, "rollout")}${progress}`;
    fill(heads, COLUMNS.map(([name, sort]) => drawHead(name, sort)));
    fill(body, answer.rows.map((row) => drawRow(run, row)));
    if (!answer.rows.length) fill(body, h("tr", {}, h("td", { colspan: COLUMNS.length, class: "muted empty" }, answer.indexed < 1 ? "Still indexing…" : "No rollout matches.")));
    updateLists();
    drawPager();
  }

  function drawHead(name, sort) {
    const classes = ["Reward", "Advantage", "Calls", "Tokens", "Time", "Step"].includes(name) ? "number" : null;
    if (!sort || isExport) return h("th", { scope: "col", class: classes }, name);
    const isSorted = settings.sort === sort;
    const arrow = isSorted ? (settings.order === "asc" ? " ↑" : " ↓") : "";
    const onclick = () => {
      settings.order = isSorted ? (settings.order === "asc" ? "desc" : "asc") : sort === "reward" ? "asc" : "desc";
      settings.sort = sort;
      settings.page = "";
      reload();
    };
    return h("th", { scope: "col", class: classes, "aria-sort": isSorted ? (settings.order === "asc" ? "ascending" : "descending") : "none" }, h("button", { type: "button", class: "sort", onclick }, `${name}${arrow}`));
  }

  function drawPager() {
    const page = Number(settings.page) || 1, last = Math.max(1, Math.ceil(answer.total / answer.page_size));
    const go = (target) => ((settings.page = String(target)), reload(), window.scrollTo(0, 0));
    fill(
      pager,
      h("button", { type: "button", disabled: page <= 1, onclick: () => go(page - 1) }, "← Previous"),
      h("span", { class: "muted" }, `page ${formatCount(page)} of ${formatCount(last)}`),
      h("button", { type: "button", disabled: page >= last, onclick: () => go(page + 1) }, "Next →"),
    );
    pager.hidden = last <= 1 || isExport;
  }

  // The fields stay while rollouts are listed; only what a list offers follows the rollouts of the run.
  function makeFilters() {
    const field = (name, label, type, width) => h("label", {}, h("span", {}, label), " ", h("input", { type, value: settings[name], step: "any", style: { width }, oninput: (event) => change(name, event.target.value) }));
    const list = (name, label) => {
      lists[name] = h("select", { onchange: (event) => change(name, event.target.value) });
      return h("label", {}, h("span", {}, label), " ", lists[name]);
    };
    const hasSources = answer.has_groups || Object.keys(answer.facets.source).some(Boolean);
    return h(
      "div",
      { class: "controls filters", role: "search" },
      h("label", { class: "search" }, h("span", { class: "hidden" }, "Search the messages"), h("input", { type: "search", placeholder: "Search the messages", value: settings.text, oninput: (event) => change("text", event.target.value) })),
      hasSources && list("source", "Source"),
      answer.has_groups && list("state", "Group"),
      list("stop", "Stop"),
      list("error", "Error"),
      answer.has_groups && field("step", "Step", "number", "60px"),
      field("min_reward", "Reward from", "number", "60px"),
      field("max_reward", "to", "number", "60px"),
    );
  }

  function updateLists() {
    if (isExport) return; // a file has no filters
    const { source, stop, errors } = answer.facets;
    const states = Object.fromEntries(GROUP_STATES.map((state) => [state, null]));
    const offers = { source, stop, state: states, error: Object.keys(errors).length ? { any: null, ...errors } : {} };
    for (const [name, select] of Object.entries(lists)) {
      const chosen = settings[name];
      const counts = chosen && !(chosen in offers[name]) ? { [chosen]: null, ...offers[name] } : offers[name];
      const values = Object.entries(counts).filter(([value]) => value);
      const labels = values.map(([value, number]) => (number === null ? value : `${value} (${formatCount(number)})`));
      if (select.options.length && labels.join("\n") === [...select.options].slice(1).map((option) => option.label).join("\n")) continue; // it may be open
      fill(select, h("option", { value: "" }, "all"), values.map(([value], at) => h("option", { value, selected: value === chosen }, labels[at])));
    }
  }

  function onKey(event) {
    const step = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
    if (!step || event.ctrlKey || event.altKey || event.metaKey || event.target.closest("input, select")) return;
    const links = [...body.querySelectorAll("a.rollout-link")];
    const at = links.indexOf(document.activeElement);
    if (!links.length || (at < 0 && step < 0)) return;
    event.preventDefault();
    links[Math.max(0, Math.min(links.length - 1, at + step))].focus();
  }

  await load();
  const filters = isExport ? null : makeFilters();
  updateLists();
  const node = h(
    "section",
    {},
    h("div", { class: "title-row" }, h("h1", {}, run)),
    runTabs(run, "Rollouts"),
    filters,
    h("div", { class: "table-head" }, count, h("div", { class: "spacer" }), h("span", { class: "muted keys" }, "arrow keys move, Enter opens")),
    h("div", { class: "table-box" }, h("table", { class: "rollouts" }, h("thead", {}, heads), body)),
    pager,
  );
  const onShow = () => document.addEventListener("keydown", onKey); // a view that was just opened has no focus
  const close = () => {
    document.removeEventListener("keydown", onKey);
    clearTimeout(timer);
  };
  return { node, title: `${run} rollouts`, onShow, close };
}

function drawRow(run, row) {
  const group = row.group_number === null ? href(["run", run, "group", "task"], { source: row.source, task: row.task }) : href(["run", run, "group", row.group_number]);
  const end = row.errors ? h("span", { class: "bad" }, row.errors.split(" ").join(", ")) : row.stop;
  const link = h("a", { class: "rollout-link mono", href: href(["run", run, "rollout", row.id]) }, row.id);
  const node = h(
    "tr",
    {},
    h("td", { class: "nowrap rollout-id" }, link),
    h("td", { class: "number" }, rewardBar(row.reward), formatNumber(row.reward)),
    h("td", { class: "number" }, advantageText(row.advantage)),
    scoresCell(row),
    h("td", { class: "nowrap" }, row.source || "–", " ", h("a", { class: "group-link", href: group }, row.group_number === null ? "attempts" : `group ${row.group_number}`)),
    h("td", { class: "number" }, row.step ?? (row.state === "dropped" ? h("span", { class: "muted", title: row.reason }, "dropped") : "–")),
    h("td", { class: "number" }, formatCount(row.calls)),
    h("td", { class: "number" }, formatCount(row.tokens)),
    h("td", { class: "number" }, formatSeconds(row.seconds)),
    h("td", { class: "nowrap" }, end, row.truncated ? h("span", { class: "badge badge-untrained" }, "truncated") : null),
    h("td", { class: "excerpt", dir: "auto", "data-rollout": row.id }, "\u00a0"),
  );
  return linkRow(node, link);
}

// The taskset's own rewards and metrics; a single reward with weight 1 is the reward of the rollout, and not repeated.
function scoresCell(row) {
  const rewards = Object.values(row.rewards).every((value) => value === row.reward) ? {} : row.rewards;
  const text = Object.entries({ ...rewards, ...row.metrics }).map(([name, value]) => `${name} ${formatNumber(value)}`).join(", ");
  return h("td", { class: "row-scores", title: text }, text || "–");
}

export function rewardBar(reward) {
  const width = reward === null ? 0 : Math.max(0, Math.min(1, reward));
  return h("span", { class: "reward-bar", "aria-hidden": "true" }, h("span", { style: { width: `${width * 100}%` } }));
}

export function advantageText(advantage) {
  return h("span", { class: advantage < 0 ? "low" : advantage > 0 ? "high" : "" }, formatSigned(advantage));
}
