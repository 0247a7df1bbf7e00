// From a request's times to the parts of its time line. Pure: no DOM, no clock.

export const PHASES = ["queue", "prefill", "transfer", "decode"];

/** [{name, from, to}] in seconds after the request's arrival, in order and without overlap, up to its end. */
export function parts(request) {
  const end = request.e2e_s, found = [];  // "earlier": tries at other workers
  let at = 0;
  const add = (name, seconds) => {
    const to = Math.min(end, at + Math.max(0, seconds));
    if (to > at) found.push({ name, from: at, to });
    at = to;
  };
  if (request.opened_s === null) {
    add(request.running ? "wait" : "failed", end);
    return found;
  }
  add("wait", request.wait_s ?? request.opened_s);
  add(request.retries + request.resumes ? "earlier" : "wait", request.opened_s - at);
  if (request.running) {
    add("running", end - at);
    return found;
  }
  for (const name of request.timing ? PHASES : []) add(name, request.timing[`${name}_s`]);
  add(request.code === "ok" ? "other" : "failed", end - at);
  return found;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 99.5) return `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
  return uptime(value);
}

/** Whole seconds. */
export function uptime(value) {
  if (value < 60) return `${value} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(value % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)} G`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  return value >= 1e5 ? `${Math.round(value / 1e3)} k` : Math.round(value).toLocaleString("en");
}

export function bytes(value) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (value >= size) return `${(value / size).toFixed(value >= 10 * size ? 0 : 1)} ${unit}`;
  }
  return `${value} B`;
}

export function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor((sorted.length - 1) / 2)];
}
