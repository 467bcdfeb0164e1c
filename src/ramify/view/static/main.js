// The frame of the page: header, theme, and the view that the address names.

import { RequestError, isExport } from "./api.js";
import { fill, h, makeVisible, notice, svg } from "./dom.js";
import { href, parseRoute } from "./routes.js";
import { showCompare, showRuns } from "./runs.js";
import { showConfig, showRun } from "./run.js";
import { showGroup } from "./group.js";
import { showRollout } from "./rollout.js";
import { showRollouts } from "./rollouts.js";

const POLL_INTERVAL = 2000; // milliseconds between updates of a live view
const content = h("main", { id: "content", tabindex: "-1" });
const breadcrumbs = h("nav", { class: "breadcrumbs", "aria-label": "You are here" });
let currentView = null; // the view that is shown: {node, title, update}
let latestNavigation = 0;

function findView({ parts, params }) {
  const [area, run, page, ...rest] = parts;
  if (!area) return () => showRuns();
  if (area === "compare") return () => showCompare(params);
  if (area !== "run" || !run) return null;
  if (!page) return () => showRun(run, params);
  if (page === "config") return () => showConfig(run);
  if (page === "rollouts") return () => showRollouts(run, params);
  if (page === "rollout") return () => showRollout(run, rest[0], params);
  if (page === "group") return () => showGroup(run, rest[0], params);
  return null;
}

function buildBreadcrumbs({ parts }) {
  const [area, run, page, item] = parts;
  const links = [h("a", { href: "#/" }, "Runs")];
  if (area === "compare") links.push(h("span", {}, "Compare"));
  if (area === "run" && run) {
    links.push(h("a", { href: href(["run", run]) }, run));
    if (page === "config") links.push(h("span", {}, "Configuration"));
    else if (page) links.push(h("a", { href: href(["run", run, "rollouts"]) }, "Rollouts"));
    if (page === "rollout") links.push(h("span", { class: "mono" }, item));
    if (page === "group") links.push(h("span", {}, item === "task" ? "Attempts" : `Group ${item}`));
  }
  links.at(-1).setAttribute("aria-current", "page");
  return links.flatMap((link, at) => (at ? [h("span", { class: "slash", "aria-hidden": "true" }, "/"), link] : [link]));
}

async function show() {
  const route = parseRoute(location.hash);
  const navigation = ++latestNavigation;
  const open = findView(route);
  fill(breadcrumbs, buildBreadcrumbs(route));
  content.setAttribute("aria-busy", "true");
  let view;
  try {
    view = open ? await open() : { node: notice("Not found", "The address does not name a view.", runsLink()), title: "Not found" };
  } catch (error) {
    const title = error.title ?? error.name;
    view = { node: notice(title, error.message, runsLink()), title, keepsScroll: true };
    if (error instanceof RequestError) view.update = show; // what is missing may come: a run that is being started
    else console.error(error);
  }
  if (navigation !== latestNavigation) return; // the reader has gone on meanwhile
  currentView?.close?.();
  currentView = view;
  fill(content, view.node);
  content.removeAttribute("aria-busy");
  document.title = view.title ? `${makeVisible(view.title)} · Ramify` : "Ramify";
  if (!view.keepsScroll) window.scrollTo(0, 0);
  view.onShow?.();
}

function runsLink() {
  return h("a", { href: "#/" }, "All runs");
}

async function poll() {
  const view = currentView;
  try {
    if (view?.update && !document.hidden) await view.update();
    offlineBanner.hidden = true;
  } catch (error) {
    fill(offlineBanner, error.message);
    offlineBanner.hidden = false;
  }
  setTimeout(poll, POLL_INTERVAL);
}

function toggleTheme() {
  const root = document.documentElement;
  const isDark = getComputedStyle(root).colorScheme.startsWith("dark") || (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  root.dataset.theme = isDark ? "light" : "dark";
  try {
    localStorage.setItem("ramify-theme", root.dataset.theme);
  } catch {
    // a file in a private window has no storage: the choice lasts until the page is closed
  }
}

async function copyLink(event) {
  const button = event.currentTarget;
  try {
    await navigator.clipboard.writeText(location.href);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Copy the address bar"; // browsers let pages from other machines write it only over HTTPS
  }
  setTimeout(() => (button.textContent = "Copy link"), 1500);
}

function logo() {
  return svg(
    "svg",
    { class: "logo", viewBox: "0 0 32 32", width: 22, height: 22, "aria-hidden": "true" },
    svg("path", { d: "M5 16h8c5 0 5-9 10-9h4M13 16h14M13 16c5 0 5 9 10 9h4" }),
    svg("circle", { cx: 5, cy: 16, r: 3.4 }),
  );
}

const offlineBanner = h("div", { class: "offline", role: "status", hidden: true });
document.body.append(
  h("a", { class: "skip", href: "#content", onclick: (event) => (event.preventDefault(), content.focus()) }, "Skip to content"),
  h(
    "header",
    { class: "top" },
    h("a", { class: "brand", href: "#/" }, logo(), "ramify"),
    breadcrumbs,
    h("div", { class: "spacer" }),
    isExport ? h("span", { class: "muted" }, "exported") : h("button", { type: "button", class: "quiet", onclick: copyLink }, "Copy link"),
    h("button", { type: "button", class: "quiet", onclick: toggleTheme, title: "Switch between light and dark", "aria-label": "Switch between light and dark" }, "◐"),
  ),
  offlineBanner,
  content,
);
window.addEventListener("hashchange", show);
show();
if (!isExport) setTimeout(poll, POLL_INTERVAL);
