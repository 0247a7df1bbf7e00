// The status page: asks for status.json once a second and shows it. Everything is written as text, never as HTML.
import { bytes, count, median, parts, seconds, uptime } from "./waterfall.js";

const EVERY_MS = 1000, LIMIT_MS = 3000, HISTORY = 60, KEY = "tandem-key";
const $ = (id) => document.getElementById(id);
const GONE = ["client_disconnected", "aborted"];
const GOOD = ["alive"], WARN = ["joining", "half_open", "ejected", "draining"];

// Elements

function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Give `parent` one child for each item, made by `make(item)` → {root, update}; what has not moved stays as it is. */
function keyed(parent, rows, items, key, make) {
  const wanted = new Set(items.map(key));
  for (const [name, row] of rows) {
    if (!wanted.has(name)) { row.roots.forEach((root) => root.remove()); rows.delete(name); }
  }
  let next = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    if (!rows.has(name)) rows.set(name, make(item));
    const row = rows.get(name);
    row.update(item);
    for (const root of row.roots) {
      if (root === next) next = next.nextElementSibling;
      else parent.insertBefore(root, next);
    }
  }
}

function cell(label, ...children) {
  return h("td", { role: "cell", "data-label": label }, ...children);
}

// Tiles

const history = { requests: [], tokens: [] };
let before = null;

function rates(status) {
  const done = Object.values(status.totals.ended).reduce((a, b) => a + b, 0);
  const now = { at: status.now, done, tokens: status.totals.completion_tokens };
  if (before && now.done < before.done) {
    history.requests.length = history.tokens.length = 0;  // the router has started again
  } else if (before && now.at > before.at) {
    const span = now.at - before.at;
    history.requests.push((now.done - before.done) / span);
    history.tokens.push(Math.max(0, now.tokens - before.tokens) / span);
  }
  before = now;
  for (const line of Object.values(history)) if (line.length > HISTORY) line.shift();
}

const recently = (line) => (line.length ? line.slice(-5).reduce((a, b) => a + b, 0) / Math.min(5, line.length) : 0);

function spark() {
  const ns = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(ns, "svg");
  svg.setAttribute("viewBox", `0 0 ${HISTORY - 1} 20`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const area = document.createElementNS(ns, "polygon"), line = document.createElementNS(ns, "polyline");
  svg.append(area, line);
  return {
    svg,
    draw(values) {
      const top = Math.max(...values, 1e-9), left = HISTORY - values.length;
      if (values.length < 2) { line.removeAttribute("points"); area.removeAttribute("points"); return; }
      const points = values.map((value, i) => `${left + i},${(19 - (17 * value) / top).toFixed(2)}`);
      line.setAttribute("points", points.join(" "));
      area.setAttribute("points", `${left},20 ${points.join(" ")} ${HISTORY - 1},20`);
    },
  };
}

function tile(label, line) {
  const value = h("dd", { class: "value" }), note = h("dd", { class: "note" });
  const root = h("div", { class: "tile" }, h("dt", {}, label), value, note);
  const chart = line ? spark() : null;
  if (chart) root.append(chart.svg);
  $("tiles").append(root);
  return (main, unit, extra) => {
    const shown = `${main}|${unit}|${extra}`;
    if (root.dataset.shown !== shown) {
      root.dataset.shown = shown;
      value.replaceChildren(main, ...(unit ? [h("small", {}, unit)] : []));
      note.textContent = extra;
    }
    if (chart) chart.draw(line);
  };
}

const tiles = {
  running: tile("Requests running"),
  requests: tile("Requests", history.requests),
  tokens: tile("Answer tokens", history.tokens),
  first: tile("First token, median"),
  cached: tile("Prompt tokens cached"),
  failed: tile("Failed"),
};

function showTiles(status) {
  const totals = status.totals, ok = status.requests.filter((request) => !request.running && request.code === "ok");
  const ended = Object.values(totals.ended).reduce((a, b) => a + b, 0), failed = ended - (totals.ended.ok ?? 0);
  rates(status);
  tiles.running(count(totals.in_flight), "", totals.waiting ? `${count(totals.waiting)} wait at the router` : "none waits");
  tiles.requests(recently(history.requests).toFixed(1), "/ s", `${count(ended)} since the start`);
  tiles.tokens(count(recently(history.tokens)), "/ s", `${count(totals.completion_tokens)} since the start`);
  if (chosen() === "all") {
    const first = median(ok.filter((request) => request.stream).map((request) => request.ttft_s));
    tiles.first(seconds(first), "", `whole answer ${seconds(median(ok.map((request) => request.e2e_s)))}`);
  }
  if (totals.prompt_tokens) {
    const share = (100 * totals.cached_tokens) / totals.prompt_tokens;
    tiles.cached(share.toFixed(share < 10 ? 1 : 0), "%", `${count(totals.cached_tokens)} of ${count(totals.prompt_tokens)}`);
  } else tiles.cached("–", "", "no prompts yet");
  tiles.failed(count(failed), "", `${count(totals.retries)} retried, ${count(totals.resumes)} resumed`);
}

// Workers

const workerRows = new Map();
let layouts = [];

function stacked(parent, kinds, total, text) {
  const shown = JSON.stringify([kinds, total, text]);
  if (parent.dataset.shown === shown) return;
  parent.dataset.shown = shown;
  if (!total) { parent.replaceChildren("–"); return; }
  const bar = h("div", { class: "stack", "aria-hidden": "true" });
  for (const [kind, value] of kinds) {
    const part = h("i", { class: `s-${kind}` });
    part.style.width = `${(100 * value) / total}%`;
    bar.append(part);
  }
  parent.replaceChildren(bar, h("span", { class: "sub" }, text));
}

function workerRow(worker) {
  const url = h("span", { class: "url mono" }, worker.url), role = h("span", {}), model = h("span", { class: "sub" });
  const state = h("span", {}), ranks = h("span", { class: "chip warn" }), reason = h("span", { class: "sub" });
  const load = h("span", {}), waits = h("span", { class: "sub" });
  const slots = cell("Slots"), pages = cell("Pages");
  const hits = h("span", {}), evicted = h("span", { class: "sub" });
  const dot = h("i", { class: "dot", "aria-hidden": "true" }), layout = h("span", { class: "mono" });
  const root = h("tr", { role: "row" },
    cell("Worker", role, url, model), cell("State", state, " ", ranks, reason), cell("Load", load, waits), slots, pages,
    cell("Cache", hits, evicted), cell("Layout", dot, layout));
  function update(now) {
    const node = now.node;
    role.className = `role ${now.role}`;
    write(role, now.role);
    write(model, node ? [node.model, now.ranks > 1 ? `${now.ranks} ranks` : ""].filter(Boolean).join(" · ") : "");
    state.className = `chip ${GOOD.includes(now.state) ? "good" : WARN.includes(now.state) ? "warn" : "bad"}`;
    write(state, now.state.replace("_", " "));
    ranks.hidden = !now.alive || now.ranks_alive === now.ranks;
    write(ranks, `${now.ranks_alive} of ${now.ranks} ranks`);
    const silent = now.alive && now.node_age_s > 4 ? `no word for ${seconds(now.node_age_s)}` : "";
    write(reason, now.reason || now.breaker?.reason || silent);
    write(load, now.alive ? `${count(now.requests)} ${now.requests === 1 ? "leg" : "legs"}` : "–");
    write(waits, node ? work(node) : "");
    const slotParts = node ? [["main", node.slots_main], ["track", node.slots_track], ["cached", node.slots_cached]] : [];
    stacked(slots, slotParts, node?.slots_total, node ? `${count(node.slots_free)} of ${count(node.slots_total)} free` : "");
    const used = node ? node.pages_total - node.pages_free - node.pages_cached : 0;
    stacked(pages, node ? [["main", used], ["cached", node.pages_cached]] : [], node?.pages_total,
      node ? `${count(node.pages_free)} of ${count(node.pages_total)} free` : "");
    const cache = node?.cache;
    write(hits, cache ? `${rate(cache)} hits` : "–");
    write(evicted, cache ? `${count(cache.hit_tokens)} tokens saved` : "");
    dot.className = now.fingerprint ? `dot l${layouts.indexOf(now.fingerprint) % 4}` : "dot";
    write(layout, now.fingerprint ? now.fingerprint.slice(0, 10) : "unknown");
    layout.title = now.fingerprint ?? "";
  }
  return { roots: [root], update };
}

function work(node) {
  const sum = (...names) => names.reduce((total, name) => total + (node[name] ?? 0), 0);
  const busy = sum("num_prefilling", "num_running", "num_receiving"), waits = sum("num_waiting", "num_reserving");
  if (!busy && !waits) return "idle";
  return waits ? `${busy} computed, ${waits} wait` : `${busy} computed`;
}

function rate(cache) {
  const all = cache.hits + cache.misses;
  return all ? `${Math.round((100 * cache.hits) / all)} %` : "no";
}

function showWorkers(status) {
  layouts = [...new Set(status.workers.map((worker) => worker.fingerprint).filter(Boolean))];
  keyed($("workers"), workerRows, status.workers, (worker) => `${worker.role} ${worker.url}`, workerRow);
  $("no-workers").hidden = status.workers.length > 0;
}

// Requests

const requestRows = new Map(), expanded = new Set();
let longest = 1, made = 0;

const NAMES = { wait: "waiting", earlier: "earlier tries", failed: "until it failed", running: "running", other: "other" };

function drawLine(line, request) {
  const shown = JSON.stringify([longest, request.e2e_s, request.code, request.timing, request.ttft_s]);
  if (line.dataset.shown === shown) return;
  line.dataset.shown = shown;
  const found = parts(request), at = (value) => `${Math.min(100, (100 * value) / longest)}%`;
  const bars = found.map((part) => {
    const bar = h("i", { class: `p-${part.name}` });
    bar.style.left = at(part.from);
    bar.style.width = at(part.to - part.from);
    return bar;
  });
  if (request.stream && request.ttft_s !== null && request.completion_tokens > 0) {
    const mark = h("b");
    mark.style.left = at(request.ttft_s);
    bars.push(mark);
  }
  const said = found.map((part) => `${NAMES[part.name] ?? part.name} ${seconds(part.to - part.from)}`);
  line.setAttribute("aria-label", said.join(", "));
  line.title = said.join("\n");
  line.replaceChildren(...bars);
}

/** An id that the router has made is told from others by what comes behind its prefix. */
function short(id) {
  const own = id.replace(/^(chatcmpl-|cmpl-)(?=.)/, "");
  return own.length > 18 ? `${own.slice(0, 15)}…` : own;
}

function requestRow(request) {
  const id = request.id, details = h("tr", { role: "row", class: "details", id: `details-${made++}` });
  const more = h("button", { class: "more mono", type: "button", "aria-controls": details.id, onclick: toggle }, short(id));
  more.title = id;
  const began = h("span", {}, new Date(request.began_at * 1000).toLocaleTimeString("en-GB"));
  const result = h("span", {}), tokens = h("span", {}), total = h("span", {});
  const line = h("div", { class: "line", role: "img" });
  const path = h("span", { class: "sub" }, request.endpoint + (request.stream ? " · stream" : ""));
  const root = h("tr", { role: "row" }, cell("Request", more, path), cell("Began", began), cell("Result", result),
    cell("Tokens", tokens), cell("Time line", line), h("td", { role: "cell", class: "num", "data-label": "Total" }, total));
  let latest = request;

  function toggle() {
    if (!expanded.delete(key(latest))) expanded.add(key(latest));
    update(latest);
  }
  function update(now) {
    latest = now;
    const kind = now.running ? "quiet" : now.code === "ok" ? "good" : GONE.includes(now.code) ? "warn" : "bad";
    result.className = `chip ${kind}`;
    write(result, now.running && now.opened_s === null ? "waiting" : now.code.replaceAll("_", " "));
    write(tokens, now.running || !(now.prompt_tokens + now.completion_tokens) ? "–" : `${count(now.prompt_tokens)} → ${count(now.completion_tokens)}`);
    write(total, seconds(now.e2e_s));
    drawLine(line, now);
    const open = expanded.has(key(now));
    more.setAttribute("aria-expanded", String(open));
    details.hidden = !open;
    if (open) fill(details, now);
  }
  return { roots: [root, details], update };
}

function fill(details, now) {
  const shown = JSON.stringify(now);
  if (details.dataset.shown === shown) return;
  details.dataset.shown = shown;
  const moved = now.retries + now.resumes ? `${now.retries} retried, ${now.resumes} resumed` : "no";
  const sizes = Object.entries(now.transfer_bytes).map(([part, size]) => `${part} ${bytes(size)}`).join(", ");
  const facts = [
    ["Id", now.id], ["Status", now.running ? "–" : `${now.status} ${now.code}`], ["Sequences", count(now.sequences)],
    ["Prefill worker", now.prefill ?? "–"], ["Decode worker", now.decode ?? "–"], ["Moved", moved],
    ["Prompt tokens", `${count(now.prompt_tokens)}, ${count(now.cached_tokens)} cached`],
    ["Waited at the router", seconds(now.wait_s)], ["First byte after", seconds(now.ttft_s)],
    ...(now.timing ? Object.entries(now.timing).map(([name, value]) => [word(name), seconds(value)]) : []),
    ["Transferred", sizes || "nothing"],
  ];
  details.replaceChildren(h("td", { role: "cell", colspan: "6" },
    h("dl", {}, ...facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))))));
}

const word = (name) => name[0].toUpperCase() + name.slice(1).replace("_s", "");
const chosen = () => document.querySelector("input[name=filter]:checked").value;
const key = (request) => `${request.id} ${request.began_at}`;

function showRequests(status) {
  const filter = chosen();
  const shown = [...status.requests].sort((a, b) => b.began_at - a.began_at);
  longest = nice(Math.max(0.001, ...shown.map((request) => request.e2e_s)));
  write($("scale"), shown.length ? `0 to ${seconds(longest)}` : "");
  keyed($("requests"), requestRows, shown, key, requestRow);
  const none = { all: "No requests yet.", running: "Nothing runs.", failed: "None of the last requests has failed." };
  write($("no-requests"), none[filter]);
  $("no-requests").hidden = shown.length > 0;
}

/** The next larger 1, 2 or 5 times a power of ten, so that the scale does not move with every request. */
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((step) => step * power >= value * 0.999);
}

// Cached prefixes

const cacheCards = new Map();

function cacheCard(worker) {
  const list = h("ol"), title = h("h3", {}, h("span", { class: `role ${worker.role}` }, worker.role), worker.url);
  function update(now) {
    const shown = JSON.stringify(now.prefixes);
    if (list.dataset.shown === shown) return;
    list.dataset.shown = shown;
    const top = Math.max(...now.prefixes.map((family) => family.tokens));
    list.replaceChildren(...now.prefixes.map((family) => {
      const bar = h("i", family.in_use ? { class: "held" } : {});
      bar.style.width = `${(100 * family.tokens) / top}%`;
      const text = [`${count(family.tokens)} tokens`, plural(family.branches, "end"), plural(family.states, "state")];
      if (family.in_use) text.push("in use");
      return h("li", {}, h("span", { class: "track", "aria-hidden": "true" }, bar), h("span", {}, text.join(" · ")));
    }));
  }
  return { roots: [h("div", {}, title, list)], update };
}

const plural = (number, name) => `${count(number)} ${name}${number === 1 ? "" : "s"}`;

function showPrefixes(status) {
  const having = status.workers.filter((worker) => worker.prefixes.length > 0);
  keyed($("prefixes"), cacheCards, having, (worker) => `${worker.role} ${worker.url}`, cacheCard);
  $("no-prefixes").hidden = having.length > 0;
}

// What is said aloud: changes of state, not each number.

let spoken = new Map();

function speak(status) {
  const states = new Map(status.workers.map((worker) => [`${worker.role} worker ${worker.url}`, worker.state]));
  const news = [];
  for (const [name, state] of states) {
    if (spoken.size && spoken.get(name) !== state) news.push(`${name} is ${state.replace("_", " ")}`);
  }
  for (const name of spoken.keys()) if (!states.has(name)) news.push(`${name} is gone`);
  spoken = states;
  if (news.length) $("said").textContent = `${news.join(". ")}.`;
}

function showHealth(status) {
  const [kind, text] = status.draining ? ["warn", "draining"] : status.serving ? ["good", "serving"] : ["bad", "not serving"];
  $("health").className = `chip ${kind}`;
  write($("health"), text);
  write($("facts"), `version ${status.version} · up ${uptime(Math.floor(status.uptime_s))}`);
  const adding = `no workers yet: start nodes with --router ${location.origin}, or tell the router of them by POST /workers or --prefill and --decode`;
  if (!status.workers.length) status = { ...status, why_not: adding };
  const trouble = [status.serving || status.draining ? "" : status.why_not, ...status.mismatches].filter(Boolean).join(" · ");
  write($("trouble"), trouble);
  $("trouble").hidden = !trouble;
}

// The talk with the router

let heard = null, paused = false, timer = null, asking = false, again = false, wasStale = false;

class NeedsKey extends Error {}

function get(path) {
  const key = sessionStorage.getItem(KEY);
  return fetch(path, {
    headers: key ? { authorization: `Bearer ${key}` } : {}, signal: AbortSignal.timeout(LIMIT_MS), cache: "no-store",
  });
}

async function ask() {
  const key = sessionStorage.getItem(KEY), response = await get(`status.json?requests=${chosen()}`);
  if (response.status === 401 || response.status === 403) throw new NeedsKey(key ? "refused" : "none");
  if (!response.ok) throw new Error(`status ${response.status}`);
  return response.json();
}

function show(status) {
  showHealth(status);
  showTiles(status);
  showWorkers(status);
  showRequests(status);
  showPrefixes(status);
  speak(status);
}

function setStale(stale) {
  document.body.classList.toggle("is-stale", stale);
  $("stale").hidden = !stale;
  if (stale) {
    $("health").className = "chip bad";
    write($("health"), "no answer");
    write($("stale").querySelector("span"), heard ? `What is shown is of ${heard.toLocaleTimeString("en-GB")}.` : "Nothing was heard of it yet.");
  }
  if (stale !== wasStale) $("said").textContent = stale ? "The router does not answer." : "The router answers again.";
  wasStale = stale;
}

function demandKey(why) {
  $("content").hidden = true;
  const first = $("ask").hidden;
  $("ask").hidden = false;
  $("forget").hidden = $("links").hidden = true;
  if (why === "refused") {
    sessionStorage.removeItem(KEY);
    $("ask-why").className = "bad";
    write($("ask-why"), "This key was refused. An admin key is needed.");
  }
  $("health").className = "chip quiet";
  write($("health"), "locked");
  if (first || why === "refused") $("key").focus();
}

async function tick() {
  clearTimeout(timer);
  if (asking) { again = true; return; }
  asking = true;
  try {
    const status = await ask();
    heard = new Date();
    $("ask").hidden = true;
    $("content").hidden = $("links").hidden = false;
    $("forget").hidden = !sessionStorage.getItem(KEY);
    setStale(false);
    show(status);
  } catch (error) {
    if (error instanceof NeedsKey) { setStale(false); demandKey(error.message); }
    else setStale(true);
  }
  asking = false;
  if (again) { again = false; tick(); return; }
  if (!document.hidden && !paused && $("ask").hidden) timer = setTimeout(tick, EVERY_MS);
}

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  write($("pause"), paused ? "Paused" : "Pause");
  if (paused) clearTimeout(timer);
  else tick();
});
$("ask-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value);
  $("key").value = "";
  tick();
});
// A link cannot take the key along.
$("links").addEventListener("click", async (event) => {
  const link = event.target.closest("a");
  if (!link || !sessionStorage.getItem(KEY)) return;
  event.preventDefault();
  write($("raw-title"), link.textContent);
  write($("raw-text"), "…");
  $("raw").showModal();
  try {
    const response = await get(link.getAttribute("href")), text = await response.text();
    const isJson = response.headers.get("content-type")?.includes("json");
    write($("raw-text"), isJson ? JSON.stringify(JSON.parse(text), null, 2) : text);
  } catch (error) {
    write($("raw-text"), `The router does not answer: ${error.message}`);
  }
});
$("raw-close").addEventListener("click", () => $("raw").close());
$("forget").addEventListener("click", () => { sessionStorage.removeItem(KEY); tick(); });
for (const input of document.querySelectorAll("input[name=filter]")) {
  input.addEventListener("change", () => tick());
}
document.addEventListener("visibilitychange", () => { if (!document.hidden && !paused) tick(); });
tick();
