// Markdown as elements. The text is a model's, so it is not trusted: only elements made here, only links to the web, no pictures,
// and time linear in the length of the text.

import { copyText, h } from "./dom.js";

const MAX_DEPTH = 6;

/** Shows a text in a container. Blocks that have not changed since the last call are left alone, so a growing text is cheap and a
 * selection in it survives. */
export function show(container, text) {
  const blocks = parse(text, 0);
  blocks.forEach((block, i) => {
    const old = container.children[i];
    if (old && old.source === block.source) return;
    const made = block.make();
    made.source = block.source;
    if (old) old.replaceWith(made);
    else container.append(made);
  });
  while (container.children.length > blocks.length) container.lastChild.remove();
}

const FENCE = /^ {0,3}(```+|~~~+)[ \t]*([\w+#.-]{0,30})/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const ITEM = /^( {0,8})([-*+]|\d{1,9}[.)])[ \t]+(.*)$/;
const ROW = /^ {0,3}\|.*\|[ \t]*$/;
const DIVIDER = /^ {0,3}\|[ \t:|-]+\|[ \t]*$/;

/** A text as blocks, each with the lines it was made from. */
function parse(text, depth) {
  const lines = text.split("\n");
  const blocks = [];
  let i = 0;
  const take = (end, make) => {
    blocks.push({ source: lines.slice(i, end).join("\n"), make });
    i = end;
  };
  const whileTrue = (from, test) => {
    let end = from;
    while (end < lines.length && test(lines[end])) end++;
    return end;
  };
  while (i < lines.length) {
    const line = lines[i];
    let match;
    if (!line.trim()) {
      i++;
    } else if ((match = FENCE.exec(line))) {
      const [, fence, language] = match;
      const close = whileTrue(i + 1, (one) => !one.trimStart().startsWith(fence));
      const code = lines.slice(i + 1, close).join("\n");
      take(Math.min(close + 1, lines.length), () => codeBlock(code, language));
    } else if ((match = HEADING.exec(line))) {
      const [, marks, title] = match;
      take(i + 1, () => h(`h${Math.min(marks.length + 2, 6)}`, {}, ...inline(title.replace(/ #+ *$/, ""))));
    } else if (RULE.test(line)) {
      take(i + 1, () => h("hr"));
    } else if (line.startsWith(">") && depth < MAX_DEPTH) {
      const end = whileTrue(i, (one) => one.startsWith(">"));
      const inner = lines.slice(i, end).map((one) => one.replace(/^> ?/, "")).join("\n");
      take(end, () => h("blockquote", {}, ...nodes(inner, depth + 1)));
    } else if (ITEM.test(line) && depth < MAX_DEPTH) {
      const end = listEnd(lines, i);
      const part = lines.slice(i, end);
      take(end, () => list(part, depth));
    } else if (ROW.test(line) && DIVIDER.test(lines[i + 1] ?? "")) {
      const end = whileTrue(i, (one) => ROW.test(one));
      const part = lines.slice(i, end);
      take(end, () => table(part));
    } else {
      const end = whileTrue(i + 1, (one) => one.trim() && !startsBlock(one));
      const words = lines.slice(i, end).join("\n");
      take(end, () => h("p", {}, ...inline(words)));
    }
  }
  return blocks;
}

const startsBlock = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || line.startsWith(">") || ITEM.test(line);
const nodes = (text, depth) => parse(text, depth).map((block) => block.make());

/** A list goes on over indented lines, and over empty ones if it goes on after them. */
function listEnd(lines, start) {
  let end = start + 1;
  for (let i = end; i < lines.length; i++) {
    if (ITEM.test(lines[i]) || /^[ \t]+\S/.test(lines[i])) end = i + 1;
    else if (lines[i].trim()) break;
  }
  return end;
}

function list(lines, depth) {
  const [, base, marker] = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (match && match[1].length <= base.length + 1) items.push([match[3]]);
    else items.at(-1).push(line.slice(Math.min(base.length + marker.length + 1, line.length - line.trimStart().length)));
  }
  const made = items.map((item) => {
    const inner = nodes(item.join("\n"), depth + 1);
    const content = inner[0]?.tagName === "P" ? [...inner[0].childNodes, ...inner.slice(1)] : inner;
    return h("li", {}, ...content);
  });
  return /\d/.test(marker) ? h("ol", { start: parseInt(marker, 10) }, ...made) : h("ul", {}, ...made);
}

function table(lines) {
  const cells = (line) => line.trim().slice(1, -1).split("|").map((cell) => cell.trim());
  const row = (line, tag) => h("tr", {}, ...cells(line).map((cell) => h(tag, {}, ...inline(cell))));
  const [head, , ...body] = lines;
  const whole = h("table", {}, h("thead", {}, row(head, "th")), h("tbody", {}, ...body.map((line) => row(line, "td"))));
  return h("div", { class: "scroller" }, whole);
}

function codeBlock(code, language) {
  const copy = h("button", { type: "button", class: "quiet", onclick: () => copyText(code, copy) }, "Copy");
  const head = h("figcaption", {}, h("span", {}, language || "code"), copy);
  return h("figure", { class: "code" }, head, h("pre", { tabIndex: 0 }, h("code", {}, code)));
}

const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const SPECIAL = /[\\`*_~[!h\n]/g;

/** Inline elements. A mark whose other end was not found once is not searched for again, so that hostile text costs no more. */
function inline(text, depth = 0) {
  const made = [];
  const missing = new Set();
  let plain = "";
  let i = 0;
  const push = (node, end) => {
    if (plain) made.push(plain);
    plain = "";
    made.push(node);
    i = end;
  };
  const find = (what, from) => {
    if (missing.has(what)) return -1;
    const found = text.indexOf(what, from);
    if (found < 0) missing.add(what);
    return found;
  };
  while (i < text.length) {
    SPECIAL.lastIndex = i;
    const next = SPECIAL.exec(text)?.index ?? text.length;
    plain += text.slice(i, next);
    i = next;
    if (i === text.length) break;
    const char = text[i];
    const found = char === "\\" ? escaped(text, i) : char === "\n" ? lineEnd(plain, i) : special(text, i, char, find, depth);
    if (found) push(...found);
    else plain += text[i++];
  }
  if (plain) made.push(plain);
  return made;
}

const escaped = (text, i) => (/[!-/:-@[-`{-~]/.test(text[i + 1] ?? "") ? [text[i + 1], i + 2] : null);
const lineEnd = (before, i) => (before.endsWith("  ") ? [h("br"), i + 1] : null);

function special(text, i, char, find, depth) {
  if (char === "`") {
    const marks = /^`+/.exec(text.slice(i, i + 8))[0];
    const end = find(marks, i + marks.length);
    return end < 0 ? null : [h("code", {}, text.slice(i + marks.length, end)), end + marks.length];
  }
  if (char === "[" || (char === "!" && text[i + 1] === "[")) return link(text, char === "!" ? i + 1 : i);
  if (char === "h") {
    const match = /^https?:\/\/[^\s<>()"'`]{1,2000}/.exec(text.slice(i, i + 2010));
    const address = match && !/\w/.test(text[i - 1] ?? "") ? match[0].replace(/[.,;:!?*_]+$/, "") : "";
    return address ? [anchor(address, address), i + address.length] : null;
  }
  for (const [mark, tag] of depth < MAX_DEPTH ? MARKS : []) {
    if (!text.startsWith(mark, i)) continue;
    const start = i + mark.length;
    const inWord = mark[0] === "_" && /\w/.test(text[i - 1] ?? "");
    const end = inWord || /\s/.test(text[start] ?? " ") ? -1 : find(mark, start + 1);
    if (end > 0 && !/\s/.test(text[end - 1])) return [h(tag, {}, ...inline(text.slice(start, end), depth + 1)), end + mark.length];
  }
  return null;
}

function link(text, i) {
  const match = /^\[([^[\]\n]{0,500})\]\(([^()\s]{1,2000})[^()\n]{0,200}\)/.exec(text.slice(i, i + 2800));
  if (!match) return null;
  const [whole, words, address] = match;
  const isWeb = /^(https?:\/\/|mailto:)/i.test(address);
  return [isWeb ? anchor(address, words || address) : words, i + whole.length];
}

const anchor = (address, words) => h("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, words);
