// The engine's view: frames of what it does, as they come. Watched only while this tab is in view, since watching costs it a little.

import { call, eventsOf } from "./api.js";
import { $, count, h, seconds } from "./dom.js";
import { CACHED, colour, drawLine, drawMap, drawSteps, FIRST_OWNER, FREE, numShown, ownerColour, SHARED } from "./draw.js";

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
let pages = { owners: [], kinds: new Uint16Array(0) };
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
      const reply = await call("/v1/engine/live", { signal });
      say("");
      steps = [];
      history = [];
      for await (const [name, data] of eventsOf(reply)) await take(name, JSON.parse(data));
      say("The server has ended the view. Connecting again.");
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401 || error.status === 403) {
        say(error.status === 403 ? "This view shows everybody’s requests, so it needs an admin key." : error.message);
        if (error.status === 401) onKeyNeeded(error.message);
        return;
      }
      say(`${error.status ? error.message : "The server cannot be reached."} Trying again.`);
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

async function take(name, data) {
  if (name === "engine") engine = data;
  else if (name === "pages") pages = { owners: data.owners, kinds: await unpack(data.kinds) };
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
  history.push({ at: data.time_s, written: data.totals.output_tokens, computed: data.totals.computed_tokens });
  while (history.length > 2 && history[1].at < data.time_s - RATE_OVER_S) history.shift();
  rates = [...rates, rate("written")].slice(-120);
  if (data.engine !== "working") say(`The engine is ${data.engine}.`);
  else say("");
}

function rate(name) {
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
    drawTimeline();
    drawRequests();
    drawDecisions();
  });
}

/** Whoever goes leaves a colour for whoever comes. */
function giveColours() {
  const here = new Set([...pages.owners.map(([id]) => id), ...state.requests.map(({ id }) => id)]);
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
  const read = Math.max(rate("computed") - rate("written"), 0);
  const evicted = totals.evicted_pages ? `; ${totals.evicted_pages.toLocaleString("en")} evicted` : "";
  const figures = [
    ["tokens per second", fixed(rate("written")), `${totals.output_tokens.toLocaleString("en")} so far`],
    ["prompt tokens/s", fixed(read), `budget ${engine.token_budget} a step`],
    ["running", totals.requests_running, `of ${engine.max_requests} rows`],
    ["waiting", totals.requests_waiting, totals.preemptions ? count(totals.preemptions, "preemption") : "none preempted"],
    ["pages in use", used.toLocaleString("en"), `of ${engine.num_pages.toLocaleString("en")}${evicted}`],
    [
      "prefix cache",
      `${fixed((100 * totals.cached_tokens) / Math.max(needed, 1))} %`,
      engine.prefix_caching ? `${count(totals.cached_tokens, "token")} found, not computed` : "prefix caching is off",
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
  const owners = pages.owners.map(([id]) => ownerColour(slots.get(id) ?? 0));
  const colours = [colour("page-free"), colour("page-cached"), colour("page-shared"), ...owners];
  where = drawMap($("map"), pages.kinds.subarray(0, numShown(pages.kinds)), colours);
  const counts = tally();
  const legend = [
    [colours[SHARED], `${count(counts[SHARED], "shared page")}`],
    [colours[CACHED], `${counts[CACHED].toLocaleString("en")} free, still findable`],
    [colours[FREE], `${counts[FREE].toLocaleString("en")} empty`],
  ];
  const owned = pages.kinds.length - counts[FREE] - counts[CACHED] - counts[SHARED];
  const rainbow = h("i", { class: "rainbow" });
  $("map-legend").replaceChildren(
    h("span", {}, rainbow, `${owned.toLocaleString("en")} held by one request, in its colour`),
    ...legend.map(([shade, words]) => h("span", {}, swatch(shade), words)),
  );
  $("map").setAttribute("aria-label", $("map-legend").textContent);
  if (!$("map").matches(":hover")) sayPages();
}

function tally() {
  const counts = new Array(FIRST_OWNER + pages.owners.length).fill(0);
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
  const more = left ? ` ${count(left, "page")} that nobody has used yet are left out.` : "";
  $("map-says").textContent = (per > 1 ? `A square stands for ${per} pages.` : "A square is a page.") + more;
}

function sayPage(event) {
  if (!where) return;
  const box = $("map").getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left) / where.size);
  const cell = Math.floor((event.clientY - box.top) / where.size) * where.columns + column;
  const page = cell * where.per;
  if (column >= where.columns || page >= pages.kinds.length) return sayPages();
  const kind = pages.kinds[page];
  const what = ["empty", "free, its content can still be found", "shared"][kind] ?? `held by ${short(pages.owners[kind - FIRST_OWNER][0])}`;
  $("map-says").textContent = `Page ${page + 1}: ${what}.`;
}

function drawTimeline() {
  if (!$("steps-legend").children.length) {
    const part = (name, words) => h("span", {}, h("i", { class: name }), words);
    const parts = [part("is-prefill", "prompt tokens"), part("is-decode", "answer tokens"), part("is-requests", "requests in the step")];
    $("steps-legend").replaceChildren(...parts);
  }
  drawSteps($("steps"), steps);
  const last = steps.at(-1);
  const words = last
    ? `Step ${last.number}: ${seconds(1000 * last.duration)} for ${count(last.numRequests, "request")}, ` +
      `${count(last.numPrefill, "prompt token")} and ${count(last.numDecode, "answer token")}.`
    : "No step since you came.";
  $("steps-says").textContent = words;
  $("steps").setAttribute("aria-label", words);
}

function drawRequests() {
  const counts = tally();
  const held = new Map(pages.owners.map(([id, num], i) => [id, [num, counts[FIRST_OWNER + i]]]));
  const shown = state.requests.slice(0, NUM_ROWS);
  const rows = shown.map((one) => requestRow(one, held.get(one.id)));
  const left = state.requests.length - shown.length + state.num_untold;
  if (left) rows.push(wholeRow(`and ${left} more`));
  if (!rows.length) rows.push(wholeRow("Nobody asks anything at the moment."));
  $("requests").tBodies[0].replaceChildren(...rows);
}

const wholeRow = (words) => h("tr", {}, h("td", { colSpan: 6, class: "soft" }, words));

function requestRow(request, [num, own] = [0, 0]) {
  const read = h("span", { class: "meter", title: `${request.cached} cached` }, h("i"), h("i"));
  const part = (tokens) => `${(100 * tokens) / Math.max(request.prompt, 1)}%`;
  read.children[0].style.width = part(request.cached);
  read.children[1].style.width = part(Math.max(request.prefilled - request.cached, 0));
  return h(
    "tr",
    {},
    h("td", { title: request.id }, swatch(ownerColour(slots.get(request.id) ?? 0)), h("code", {}, short(request.id))),
    h("td", {}, h("span", { class: `phase ${request.phase}` }, PHASES[request.phase])),
    h("td", {}, read, String(request.prompt)),
    h("td", {}, request.output ? count(request.output, "token") : "–"),
    h("td", {}, num ? `${own}${num > own ? ` + ${num - own} shared` : ""}` : "–"),
    h("td", {}, seconds(1000 * request.age_s)),
  );
}

/** An id (owner/name/part) as short as tells it apart: a part's number only where there are several. */
function short(id) {
  const [, name, part] = id.split("/");
  return (name ?? id).replace(/^([a-z]+-\w{6})\w*/, "$1") + (part && part !== "0" ? `/${part}` : "");
}

const PHASES = { queued: "waits", preempted: "set aside", prefill: "reads", decode: "writes" };

const DECISIONS = {
  Submitted: "arrived", Admitted: "admitted", Deferred: "waits", Preempted: "preempted", Finished: "finished", Aborted: "ended",
  EngineRestarted: "restarted",
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
