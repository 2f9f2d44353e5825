// The live view of the engine. Connected only while this tab is visible, since it costs the engine a little.

import { call, eventsOf } from "./api.js";
import { $, count, h, seconds } from "./dom.js";
import { CACHED, colour, drawExperts, drawLine, drawMap, drawSteps, FIRST_REQUEST, FREE, numShown, requestColour, SHARED } from "./draw.js";

const AGAIN_MS = 2000;
const RATE_OVER_S = 2;
const NUM_STEPS = 400;
const NUM_ROWS = 40;
const NUM_DECISIONS = 16;

let wanted = false;
let controller = null;
let onKeyNeeded = () => {};
let engine = {};
let state = null;
let pages = { requests: [], kinds: new Uint16Array(0), tiers: [] };
let experts = null; // tokens of each layer's experts, lately
let where = null; // how the map was laid out
let steps = [];
let history = []; // totals of late frames
let rates = [];
let isDrawing = false;
const slots = new Map(); // request to its colour's number

export function setUp({ keyNeeded }) {
  onKeyNeeded = keyNeeded;
  document.addEventListener("visibilitychange", connect);
  addEventListener("resize", draw);
  $("map").addEventListener("pointermove", (event) => sayPage(event));
  $("map").addEventListener("pointerleave", () => sayPages());
}

export function setVisible(isVisible) {
  wanted = isVisible;
  connect();
}

export const retry = () => wanted && connect();
export const recolour = () => draw();

// ---- receiving

function connect() {
  controller?.abort();
  controller = null;
  if (wanted && !document.hidden) watch((controller = new AbortController()).signal);
}

async function watch(signal) {
  while (!signal.aborted) {
    try {
      const several = $("model").options.length > 1;
      const reply = await call(`v1/engine/live${several ? `?model=${encodeURIComponent($("model").value)}` : ""}`, { signal });
      say("");
      steps = [];
      history = [];
      experts = null;
      for await (const [name, data] of eventsOf(reply)) await take(name, JSON.parse(data));
      say("The server closed the connection. Reconnecting.");
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401 || error.status === 403) {
        say(error.message);
        if (error.status === 401) onKeyNeeded(error.message);
        return;
      }
      say(`${error.status ? error.message : "The server cannot be reached."} Retrying.`);
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

async function take(name, data) {
  if (name === "engine") engine = data;
  else if (name === "pages") pages = { requests: data.requests, kinds: await unpack(data.kinds), tiers: data.tiers };
  else if (name === "experts") experts = data;
  else if (name === "state") takeState(data);
  draw();
}

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint16Array(await new Response(stream).arrayBuffer());
}

function takeState(data) {
  state = data;
  const latest = steps.at(-1)?.end ?? -Infinity;
  for (const [number, end, duration, numPrefill, numDecode, numRequests] of data.steps) {
    if (end > latest) steps.push({ number, end, duration, numPrefill, numDecode, numRequests });
  }
  steps = steps.slice(-NUM_STEPS);
  history.push({ at: data.time_s, output: data.totals.output_tokens, computed: data.totals.computed_tokens });
  while (history.length > 2 && history[1].at < data.time_s - RATE_OVER_S) history.shift();
  rates = [...rates, rate("output")].slice(-120);
  if (data.engine !== "running") say(`The engine is ${data.engine}.`);
  else say("");
}

/** 0 until a connection has sent two states. */
function rate(name) {
  if (history.length < 2) return 0;
  const [first, last] = [history[0], history.at(-1)];
  return last.at > first.at ? (last[name] - first[name]) / (last.at - first.at) : 0;
}

// ---- showing

const say = (words) => {
  if ($("live-says").textContent !== words) $("live-says").textContent = words;
};

function draw() {
  if (isDrawing || !state || !engine.num_pages) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    isDrawing = false;
    if ($("engine").hidden) return;
    giveColours();
    drawFigures();
    drawPages();
    drawLoads();
    drawTimeline();
    drawRequests();
    drawUsage();
    drawDecisions();
  });
}

/** The colour of a request that has ended is given to a new one. */
function giveColours() {
  const here = new Set([...pages.requests.map(([id]) => id), ...state.requests.map(({ id }) => id)]);
  for (const id of slots.keys()) if (!here.has(id)) slots.delete(id);
  const taken = new Set(slots.values());
  let next = 0;
  for (const id of here) {
    if (slots.has(id)) continue;
    while (taken.has(next)) next++;
    taken.add(next);
    slots.set(id, next);
  }
}

function drawFigures() {
  const { totals } = state;
  const used = engine.num_pages - totals.kv_pages_free;
  const needed = totals.cached_tokens + totals.computed_tokens;
  const prefill = Math.max(rate("computed") - rate("output"), 0);
  const accepted = (100 * totals.accepted_tokens) / totals.draft_tokens;
  const drafts = totals.draft_tokens ? `; ${fixed(accepted)} % of ${count(totals.draft_tokens, "draft")} right` : "";
  const evicted = totals.evicted_pages ? `; ${totals.evicted_pages.toLocaleString("en")} evicted` : "";
  const figures = [
    ["output tokens/s", fixed(rate("output")), `${totals.output_tokens.toLocaleString("en")} so far${drafts}`],
    ["prefill tokens/s", fixed(prefill), `budget ${engine.token_budget} a step`],
    ["running", totals.requests_running, `of ${engine.max_requests} slots`],
    ["queued", totals.requests_waiting, totals.preemptions ? count(totals.preemptions, "preemption") : "none preempted"],
    ["pages in use", used.toLocaleString("en"), `of ${engine.num_pages.toLocaleString("en")}${evicted}`],
    [
      "prefix cache",
      `${fixed((100 * totals.cached_tokens) / Math.max(needed, 1))} %`,
      engine.prefix_caching ? `${count(totals.cached_tokens, "token")} cached` : "prefix caching is off",
    ],
  ];
  if ($("figures").children.length !== figures.length) {
    $("figures").replaceChildren(...figures.map(([name]) => h("div", {}, h("dt", {}, name), h("dd"), h("small"))));
    $("figures").firstChild.append(h("canvas", { "aria-hidden": "true" }));
  }
  figures.forEach(([, value, note], i) => {
    const [, figure, small] = $("figures").children[i].children;
    figure.textContent = value;
    small.textContent = note;
  });
  drawLine($("figures").querySelector("canvas"), rates);
}

const fixed = (number) => (number < 100 ? number.toFixed(1) : Math.round(number).toLocaleString("en"));

function drawPages() {
  const ofRequests = pages.requests.map(([id]) => requestColour(slots.get(id) ?? 0));
  const colours = [colour("page-free"), colour("page-cached"), colour("page-shared"), ...ofRequests];
  where = drawMap($("map"), pages.kinds.subarray(0, numShown(pages.kinds)), colours);
  const counts = tally();
  const legend = [
    [colours[SHARED], `${count(counts[SHARED], "shared page")}`],
    [colours[CACHED], `${counts[CACHED].toLocaleString("en")} cached, evictable`],
    [colours[FREE], `${counts[FREE].toLocaleString("en")} empty`],
  ];
  const owned = pages.kinds.length - counts[FREE] - counts[CACHED] - counts[SHARED];
  const rainbow = h("i", { class: "rainbow" });
  $("map-legend").replaceChildren(
    h("span", {}, rainbow, `${owned.toLocaleString("en")} used by one request, in its colour`),
    ...legend.map(([shade, words]) => h("span", {}, swatch(shade), words)),
  );
  $("tiers").replaceChildren(...pages.tiers.map((tier, i) => tierRow(tier, colour(`tier-${i % 3}`))));
  $("map").setAttribute("aria-label", $("map-legend").textContent);
  if (!$("map").matches(":hover")) sayPages();
}

/** How full a tier behind the device's pages is. */
function tierRow([name, used, most], shade) {
  const filled = h("i");
  filled.style.cssText = `background: ${shade}; width: ${(100 * used) / Math.max(most, 1)}%`;
  const words = `${used.toLocaleString("en")} of ${most.toLocaleString("en")} pages ${name === "disk" ? "on" : "in"} ${name}`;
  return h("li", {}, h("span", {}, swatch(shade), words), h("span", { class: "meter" }, filled));
}

function tally() {
  const counts = new Array(FIRST_REQUEST + pages.requests.length).fill(0);
  for (const kind of pages.kinds) counts[kind]++;
  return counts;
}

function swatch(shade) {
  const mark = h("i");
  mark.style.background = shade;
  return mark;
}

function sayPages() {
  const per = where?.per ?? 1;
  const left = pages.kinds.length - numShown(pages.kinds);
  const more = left ? ` ${count(left, "page")} not used yet are not shown.` : "";
  $("map-says").textContent = (per > 1 ? `Each square is ${per} pages.` : "Each square is a page.") + more;
}

function sayPage(event) {
  if (!where) return;
  const box = $("map").getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left) / where.size);
  const cell = Math.floor((event.clientY - box.top) / where.size) * where.columns + column;
  const page = cell * where.per;
  if (column >= where.columns || page >= pages.kinds.length) return sayPages();
  const kind = pages.kinds[page];
  const what = ["empty", "cached, evictable", "shared"][kind] ?? `used by ${short(pages.requests[kind - FIRST_REQUEST][0])}`;
  $("map-says").textContent = `Page ${page + 1}: ${what}.`;
}

/** A row a layer, a cell an expert: the darker, the more tokens it got. */
function drawLoads() {
  $("experts-panel").hidden = !experts;
  if (!experts) return;
  drawExperts($("experts"), experts.tokens);
  const ratios = experts.tokens.map((row) => (Math.max(...row) * row.length) / Math.max(row.reduce((a, b) => a + b, 0), 1));
  const worst = ratios.indexOf(Math.max(...ratios));
  const words =
    `Each row is a layer, each cell an expert. Least even is layer ${experts.layers[worst]}: its busiest expert gets ` +
    `${ratios[worst].toFixed(1)} times the mean.`;
  $("experts-says").textContent = words;
  $("experts").setAttribute("aria-label", words);
}

function drawTimeline() {
  if (!$("steps-legend").children.length) {
    const part = (name, words) => h("span", {}, h("i", { class: name }), words);
    const parts = [part("is-prefill", "prefill tokens"), part("is-decode", "decode tokens"), part("is-requests", "requests in the step")];
    $("steps-legend").replaceChildren(...parts);
  }
  drawSteps($("steps"), steps);
  const last = steps.at(-1);
  const words = last
    ? `Step ${last.number}: ${seconds(1000 * last.duration)} for ${count(last.numRequests, "request")}, ` +
      `${count(last.numPrefill, "prefill token")} and ${count(last.numDecode, "decode token")}.`
    : "No steps yet.";
  $("steps-says").textContent = words;
  $("steps").setAttribute("aria-label", words);
}

function drawRequests() {
  const counts = tally();
  const held = new Map(pages.requests.map(([id, num], i) => [id, [num, counts[FIRST_REQUEST + i]]]));
  const shown = state.requests.slice(0, NUM_ROWS);
  const rows = shown.map((one) => requestRow(one, held.get(one.id)));
  const left = state.requests.length - shown.length + state.num_unlisted;
  if (left) rows.push(wholeRow(`and ${left} more`));
  if (!rows.length) rows.push(wholeRow("No requests."));
  $("requests").tBodies[0].replaceChildren(...rows);
}

/** The ledger: tenants, and what is nobody's. A watcher of one tenant sees its own row only. */
function drawUsage() {
  const total = Math.max(state.usage_s, 1e-9);
  const [nobody, tenants] = [state.usage.filter(([tenant]) => tenant === null), state.usage.filter(([tenant]) => tenant !== null)];
  const rows = [...tenants, ...nobody].map(([tenant, name, device, host, computed, output]) =>
    h(
      "tr",
      {},
      h("td", { title: name }, tenant === null ? h("span", { class: "soft" }, name) : tenant ? h("code", {}, name.slice(0, 8)) : "all requests"),
      h("td", {}, `${((100 * (device + host)) / total).toFixed(1)} %`),
      h("td", {}, tenant === null ? "–" : seconds(1000 * device)),
      h("td", {}, seconds(1000 * host)),
      h("td", {}, tenant === null ? "–" : computed.toLocaleString("en")),
      h("td", {}, tenant === null ? "–" : output.toLocaleString("en")),
    ),
  );
  $("usage").tBodies[0].replaceChildren(...rows);
  $("usage-says").textContent = `Of ${seconds(1000 * total)} of the engine. A step is shared by the tokens computed in it.`;
}

const wholeRow = (words) => h("tr", {}, h("td", { colSpan: 6, class: "soft" }, words));

function requestRow(request, [num, own] = [0, 0]) {
  const meter = h("span", { class: "meter", title: `${request.cached} cached` }, h("i"), h("i"));
  const part = (tokens) => `${(100 * tokens) / Math.max(request.prompt, 1)}%`;
  meter.children[0].style.width = part(request.cached);
  meter.children[1].style.width = part(Math.max(request.prefilled - request.cached, 0));
  return h(
    "tr",
    {},
    h("td", { title: request.id }, swatch(requestColour(slots.get(request.id) ?? 0)), h("code", {}, short(request.id))),
    h("td", {}, h("span", { class: `phase ${request.phase}` }, request.phase)),
    h("td", {}, meter, request.prompt.toLocaleString("en")),
    h("td", {}, request.output ? request.output.toLocaleString("en") : "–"),
    h("td", { title: count(num - own, "shared page") }, num ? `${own}${num > own ? ` + ${num - own}` : ""}` : "–"),
    h("td", {}, seconds(1000 * request.age_s)),
  );
}

/** An id (tenant/name/part), shortened. The part's number is shown only if it is not the first. */
function short(id) {
  const [, name, part] = id.split("/");
  return (name ?? id).replace(/^([a-z]+-\w{6})\w*/, "$1") + (part && part !== "0" ? `/${part}` : "");
}

const DECISIONS = {
  Submitted: "queued", Admitted: "admitted", Deferred: "deferred", Preempted: "preempted", Finished: "finished", Aborted: "aborted",
  EngineDown: "engine down", EngineRestarted: "restarted", TierNotUsed: "not used", MovesFailed: "not moved",
};

function drawDecisions() {
  const latest = state.decisions.slice(-NUM_DECISIONS).reverse();
  const first = latest[0]?.[0] ?? 0;
  if ($("decisions").dataset.latest === String(first)) return;
  $("decisions").dataset.latest = first;
  const rows = latest.map(([, kind, id, words]) =>
    h("li", { class: kind }, h("b", {}, DECISIONS[kind] ?? kind), id && h("code", {}, short(id)), h("span", {}, words)),
  );
  $("decisions").replaceChildren(...rows);
}
