// Code with its tokens coloured: a list of texts and spans. Every rule takes at least one character and never gives it back, so the
// time is linear in the length of the code.

import { h } from "./dom.js";

const MAX_LEN = 100_000;

const words = (text) => new Set(text.split(" "));
const NUMBER = /\b(?:0[xX][\da-fA-F_]+|0[bB][01_]+|0[oO][0-7_]+|\d[\d_]*(?:\.[\d_]+)?(?:[eE][+-]?\d+)?)\w*/;
const WORD = /[A-Za-z_$][\w$]*/;
const DOUBLE = /"(?:\\[^]|[^"\\\n])*"?/;
const SINGLE = /'(?:\\[^]|[^'\\\n])*'?/;
const SLASHES = /\/\/[^\n]*/;
const BLOCK = /\/\*[^]*?(?:\*\/|(?![^]))/; // `(?![^])`: the end of the code
const HASH = /#[^\n]*/;

const CONSTANTS = "true false null undefined None True False nil NULL nullptr NaN Infinity self this super iota";

/** Rules in order of precedence, as [class, pattern]. `word` is looked up in the language's sets. */
function language({ rules, keywords = "", types = "", constants = CONSTANTS, flags = "" }) {
  const source = rules.map(([, pattern]) => `(${pattern.source})`).join("|");
  const fold = flags.includes("i");
  const sets = [["keyword", words(keywords)], ["constant", words(constants)], ["type", words(types)]];
  return { kinds: rules.map(([kind]) => kind), pattern: new RegExp(source, `gm${flags}`), sets, fold };
}

const cLike = (keywords, types, ...first) =>
  language({
    rules: [["comment", SLASHES], ["comment", BLOCK], ...first, ["string", DOUBLE], ["string", SINGLE], ["number", NUMBER], ["word", WORD]],
    keywords,
    types,
  });

const C_WORDS =
  "auto break case const continue default do else enum extern for goto if inline register restrict return sizeof static struct switch " +
  "typedef union volatile while";
const CPP_WORDS =
  " catch class concept consteval constexpr co_await co_return co_yield decltype delete explicit export final friend mutable namespace new " +
  "noexcept operator override private protected public requires static_assert template throw try typename using virtual";
const C_TYPES = "bool char double float int long short signed unsigned void size_t int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t";
const JS_WORDS =
  "async await break case catch class const continue debugger default delete do else export extends finally for from function get if import " +
  "in instanceof let new of return set static switch throw try typeof var void while with yield abstract as declare enum implements " +
  "interface keyof namespace private protected public readonly satisfies type";
const JS_TYPES = "any boolean never number object string symbol unknown Array Date Error Map Math Object Promise Set String JSON console";
const JAVA_WORDS =
  "abstract assert break case catch class continue default do else enum extends final finally for if implements import instanceof interface " +
  "native new package private protected public record return sealed static switch synchronized throw throws transient try var volatile while yield";

const LANGUAGES = {
  python: language({
    rules: [
      ["comment", HASH],
      ["string", /\b[rRbBfFuU]{0,2}(?:"""[^]*?(?:"""|(?![^]))|'''[^]*?(?:'''|(?![^])))/],
      ["string", /"""[^]*?(?:"""|(?![^]))|'''[^]*?(?:'''|(?![^]))/],
      ["string", /\b[rRbBfFuU]{1,2}(?:"(?:\\[^]|[^"\\\n])*"?|'(?:\\[^]|[^'\\\n])*'?)/],
      ["string", DOUBLE],
      ["string", SINGLE],
      ["meta", /@[\w.]+/],
      ["number", NUMBER],
      ["word", WORD],
    ],
    keywords:
      "and as assert async await break case class continue def del elif else except finally for from global if import in is lambda match " +
      "nonlocal not or pass raise return try while with yield",
    types: "bool bytes dict float frozenset int list object set str tuple type Exception ValueError TypeError KeyError",
  }),
  javascript: cLike(JS_WORDS, JS_TYPES, ["string", /`(?:\\[^]|[^`\\])*`?/], ["meta", /@\w+/]),
  json: language({
    rules: [["property", /"(?:\\.|[^"\\\n])*"(?=[ \t]*:)/], ["comment", SLASHES], ["string", DOUBLE], ["number", /-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?/], ["word", WORD]],
  }),
  bash: language({
    rules: [
      ["comment", /(?<![^\s;])#[^\n]*/],
      ["string", /"(?:\\[^]|[^"\\])*"?/],
      ["string", /'[^']*'?/],
      ["variable", /\$(?:\{[^}\n]*\}?|\w+|[?@#*!$-])/],
      ["meta", /(?<=\s)--?[A-Za-z][\w-]*/],
      ["number", /\b\d+\b/],
      ["word", /[A-Za-z_][\w-]*/],
    ],
    keywords: "if then else elif fi for while until do done case esac in function select time return break continue local export readonly declare unset set shift trap source",
    types: "alias cat cd chmod cp curl docker echo eval exec exit find git grep kill ls make mkdir mv npm pip printf ps pwd python read rm sed sudo tar test touch wget xargs",
    constants: "true false",
  }),
  c: cLike(C_WORDS, C_TYPES, ["meta", /^[ \t]*#[ \t]*\w+/]),
  cpp: cLike(C_WORDS + CPP_WORDS, `${C_TYPES} string vector map set pair optional`, ["meta", /^[ \t]*#[ \t]*\w+/], ["string", /R"\([^]*?(?:\)"|(?![^]))/]),
  java: cLike(JAVA_WORDS, "boolean byte char double float int long short void Integer List Map Object String", ["meta", /@\w+/]),
  rust: language({
    rules: [
      ["comment", SLASHES],
      ["comment", BLOCK],
      ["meta", /#!?\[[^\]\n]*\]?/],
      ["string", /b?"(?:\\[^]|[^"\\])*"?/],
      ["string", /b?'(?:\\[^'\n]{1,10}|[^'\\\n])'/],
      ["variable", /'[a-z_]\w*/],
      ["number", NUMBER],
      ["function", /\b[a-z_]\w*!(?=[ \t]*[([{])/],
      ["word", WORD],
    ],
    keywords:
      "as async await break const continue crate dyn else enum extern fn for if impl in let loop match mod move mut pub ref return static " +
      "struct trait type unsafe use where while",
    types: "bool char f32 f64 i8 i16 i32 i64 i128 isize str u8 u16 u32 u64 u128 usize Box Option Result Self Some String Vec Ok Err HashMap",
  }),
  go: cLike(
    "break case chan const continue default defer else fallthrough for func go goto if import interface map package range return select struct switch type var",
    "any bool byte complex64 complex128 error float32 float64 int int8 int16 int32 int64 rune string uint uint8 uint16 uint32 uint64 uintptr append cap close copy delete len make new panic recover",
    ["string", /`[^`]*`?/],
  ),
  css: language({
    rules: [
      ["comment", BLOCK],
      ["string", DOUBLE],
      ["string", SINGLE],
      ["keyword", /@[\w-]+/],
      ["property", /(?<![\w-])-{0,2}[A-Za-z][\w-]*(?=[ \t]*:[ \t])/],
      ["variable", /--[\w-]+/],
      ["number", /#[\da-fA-F]{3,8}\b|(?<![\w-])-?(?:\d+\.?\d*|\.\d+)(?:%|[a-z]{1,5})?/],
      ["type", /[.#][A-Za-z_][\w-]*/],
      ["plain", /[A-Za-z_][\w-]*/],
    ],
  }),
  sql: language({
    rules: [["comment", /--[^\n]*/], ["comment", BLOCK], ["string", /'(?:''|[^'])*'?/], ["property", /"[^"\n]*"?|`[^`\n]*`?/], ["number", NUMBER], ["word", WORD]],
    keywords:
      "add all alter and any as asc begin between by cascade case check column commit constraint create cross database default delete desc " +
      "distinct drop else end except exists explain foreign from full group having if in index inner insert intersect into is join key left " +
      "like limit not offset on or order outer over partition primary references returning right rollback select set table then transaction " +
      "trigger union unique update using values view when where with",
    types: "bigint blob boolean char date decimal double float int integer json numeric real serial smallint text time timestamp uuid varchar",
    constants: "true false null",
    flags: "i",
  }),
  yaml: language({
    rules: [
      ["comment", /(?<![^\s])#[^\n]*/],
      ["property", /^[ \t]*(?:-[ \t]+)*[\w./-]+(?=[ \t]*:(?:\s|$))/],
      ["string", DOUBLE],
      ["string", /'(?:''|[^'\n])*'?/],
      ["meta", /^---$|[&*][A-Za-z]\w*|!!?\w+/],
      ["number", /(?<![\w.-])-?\d+(?:\.\d+)?(?![\w.-])/],
      ["word", /[A-Za-z_][\w-]*/],
    ],
    constants: "true false null yes no on off True False",
  }),
  toml: language({
    rules: [
      ["comment", HASH],
      ["type", /^[ \t]*\[[^\]\n]*\]*/],
      ["property", /^[ \t]*[\w."-]+(?=[ \t]*=)/],
      ["string", /"""[^]*?(?:"""|(?![^]))/],
      ["string", DOUBLE],
      ["string", SINGLE],
      ["number", NUMBER],
      ["word", WORD],
    ],
  }),
  diff: language({
    rules: [["meta", /^(?:@@|diff |index |--- |\+\+\+ )[^\n]*/], ["added", /^\+[^\n]*/], ["removed", /^-[^\n]*/], ["plain", /^[^\n]+/]],
  }),
};

const ALIASES = {
  py: "python", python3: "python", pycon: "python", js: "javascript", jsx: "javascript", mjs: "javascript", ts: "javascript", tsx: "javascript",
  typescript: "javascript", node: "javascript", jsonc: "json", json5: "json", jsonl: "json", sh: "bash", shell: "bash", zsh: "bash", console: "bash",
  dockerfile: "bash", h: "c", "c++": "cpp", cc: "cpp", cxx: "cpp", hpp: "cpp", cuda: "cpp", cu: "cpp", rs: "rust", golang: "go", scss: "css", less: "css",
  postgresql: "sql", postgres: "sql", mysql: "sql", sqlite: "sql", yml: "yaml", ini: "toml", patch: "diff", xml: "html", svg: "html", vue: "html",
}; // prettier-ignore

/** Texts and spans that together are exactly `code`. */
export function highlight(code, name) {
  const asked = name.toLowerCase();
  const known = Object.hasOwn(ALIASES, asked) ? ALIASES[asked] : asked;
  if (code.length > MAX_LEN) return [code];
  if (known === "html") return markup(code);
  return Object.hasOwn(LANGUAGES, known) ? tokens(code, LANGUAGES[known]) : [code];
}

const span = (kind, text) => h("span", { class: `tok-${kind}` }, text);

function tokens(code, { kinds, pattern, sets, fold }) {
  const made = [];
  let end = 0;
  for (const match of code.matchAll(pattern)) {
    const [text] = match;
    const kind = kinds[match.findIndex((group, i) => i > 0 && group !== undefined) - 1];
    const shown = kind === "word" ? kindOfWord(text, code, match.index, sets, fold) : kind;
    if (!shown || shown === "plain" || !text) continue;
    if (match.index > end) made.push(code.slice(end, match.index));
    made.push(span(shown, text));
    end = match.index + text.length;
  }
  if (end < code.length) made.push(code.slice(end));
  return made;
}

function kindOfWord(text, code, start, sets, fold) {
  const isMember = code[start - 1] === ".";
  const word = fold ? text.toLowerCase() : text;
  const found = !isMember && sets.find(([, set]) => set.has(word));
  if (found) return found[0];
  return code[start + text.length] === "(" ? "function" : null;
}

const TEXT = /<!--[^]*?(?:-->|$)|<![^>]*>?|<\/?[A-Za-z][\w:-]*|&#?\w{1,10};/g;
const TAG = /"[^"]*"?|'[^']*'?|\/?>|[^\s"'>/=]+/g;
const EMBEDDED = { "<script": ["</script", "javascript"], "<style": ["</style", "css"] };

/** HTML and XML: text outside of tags, names and strings inside of them, scripts and style sheets in their own colours. */
function markup(code) {
  const made = [];
  const lower = code.toLowerCase();
  let i = 0;
  const skipTo = (end) => {
    if (end > i) made.push(code.slice(i, end));
    i = end;
  };
  while (i < code.length) {
    TEXT.lastIndex = i;
    const match = TEXT.exec(code);
    if (!match) break;
    const [text] = match;
    skipTo(match.index);
    i += text.length;
    if (!/^<\/?[A-Za-z]/.test(text)) {
      made.push(span(text.startsWith("<!--") ? "comment" : "meta", text));
      continue;
    }
    made.push(span("keyword", text));
    i = attributes(code, i, made);
    const inner = Object.hasOwn(EMBEDDED, text.toLowerCase()) && EMBEDDED[text.toLowerCase()];
    if (inner && code[i - 1] === ">") {
      const found = lower.indexOf(inner[0], i);
      const end = found < 0 ? code.length : found;
      made.push(...tokens(code.slice(i, end), LANGUAGES[inner[1]]));
      i = end;
    }
  }
  skipTo(code.length);
  return made;
}

/** From behind a tag's name to behind its `>`. Returns where that is. */
function attributes(code, start, made) {
  let i = start;
  while (i < code.length) {
    TAG.lastIndex = i;
    const match = TAG.exec(code);
    if (!match) break;
    const [text] = match;
    if (match.index > i) made.push(code.slice(i, match.index));
    i = match.index + text.length;
    const isEnd = text.endsWith(">") && text.length <= 2;
    made.push(span(isEnd ? "keyword" : /^["']/.test(text) ? "string" : "property", text));
    if (isEnd) return i;
  }
  if (i < code.length) made.push(code.slice(i));
  return code.length;
}
