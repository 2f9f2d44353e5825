// Markdown as elements. The text is a model's, so it is not trusted: only elements made here, only links to the web, no pictures,
// and time linear in the length of the text.

import { copyText, h } from "./dom.js";
import { highlight } from "./code.js";
import { formula } from "./math.js";

const MAX_DEPTH = 8;

/** Shows a text in a container. Blocks that have not changed since the last call are left alone, so a growing text is cheap and a
 * selection in it survives. */
export function show(container, text) {
  const blocks = parse(text.split("\n"), 0);
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

// ---- blocks

// None of these takes more than linear time, whatever the line.
const FENCE = /^( {0,3})(```+|~~~+)(.*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}>/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +(?=\S)|[ \t]*$|\t)/;
const DIVIDER = /^\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?$/; // of a line without spaces at its ends
const MATH = /^ {0,3}(\$\$|\\\[)/;
const MATH_ENDS = { $$: "$$", "\\[": "\\]" };

/** Lines as blocks, each with the text it was made from. */
function parse(lines, depth) {
  const blocks = [];
  const futile = {}; // up to which line the search for a formula's end has failed
  let i = 0;
  const take = (end, make) => {
    blocks.push({ source: lines.slice(i, end).join("\n"), make });
    i = end;
  };
  while (i < lines.length) {
    const line = lines[i];
    let match;
    let end;
    if (!line.trim()) {
      i++;
    } else if ((match = fenceOf(line))) {
      const { indent, fence, language } = match;
      const close = fenceEnd(lines, i + 1, fence);
      const code = lines.slice(i + 1, close).map((one) => withoutIndent(one, indent)).join("\n");
      take(Math.min(close + 1, lines.length), () => codeBlock(code, language));
    } else if ((match = HEADING.exec(line))) {
      const [, marks, title] = match;
      take(i + 1, () => h(`h${Math.min(marks.length + 2, 6)}`, {}, inline(withoutMarks(title))));
    } else if (RULE.test(line)) {
      take(i + 1, () => h("hr"));
    } else if (QUOTE.test(line) && depth < MAX_DEPTH) {
      end = quoteEnd(lines, i);
      const inner = lines.slice(i, end).map((one) => one.replace(/^ {0,3}> ?/, ""));
      take(end, () => h("blockquote", {}, nodes(inner, depth + 1)));
    } else if ((match = ITEM.exec(line)) && depth < MAX_DEPTH) {
      const [items, stop] = listItems(lines, i, match);
      const marker = match[2];
      take(stop, () => list(items, marker, depth));
    } else if (isTable(lines, i)) {
      end = i + 2;
      while (end < lines.length && lines[end].includes("|") && !startsBlock(lines[end])) end++;
      const part = lines.slice(i, end);
      take(end, () => table(part));
    } else if ((match = MATH.exec(line)) && (end = formulaEnd(lines, i, match[1], futile))) {
      const source = lines.slice(i, end).join("\n").trim();
      take(end, () => displayed(source));
    } else {
      end = i + 1;
      while (end < lines.length && lines[end].trim() && !startsBlock(lines[end]) && !isTable(lines, end)) end++;
      const words = lines.slice(i, end).map((one) => one.trimStart()).join("\n");
      take(end, () => h("p", {}, inline(words)));
    }
  }
  return blocks;
}

const nodes = (lines, depth) => parse(lines, depth).map((block) => block.make());
const indentOf = (line) => line.length - line.trimStart().length;
const withoutIndent = (line, most) => line.slice(Math.min(indentOf(line), most));

/** A heading may end with marks, too. */
function withoutMarks(title) {
  const text = title.trimEnd();
  let end = text.length;
  while (text[end - 1] === "#") end--;
  return end === 0 || text[end - 1] === " " ? text.slice(0, end).trimEnd() : text;
}

function fenceOf(line) {
  const [, indent, fence, rest] = FENCE.exec(line) ?? [];
  if (!fence || (fence[0] === "`" && rest.includes("`"))) return null;
  return { indent: indent.length, fence, language: /^[\w+#.-]{0,30}/.exec(rest.trim())[0] };
}

const startsBlock = (line) =>
  fenceOf(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || /^ *([-*+]|1[.)]) +\S/.test(line) || MATH.test(line);

const closes = (line, fence) => line.startsWith(fence) && !line.replaceAll(fence[0], "");

function fenceEnd(lines, start, fence) {
  let end = start;
  while (end < lines.length && !closes(lines[end].trim(), fence)) end++;
  return end;
}

/** A quote goes on over lines that continue its last paragraph. */
function quoteEnd(lines, start) {
  let end = start + 1;
  let isText = true;
  for (; end < lines.length && lines[end].trim(); end++) {
    if (QUOTE.test(lines[end])) isText = !startsBlock(lines[end].replace(/^ {0,3}> ?/, "")) && lines[end].trim() !== ">";
    else if (!isText || startsBlock(lines[end])) break;
  }
  return end;
}

/** Behind a formula that begins a line and ends one. 0: it does neither, or not yet. */
function formulaEnd(lines, start, mark, futile) {
  if (start < (futile[mark] ?? 0)) return 0;
  for (let i = start; i < lines.length; i++) {
    const line = i === start ? lines[i].slice(lines[i].indexOf(mark) + 2) : lines[i];
    const found = line.indexOf(MATH_ENDS[mark]);
    if (found >= 0 && !line.slice(found + 2).trim()) return i + 1;
    futile[mark] = i;
    if (found >= 0 || !lines[i].trim()) return 0;
  }
  futile[mark] = Infinity;
  return 0;
}

/** The lines of each item of the list that begins here, without their indent, and where the list ends. An item goes on over lines
 * that are indented as far as its text, and over those that continue its paragraph. A list that is nested by two spaces is nested,
 * even under a marker that is wider. */
function listItems(lines, start, first) {
  const base = first[1].length;
  const isOrdered = /\d/.test(first[2]);
  const items = [];
  let content = 0;
  let end = start;
  let isAfterEmpty = false;
  let fence = null; // of code that is open within the item
  for (let i = start; i < lines.length; i++) {
    const line = lines[i];
    if (!line.trim()) {
      items.at(-1).push("");
      isAfterEmpty = true;
      continue;
    }
    const indent = indentOf(line);
    const match = fence || indent >= Math.max(content, base + 2) ? null : ITEM.exec(line);
    if (match && indent < base + 2) {
      if (items.length && RULE.test(line)) break;
      if (/\d/.test(match[2]) !== isOrdered || (!isOrdered && match[2] !== first[2])) break;
      content = indent + match[2].length + (match[3].length <= 4 && match[3].trim() === "" ? Math.max(match[3].length, 1) : 1);
      items.push([line.slice(content)]);
    } else if (match || indent >= content || (fence && indent >= 2)) {
      items.at(-1).push(withoutIndent(line, content));
    } else if (!isAfterEmpty && !fence && !startsBlock(line)) {
      items.at(-1).push(line.trimStart());
    } else {
      break;
    }
    fence = fenceAfter(items.at(-1).at(-1), fence);
    isAfterEmpty = false;
    end = i + 1;
  }
  return [items, end];
}

const fenceAfter = (line, fence) => (fence ? (closes(line.trim(), fence) ? null : fence) : (fenceOf(line)?.fence ?? null));

const TASK = /^\[([ xX])\][ \t]+/;

function list(items, marker, depth) {
  const made = items.map((lines) => {
    const task = TASK.exec(lines[0]);
    if (task) lines = [lines[0].slice(task[0].length), ...lines.slice(1)];
    const inner = nodes(lines, depth + 1);
    const isTight = inner.filter((one) => one.tagName === "P").length === 1 && inner[0].tagName === "P";
    const content = isTight ? [...inner[0].childNodes, ...inner.slice(1)] : inner;
    if (!task) return h("li", {}, content);
    const isDone = task[1] !== " ";
    const box = h("input", { type: "checkbox", checked: isDone, disabled: true, "aria-label": isDone ? "done" : "to do" });
    return h("li", { class: "task" }, box, h("div", {}, content));
  });
  return /\d/.test(marker) ? h("ol", { start: parseInt(marker, 10) }, made) : h("ul", {}, made);
}

const isTable = (lines, i) =>
  lines[i].includes("|") &&
  i + 1 < lines.length &&
  lines[i + 1].includes("-") &&
  DIVIDER.test(lines[i + 1].trim()) &&
  cellsOf(lines[i]).length === cellsOf(lines[i + 1]).length;

/** The texts of a row. A bar behind a backslash or in code is no border. */
function cellsOf(line) {
  const cells = [""];
  const text = line.trim().replace(/^\|/, "");
  let isCode = false;
  for (let i = 0; i < text.length; i++) {
    if (text[i] === "\\" && text[i + 1] === "|") cells[cells.length - 1] += text[++i];
    else if (text[i] === "|" && !isCode) cells.push("");
    else cells[cells.length - 1] += text[i];
    if (text[i] === "`") isCode = !isCode && text.indexOf("`", i + 1) > 0;
  }
  if (cells.length > 1 && !cells.at(-1).trim()) cells.pop();
  return cells.map((cell) => cell.trim());
}

function table([head, divider, ...body]) {
  const sides = cellsOf(divider).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "middle" : "right") : null));
  const row = (line, tag) => {
    const cells = cellsOf(line);
    return h("tr", {}, sides.map((side, i) => h(tag, { class: side }, inline(cells[i] ?? ""))));
  };
  const whole = h("table", {}, h("thead", {}, row(head, "th")), h("tbody", {}, body.map((line) => row(line, "td"))));
  return h("div", { class: "scroller" }, whole);
}

function codeBlock(code, language) {
  if (language === "math") return displayed(`$$${code}$$`);
  const copy = h("button", { type: "button", class: "quiet", onclick: () => copyText(code, copy) }, "Copy");
  const head = h("figcaption", {}, h("span", {}, language || "code"), copy);
  return h("figure", { class: "code" }, head, h("pre", { tabIndex: 0 }, h("code", {}, highlight(code, language))));
}

/** A formula on lines of its own, or its source if it cannot be shown. */
function displayed(source) {
  const made = formula(source.slice(2, -2), true);
  return made ? h("div", { class: "formula" }, made) : h("p", {}, h("code", { class: "source" }, source));
}

// ---- inline

const SPECIAL = /[\\`*_~[!<$h\n]/g;

/** Inline elements: first what stands for itself (code, formulas, links, line ends), then emphasis around it. */
function inline(text, depth = 0) {
  const parts = [];
  const missing = new Set(); // ends that were not found once are not searched for again, so that hostile text costs no more
  let plain = "";
  let i = 0;
  const push = (part) => {
    if (plain) parts.push(plain);
    plain = "";
    parts.push(part);
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
    if (char === "\n") plain = plain.trimEnd();
    const found = "*_~".includes(char) ? delimiter(text, i) : special(text, i, find, depth);
    if (found) {
      push(found[0]);
      i = found[1];
    } else {
      plain += text[i++];
    }
  }
  if (plain) parts.push(plain);
  return emphasized(parts);
}

/** What begins at a special character and where it ends, or null. */
function special(text, i, find, depth) {
  switch (text[i]) {
    case "\n":
      return [h("br"), i + 1];
    case "\\":
      return math(text, i, find) ?? (/[!-/:-@[-`{-~]/.test(text[i + 1] ?? "") ? [text[i + 1], i + 2] : text[i + 1] === "\n" ? ["", i + 1] : null);
    case "`":
      return codeSpan(text, i, find);
    case "$":
      return math(text, i, find) ?? (text[i + 1] === "$" ? ["$$", i + 2] : null);
    case "<":
      return angled(text, i);
    case "h":
      return address(text, i);
    case "!":
      return text[i + 1] === "[" ? link(text, i + 1, depth) : null;
    default:
      return link(text, i, depth);
  }
}

function codeSpan(text, i, find) {
  let start = i;
  while (text[start] === "`") start++;
  const marks = text.slice(i, start);
  let end = marks.length > 16 ? -1 : find(marks, start);
  while (end >= 0 && text[end + marks.length] === "`") {
    while (text[end] === "`") end++; // a longer run is not the end
    end = find(marks, end);
  }
  if (end < 0) return [marks, start];
  const code = text.slice(start, end).replaceAll("\n", " ");
  return [h("code", {}, code.startsWith(" ") && code.endsWith(" ") && code.trim() ? code.slice(1, -1) : code), end + marks.length];
}

/** A formula within a text. `$` is money more often than not, so it has to look like a formula: no space inside of the marks, no
 * letter or digit outside of them, and no amount followed by a word. */
function math(text, i, find) {
  const double = text.startsWith("$$", i);
  const open = double ? "$$" : text[i] === "$" ? "$" : text.slice(i, i + 2);
  const close = { $: "$", $$: "$$", "\\(": "\\)", "\\[": "\\]" }[open];
  if (!close) return null;
  const start = i + open.length;
  const end = find(close, start);
  if (end <= start) return null;
  const source = text.slice(start, end);
  const after = end + close.length;
  if (open === "$" && (/[\w$\\]/.test(text[i - 1] ?? "") || /^\s|\s$|\\$|^\d[\d.,]*\s+[A-Za-z]{2,}/.test(source) || /\w/.test(text[after] ?? ""))) return null;
  const isDisplay = open === "$$" || open === "\\[";
  const made = formula(source, isDisplay);
  return made ? [made, after] : [h("code", { class: "source" }, text.slice(i, after)), after];
}

function angled(text, i) {
  const part = text.slice(i, i + 2010);
  const line = /^<br[ \t]*\/?>/i.exec(part);
  if (line) return [h("br"), i + line[0].length];
  const match = /^<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/i.exec(part);
  return match ? [anchor(match[1], match[1]), i + match[0].length] : null;
}

function address(text, i) {
  if (!text.startsWith("http", i) || /\w/.test(text[i - 1] ?? "")) return null;
  let found = /^https?:\/\/[^\s<>"'`\]]{1,2000}/.exec(text.slice(i, i + 2010))?.[0].replace(/[.,;:!?*_]+$/, "");
  while (found?.endsWith(")") && found.split(")").length > found.split("(").length) found = found.slice(0, -1);
  return found && found.length > 8 ? [anchor(found, found), i + found.length] : null;
}

const LINK = /^\[([^[\]\n]{0,500})\]\(<?((?:[^()\s<>]|\([^()\s<>]{0,200}\)){1,2000})>?(?:[ \t]+"[^"\n]{0,200}")?\)/;

function link(text, i, depth) {
  const match = depth === 0 && LINK.exec(text.slice(i, i + 2800));
  if (!match) return null;
  const [whole, words, target] = match;
  const isWeb = /^(https?:\/\/|mailto:)/i.test(target);
  return [isWeb ? anchor(target, inline(words || target, 1)) : words, i + whole.length];
}

const anchor = (target, words) => h("a", { href: target, target: "_blank", rel: "noopener noreferrer" }, words);

// ---- emphasis

/** A run of marks. It opens before a word and closes behind one; `_` does neither inside of one. */
function delimiter(text, i) {
  const char = text[i];
  let end = i;
  while (text[end] === char) end++;
  const before = text[i - 1] ?? " ";
  const after = text[end] ?? " ";
  const isSign = (one) => /[\p{P}\p{S}]/u.test(one);
  const opens = !/\s/.test(after) && (!isSign(after) || /\s/.test(before) || isSign(before));
  const closes = !/\s/.test(before) && (!isSign(before) || /\s/.test(after) || isSign(after));
  const isWord = char === "_";
  const canOpen = opens && (!isWord || !closes || isSign(before));
  const canClose = closes && (!isWord || !opens || isSign(after));
  const num = end - i;
  return [num > 3 || (char === "~" && num !== 2) ? text.slice(i, end) : { char, num, canOpen, canClose }, end];
}

/** Parts with runs of marks as elements. Open runs are on a stack; a run that closes one takes what is above it, so every part is
 * moved once. */
function emphasized(parts) {
  const stack = [{ char: "", num: 0, inner: [] }];
  const flat = (from) => stack.slice(from).flatMap(({ char, num, inner }) => [char.repeat(num), ...inner]);
  for (const part of parts) {
    if (typeof part === "string" || part instanceof Node) {
      stack.at(-1).inner.push(part);
      continue;
    }
    const { char, canOpen, canClose } = part;
    let { num } = part;
    while (canClose && num > 0) {
      const at = stack.findLastIndex((one) => one.char === char);
      if (at < 0) break;
      const opened = stack[at];
      const used = Math.min(opened.num, num, 2);
      const made = h(char === "~" ? "del" : used === 2 ? "strong" : "em", {}, opened.inner, flat(at + 1));
      stack.length = at + 1;
      opened.num -= used;
      num -= used;
      if (opened.num > 0) opened.inner = [made];
      else {
        stack.pop();
        stack.at(-1).inner.push(made);
      }
    }
    if (num > 0 && canOpen && stack.length <= MAX_DEPTH) stack.push({ char, num, inner: [] });
    else if (num > 0) stack.at(-1).inner.push(char.repeat(num));
  }
  return flat(0);
}
