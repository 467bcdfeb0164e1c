// Answers of the server, or, in an exported file, the answers that were recorded in it.

const recorded = document.getElementById("recorded");
const answers = recorded ? new Map(JSON.parse(recorded.textContent)) : null;

export const isExport = answers !== null;

const TITLES = { 400: "The address is not valid", 404: "Not found" }; // by status; other failures have their name as a title

export class RequestError extends Error {
  constructor(title, message) {
    super(message);
    this.title = title;
  }
}

export async function get(path, params = {}) {
  if (answers) return findAnswer(path, params);
  let response;
  try {
    response = await fetch(buildUrl(path, params));
  } catch {
    throw new RequestError("No answer", "ramify view does not answer; it was stopped, or its machine cannot be reached.");
  }
  const isJson = (response.headers.get("content-type") ?? "").startsWith("application/json");
  const body = isJson ? await response.json() : await response.text();
  if (!response.ok) throw new RequestError(TITLES[response.status] ?? body.name ?? `Status ${response.status}`, body.message ?? String(body));
  return body;
}

// An exported file has one answer with all metrics, and one for the tokens of each message.
function findAnswer(path, params) {
  if (path === "tokens" && params.node.length > 1) return params.node.flatMap((node) => findAnswer(path, { ...params, node: [node] }));
  const entries = listParams(path === "metrics" ? { run: params.run } : params);
  const answer = answers.get(JSON.stringify([path, entries.sort()]));
  if (answer === undefined) throw new RequestError("Not in this file", "This file holds a part of a run; open the run itself with ramify view.");
  return answer;
}

export function buildUrl(path, params) {
  const query = new URLSearchParams(listParams(params)).toString();
  return `/api/${path}${query ? `?${query}` : ""}`;
}

function listParams(params) {
  return Object.entries(params).flatMap(([name, value]) => {
    if (value === undefined || value === null || value === "") return [];
    return Array.isArray(value) ? value.map((entry) => [name, String(entry)]) : [[name, String(value)]];
  });
}
