// The canvases of the engine's view: a map of pages, bars of steps, a line of rates.

import { h, seconds } from "./dom.js";

export const FREE = 0;
export const CACHED = 1;
export const SHARED = 2;
export const FIRST_REQUEST = 3;

const MAP_HEIGHT = 260;
const CELLS = [18, 16, 14, 12, 10, 9, 8, 7, 6, 5, 4, 3];

let probe;

/** What a colour of the style sheet is now, in this theme. */
export function colour(name) {
  if (!probe) document.body.append((probe = h("i", { hidden: true }))); // anything visible would be a row of the page's grid
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

/** A hue for each request, far from its neighbours'; readable on the page's background. */
export function requestColour(slot) {
  const isDark = getComputedStyle(document.documentElement).getPropertyValue("--is-dark").trim() === "1";
  const hue = (190 + slot * 137.508) % 360;
  return isDark ? `hsl(${hue} 52% 64%)` : `hsl(${hue} 44% 50%)`;
}

/** A canvas as wide as its place, sharp on any screen. */
function prepare(canvas, height) {
  const width = canvas.clientWidth;
  const ratio = devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return [context, width];
}

/** How many pages are worth showing: pages are taken in order until all have been used once, so the rest is empty. In powers of
 * two, so that the map seldom changes its scale; all of them, where that is not many more. */
export function numShown(kinds) {
  let end = kinds.length;
  while (end > 0 && kinds[end - 1] === FREE) end--;
  let num = 256;
  while (num < end) num *= 2;
  return 2 * num < kinds.length ? num : kinds.length;
}

/** Cells as large as fit; where not even the smallest do, a cell stands for several pages. */
export function layOut(numPages, width) {
  for (const size of CELLS) {
    const columns = Math.max(Math.floor(width / size), 1);
    const rows = Math.ceil(numPages / columns);
    if (rows * size <= MAP_HEIGHT) return { size, columns, rows, per: 1 };
  }
  const size = CELLS.at(-1);
  const columns = Math.max(Math.floor(width / size), 1);
  const per = Math.ceil(numPages / (columns * Math.floor(MAP_HEIGHT / size)));
  return { size, columns, rows: Math.ceil(Math.ceil(numPages / per) / columns), per };
}

/** What a cell of several pages shows: the kind that most of its used pages are, and how many of four quarters are used. */
export function sum(kinds, start, end) {
  const counts = new Map();
  let used = 0;
  for (let page = start; page < end; page++) {
    const kind = kinds[page];
    if (kind !== FREE) {
      used++;
      counts.set(kind, (counts.get(kind) ?? 0) + 1);
    }
  }
  let best = FREE;
  for (const [kind, num] of counts) if (best === FREE || num > counts.get(best)) best = kind;
  return [best, Math.ceil((4 * used) / (end - start))];
}

/** `colours`: of each kind. Returns how it was laid out, so that one can point at a cell. */
export function drawMap(canvas, kinds, colours) {
  const where = layOut(kinds.length, canvas.clientWidth);
  const { size, columns, rows, per } = where;
  const [context] = prepare(canvas, rows * size);
  const buckets = new Map(); // cells of one colour and strength, drawn together
  for (let cell = 0; cell * per < kinds.length; cell++) {
    const start = cell * per;
    const [kind, strength] = per === 1 ? [kinds[start], 4] : sum(kinds, start, Math.min(start + per, kinds.length));
    const name = kind * 8 + strength;
    if (!buckets.has(name)) buckets.set(name, []);
    buckets.get(name).push(cell);
  }
  const gap = size >= 6 ? 1.5 : size >= 4 ? 1 : 0.5;
  for (const [name, cells] of buckets) {
    const kind = name >> 3;
    const inset = kind === CACHED && size >= 8 ? size * 0.24 : 0;
    const side = size - gap - 2 * inset;
    context.fillStyle = colours[kind];
    context.globalAlpha = kind === FREE ? 1 : 0.25 + 0.75 * ((name & 7) / 4);
    for (const cell of cells) context.fillRect((cell % columns) * size + inset, Math.floor(cell / columns) * size + inset, side, side);
    if (kind === SHARED && size >= 8) {
      context.fillStyle = colours[FREE];
      for (const cell of cells) {
        const x = (cell % columns) * size + (size - gap) / 2;
        const y = Math.floor(cell / columns) * size + (size - gap) / 2;
        context.fillRect(x - size / 8, y - size / 8, size / 4, size / 4);
      }
    }
  }
  return where;
}

/** `rows`: tokens of each layer's experts. Strength is relative to the layer's busiest. */
export function drawExperts(canvas, rows) {
  const most = Math.max(...rows.map((row) => row.length), 1);
  const size = Math.min(Math.max(Math.floor(MAP_HEIGHT / rows.length), 3), 14);
  const [context, width] = prepare(canvas, rows.length * size);
  const side = Math.min(width / most, 3 * size);
  context.fillStyle = colour("decode");
  rows.forEach((row, y) => {
    const busiest = Math.max(...row, 1);
    row.forEach((tokens, x) => {
      context.globalAlpha = 0.06 + (0.94 * tokens) / busiest;
      context.fillRect(x * side, y * size, side - 1, size - 1);
    });
  });
}

const STEPS_HEIGHT = 164;
const STRIP = 24; // below the bars: how many took part
const BAR = 7;
const LEFT = 52; // for words
const TOP = 8;

/** A bar per step: its height is the step's time, its parts are prefill and decode tokens; below it, the number of requests. */
export function drawSteps(canvas, steps) {
  const [context, width] = prepare(canvas, STEPS_HEIGHT);
  const shown = steps.slice(-Math.floor((width - LEFT) / BAR));
  const longest = Math.max(...shown.map(({ duration }) => duration), 1e-4);
  const most = Math.max(...shown.map(({ numRequests }) => numRequests), 1);
  const ground = STEPS_HEIGHT - STRIP - 6;
  const height = ground - TOP;
  const shades = { prefill: colour("prefill"), decode: colour("decode"), requests: colour("between-steps") };
  context.font = "11px system-ui, sans-serif";
  context.strokeStyle = colour("line");
  context.fillStyle = colour("soft");
  for (const part of [1, 0.5, 0]) {
    const y = Math.round(ground - part * height) + 0.5;
    context.beginPath();
    context.moveTo(LEFT, y);
    context.lineTo(width, y);
    context.stroke();
    context.fillText(seconds(1000 * part * longest), 0, y + 4);
  }
  context.fillText(`${most} req`, 0, STEPS_HEIGHT - STRIP / 2 + 3);
  shown.forEach((step, i) => {
    const tall = Math.max((step.duration / longest) * height, 1);
    const share = step.numPrefill / Math.max(step.numPrefill + step.numDecode, 1);
    const x = width - (shown.length - i) * BAR;
    context.fillStyle = shades.decode;
    context.fillRect(x, ground - tall * (1 - share), BAR - 1.5, tall * (1 - share));
    context.fillStyle = shades.prefill;
    context.fillRect(x, ground - tall, BAR - 1.5, tall * share);
    const wide = (step.numRequests / most) * STRIP;
    context.fillStyle = shades.requests;
    context.fillRect(x, STEPS_HEIGHT - wide, BAR - 1.5, wide);
  });
}

export function drawLine(canvas, values) {
  const [context, width] = prepare(canvas, 34);
  const most = Math.max(...values, 1);
  const x = (i) => width - ((values.length - 1 - i) / 119) * width;
  context.beginPath();
  values.forEach((value, i) => context.lineTo(x(i), 32 - (value / most) * 28));
  context.strokeStyle = colour("tide");
  context.lineWidth = 1.6;
  context.stroke();
  context.lineTo(width, 34);
  context.lineTo(x(0), 34);
  context.globalAlpha = 0.14;
  context.fillStyle = colour("tide");
  context.fill();
}
