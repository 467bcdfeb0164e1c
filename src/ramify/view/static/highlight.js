// Readable messages: fenced code, JSON, diffs and tags are highlighted. The result is elements and text nodes only.

import { h, makeVisible } from "./dom.js";

const MAX_HIGHLIGHTED = 40000; // characters of a block; longer ones are shown plain
const FENCE = /^(```+|~~~+)([^\n`]*)\n([\s\S]*?)(?:\n\1[ \t]*$|$(?![\s\S]))/gm;
const CODE_RULES = [
  ["comment", /(?:#|\/\/)[^\n]*|\/\*[\s\S]*?\*\//y],
  ["string", /"""[\s\S]*?"""|'''[\s\S]*?'''|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`/y],
  ["number", /\b\d[\d_.]*(?:e[+-]?\d+)?\b/iy],
  ["keyword", /\b(?:and|as|async|await|break|case|catch|class|const|continue|def|do|elif|else|except|export|false|False|finally|fn|for|from|func|function|if|impl|import|in|is|lambda|let|match|new|None|not|null|or|pass|pub|raise|return|self|static|struct|switch|this|throw|true|True|try|type|use|var|while|with|yield)\b/y],
  ["name", /[A-Za-z_$][\w$]*/y],
];

export function renderText(raw) {
  const text = makeVisible(raw);
  const parts = [];
  let at = 0;
  for (const match of text.matchAll(FENCE)) {
    if (match.index > at) parts.push(renderPlain(text.slice(at, match.index)));
    parts.push(codeBlock(match[3], match[2].trim()));
    at = match.index + match[0].length;
  }
  if (at < text.length) parts.push(renderPlain(text.slice(at)));
  return parts;
}

function renderPlain(text) {
  const trimmed = text.trim();
  if (looksLikeDiff(trimmed)) return codeBlock(trimmed, "diff");
  if (/^[[{]/.test(trimmed)) {
    const pretty = prettyJson(trimmed);
    if (pretty !== null) return codeBlock(pretty, "json");
  }
  return h("div", { class: "prose", dir: "auto" }, text.replace(/^\n+|\n+$/g, ""));
}

export function codeBlock(raw, language = "") {
  const text = makeVisible(raw);
  const lines = language === "diff" || looksLikeDiff(text) ? colorDiff(text) : text.length > MAX_HIGHLIGHTED ? [text] : colorCode(text);
  return h("pre", { class: "code", dir: "ltr", tabindex: "0" }, language ? h("span", { class: "language" }, language) : null, h("code", {}, lines));
}

export function prettyJson(text) {
  if (text.length > MAX_HIGHLIGHTED) return null;
  try {
    const value = JSON.parse(text);
    const pretty = value !== null && typeof value === "object" ? JSON.stringify(value, null, 2) : null;
    return pretty?.length > MAX_HIGHLIGHTED ? null : pretty; // deep nesting is mostly indentation
  } catch {
    return null;
  }
}

function looksLikeDiff(text) {
  return /^(diff --git |--- \S|Index: )/m.test(text) && /^@@ /m.test(text);
}

function colorDiff(text) {
  return text.split("\n").map((line) => {
    const kind = line.startsWith("@@") ? "hunk" : /^(\+\+\+|---|diff |index )/.test(line) ? "header" : line.startsWith("+") ? "added" : line.startsWith("-") ? "removed" : "";
    return h("span", { class: `diff-line${kind ? ` diff-${kind}` : ""}` }, `${line}\n`);
  });
}

function colorCode(text) {
  const parts = [];
  let at = 0, start = 0;
  while (at < text.length) {
    const rule = CODE_RULES.find(([, pattern]) => ((pattern.lastIndex = at), pattern.test(text)));
    if (!rule) {
      at += 1;
      continue;
    }
    const stop = rule[1].lastIndex;
    if (rule[0] !== "name") {
      if (at > start) parts.push(text.slice(start, at));
      parts.push(h("span", { class: `code-${rule[0]}` }, text.slice(at, stop)));
      start = stop;
    }
    at = stop;
  }
  if (start < text.length) parts.push(text.slice(start));
  return parts;
}
