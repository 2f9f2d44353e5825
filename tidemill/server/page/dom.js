// Building the page: elements from names and texts. Nothing here, or anywhere, turns text into markup.

export const $ = (id) => document.getElementById(id);

/** An element. `on…` are listeners, `class` and `aria-…` are attributes, everything else is a property. Children may come
 * in lists. Texts stay texts. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class" || name === "role" || name.includes("-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  for (const child of children.flat()) if (child !== null && child !== undefined && child !== false && child !== "") element.append(child);
  return element;
}

const ICONS = {
  rename: "M4 16l1-4 8.5-8.5 3 3L8 15l-4 1zM12 5l3 3",
  close: "M5 5l10 10M15 5L5 15",
  remove: "M4 6h12M8 6V4h4v2M6 6l.7 10h6.6L14 6",
};

export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", "0 0 20 20");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(space, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** Where a page is not served from this machine or by TLS, browsers have no clipboard for it; the old way still works. */
export async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = h("textarea", { value: text, class: "hidden" });
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    button.focus();
  }
  const label = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = label), 1200);
}

let toastTimer;

/** A word at the foot of the page that goes by itself, perhaps with something to do about it. */
export function toast(words, action, act) {
  const hide = () => ($("toast").hidden = true);
  const button = action && h("button", { class: "quiet", onclick: () => (hide(), act()) }, action);
  $("toast").replaceChildren(...[words, button].filter(Boolean));
  $("toast").hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(hide, 7000);
}

/** For those who listen to the page. */
export function announce(words) {
  $("status").textContent = words;
}

/** A time, with as many digits as are worth reading. */
export function seconds(ms) {
  if (ms < 1000) return `${ms > 0 && ms < 20 ? ms.toFixed(1) : Math.round(ms)} ms`;
  return `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
}

export const count = (number, one, many = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
