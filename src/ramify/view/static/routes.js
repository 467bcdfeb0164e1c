// Addresses of views: everything after # says what is shown, so a copied link shows the same.

export function href(parts, params = {}) {
  const path = parts.map((part) => encodeURIComponent(part)).join("/");
  const entries = Object.entries(params).flatMap(([name, value]) =>
    value === undefined || value === null || value === "" ? [] : Array.isArray(value) ? value.map((entry) => [name, entry]) : [[name, value]],
  );
  const query = new URLSearchParams(entries).toString();
  return `#/${path}${query ? `?${query}` : ""}`;
}

export function parseRoute(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decodePart);
  return { parts, params: new URLSearchParams(query) };
}

function decodePart(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // somebody typed a percent sign
  }
}

// Change the address without a new entry in the history, and without showing the view again.
export function replaceAddress(parts, params) {
  history.replaceState(null, "", href(parts, params));
}
