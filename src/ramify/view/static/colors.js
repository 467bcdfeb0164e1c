// Colours of values. Zero is the colour of the page, so only what stands out is coloured; the text stays readable.

const MAX_TINT = 0.62;

// Blue above zero, orange below; `limit` is the absolute value that has the full colour.
export function divergingColor(value, limit) {
  if (value === null || value === undefined || !limit) return "";
  const tint = Math.min(1, Math.abs(value) / limit) * MAX_TINT;
  return `color-mix(in srgb, var(${value < 0 ? "--low" : "--high"}) ${(100 * tint).toFixed(1)}%, transparent)`;
}

// From the colour of the page to violet.
export function sequentialColor(value, low, high) {
  if (value === null || value === undefined) return "";
  const tint = (high > low ? (value - low) / (high - low) : 0) * MAX_TINT;
  return `color-mix(in srgb, var(--sequence) ${(100 * Math.max(0, Math.min(MAX_TINT, tint))).toFixed(1)}%, transparent)`;
}

// The colours of a measure, and the values at both ends of its scale.
export function makeScale(measure) {
  const { name, min, max } = measure;
  if (["advantage", "reference_kl", "mismatch", "reward_change"].includes(name)) {
    const limit = Math.max(Math.abs(min), Math.abs(max)) || 1;
    return { color: (value) => divergingColor(value, limit), ends: [-limit, limit], isDiverging: true };
  }
  if (name === "logprob") return { color: (value) => sequentialColor(value === null ? null : -value, 0, Math.max(1, -min)), ends: [0, Math.min(-1, min)], isDiverging: false };
  const low = name === "entropy" ? 0 : min;
  return { color: (value) => sequentialColor(value, low, max), ends: [low, max], isDiverging: false };
}
