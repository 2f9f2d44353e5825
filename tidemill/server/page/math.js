// TeX as MathML: the part of TeX that models write. A command that is not known is shown as it was written; a formula that is not
// well-formed is not shown as one.

const SPACE = "http://www.w3.org/1998/Math/MathML";
const MAX_LEN = 8_000;
const MAX_DEPTH = 24;

function m(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** "alphaα betaβ" as names and what they stand for. */
function table(text) {
  const made = Object.create(null);
  for (const pair of text.trim().split(/\s+/)) {
    const [, name, sign] = /^([A-Za-z]+)(.+)$/u.exec(pair);
    made[name] = sign;
  }
  return made;
}

const LETTERS = table(`
  alphaα betaβ gammaγ deltaδ epsilonϵ varepsilonε zetaζ etaη thetaθ varthetaϑ iotaι kappaκ lambdaλ muμ nuν xiξ omicronο piπ varpiϖ rhoρ
  varrhoϱ sigmaσ varsigmaς tauτ upsilonυ phiϕ varphiφ chiχ psiψ omegaω ellℓ hbarℏ imathı jmathȷ alephℵ bethℶ wp℘ infty∞ partial∂ nabla∇
  emptyset∅ varnothing∅ top⊤ bot⊥ Reℜ Imℑ angle∠ degree° checkmark✓ dagger† square□ blacksquare■ triangle△ diamond⋄`);
const CAPITALS = table("GammaΓ DeltaΔ ThetaΘ LambdaΛ XiΞ PiΠ SigmaΣ UpsilonΥ PhiΦ PsiΨ OmegaΩ");
const OPERATORS = table(`
  times× cdot⋅ pm± mp∓ div÷ ast∗ star⋆ circ∘ bullet∙ oplus⊕ ominus⊖ otimes⊗ odot⊙ wedge∧ vee∨ land∧ lor∨ neg¬ lnot¬ cap∩ cup∪ setminus∖ uplus⊎
  le≤ leq≤ leqslant⩽ ge≥ geq≥ geqslant⩾ ne≠ neq≠ approx≈ equiv≡ sim∼ simeq≃ cong≅ propto∝ ll≪ gg≫ prec≺ succ≻ preceq⪯ succeq⪰ doteq≐ asymp≍
  in∈ ni∋ notin∉ subset⊂ supset⊃ subseteq⊆ supseteq⊇ subsetneq⊊ forall∀ exists∃ nexists∄ mid∣ nmid∤ parallel∥ perp⊥ models⊨ vdash⊢ triangleq≜
  to→ gets← rightarrow→ leftarrow← leftrightarrow↔ Rightarrow⇒ Leftarrow⇐ Leftrightarrow⇔ implies⟹ impliedby⟸ iff⟺ mapsto↦ longrightarrow⟶
  longleftarrow⟵ Longrightarrow⟹ longmapsto⟼ hookrightarrow↪ uparrow↑ downarrow↓ rightharpoonup⇀ rightleftharpoons⇌ leadsto⇝ therefore∴ because∵
  ldots… dots… dotsc… cdots⋯ dotsb⋯ vdots⋮ ddots⋱ colon: prime′ lt< gt> coloneqq≔ vert| Vert‖ lvert| rvert| lVert‖ rVert‖ backslash\\
  langle⟨ rangle⟩ lfloor⌊ rfloor⌋ lceil⌈ rceil⌉ lbrace{ rbrace} lbrack[ rbrack]`);
const LARGE = table("sum∑ prod∏ coprod∐ bigcup⋃ bigcap⋂ bigoplus⨁ bigotimes⨂ bigvee⋁ bigwedge⋀");
const INTEGRALS = table("int∫ iint∬ iiint∭ oint∮");
const FUNCTIONS = new Set(
  "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp det dim ker hom deg arg gcd lcm Pr tr rank".split(" "),
);
const LIMITS = new Set("lim max min sup inf limsup liminf argmax argmin".split(" "));
const ACCENTS = table("hat^ widehat^ bar¯ overline¯ vec→ overrightarrow→ dot˙ ddot¨ tilde~ widetilde~ checkˇ breve˘ overbrace⏞");
const UNDER = table("underline_ underbrace⏟");
const SPACES = { ",": "0.17em", ":": "0.22em", ";": "0.28em", "!": "-0.17em", " ": "0.25em", quad: "1em", qquad: "2em", enspace: "0.5em", thinspace: "0.17em" };
const FONTS = { mathrm: "normal", mathbf: "bold", boldsymbol: "bold", bm: "bold", mathbb: "double", mathcal: "script", mathscr: "script", mathfrak: "fraktur", mathsf: "sans", mathtt: "mono", mathit: "italic", mathnormal: "italic", pmb: "bold" };
const TEXTS = new Set("text textrm textbf textit texttt textsf textnormal mbox hbox".split(" "));
const IGNORED = new Set("displaystyle textstyle scriptstyle limits nolimits nonumber notag hline hfill bigl bigr Bigl Bigr big Big bigg Bigg biggl biggr Biggl Biggr middle allowbreak".split(" "));
const FENCES = { pmatrix: "()", bmatrix: "[]", Bmatrix: "{}", vmatrix: "||", Vmatrix: "‖‖", cases: "{ ", rcases: " }" };
const ALIGNED = new Set("align align* aligned alignedat split eqnarray eqnarray* gather gather* gathered multline multline*".split(" "));
const GRIDS = new Set("matrix smallmatrix array".split(" "));
const SINGLE = new Set("equation equation* displaymath math".split(" "));

// Where an alphabet's A, a and 0 are in Unicode, and the letters that have a place of their own.
const ALPHABETS = {
  bold: [0x1d400, 0x1d41a, 0x1d7ce, {}],
  script: [0x1d49c, 0x1d4b6, 0, { B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ", e: "ℯ", g: "ℊ", o: "ℴ" }],
  fraktur: [0x1d504, 0x1d51e, 0, { C: "ℭ", H: "ℌ", I: "ℑ", R: "ℜ", Z: "ℨ" }],
  double: [0x1d538, 0x1d552, 0x1d7d8, { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" }],
  sans: [0x1d5a0, 0x1d5ba, 0x1d7e2, {}],
  mono: [0x1d670, 0x1d68a, 0x1d7f6, {}],
};

function inFont(char, font) {
  const alphabet = ALPHABETS[font];
  if (!alphabet) return char;
  const [capital, small, digit, own] = alphabet;
  if (own[char]) return own[char];
  const code = char.charCodeAt(0);
  if (char >= "A" && char <= "Z") return String.fromCodePoint(capital + code - 65);
  if (char >= "a" && char <= "z") return String.fromCodePoint(small + code - 97);
  return digit && char >= "0" && char <= "9" ? String.fromCodePoint(digit + code - 48) : char;
}

class Malformed extends Error {}

/** A formula as an element. Null: this is not one, or not one that can be shown. */
export function formula(source, isDisplay) {
  if (source.length > MAX_LEN || !source.trim()) return null;
  const isTall = source.includes("\\\\") && !source.includes("\\begin"); // several lines without an environment
  try {
    const row = new Parser(isTall ? `\\begin{aligned}${source}\\end{aligned}` : source).row([]);
    return m("math", { alttext: source.trim(), ...(isDisplay ? { display: "block" } : {}) }, row);
  } catch (error) {
    if (error instanceof Malformed) return null;
    throw error;
  }
}

const TOKEN = /\s*(?:(\\(?:[A-Za-z]+\*?|[^]))|(\d+(?:\.\d+)?)|(%[^\n]*)|([^\s]))/uy;

class Parser {
  constructor(source) {
    this.source = source;
    this.at = 0;
    this.depth = 0;
    this.font = "";
    this.advance();
  }

  advance() {
    TOKEN.lastIndex = this.start = this.at;
    const match = TOKEN.exec(this.source);
    if (match?.[3]) {
      this.at = TOKEN.lastIndex;
      this.advance(); // a comment
      return;
    }
    this.token = match ? (match[1] ?? match[2] ?? match[4]) : null;
    if (match?.[1]?.endsWith("*") && match[1].length > 2 && !/^\\operatorname/.test(match[1])) {
      this.token = match[1].slice(0, -1);
      this.at = TOKEN.lastIndex - 1;
    } else if (match) this.at = TOKEN.lastIndex;
  }

  next() {
    const { token } = this;
    this.advance();
    return token;
  }

  atEnd() {
    return this.token === null;
  }

  expect(token) {
    if (this.next() !== token) throw new Malformed();
  }

  /** Everything up to a token of `ends`, which is not taken. */
  row(ends) {
    if (++this.depth > MAX_DEPTH) throw new Malformed();
    const made = [];
    while (!this.atEnd() && !ends.includes(this.token)) {
      if (["}", "&", "\\\\", "\\right", "\\end"].includes(this.token)) throw new Malformed();
      const atom = this.scripted();
      if (atom) made.push(atom);
    }
    this.depth--;
    return made.length === 1 ? made[0] : m("mrow", {}, ...made);
  }

  group() {
    this.expect("{");
    const made = this.row(["}"]);
    this.expect("}");
    return made;
  }

  /** What a command applies to: a group, or the next thing alone. */
  argument() {
    if (this.token === "{") return this.group();
    if (++this.depth > MAX_DEPTH || this.atEnd() || this.token === "}") throw new Malformed();
    if (/^\d/.test(this.token)) {
      const [digit, rest] = [this.token[0], this.token.length - 1];
      this.at -= rest; // \frac12
      this.advance();
      this.depth--;
      return m("mn", {}, inFont(digit, this.font));
    }
    const made = this.atom() ?? m("mrow");
    this.depth--;
    return made;
  }

  scripted() {
    const isScript = () => this.token === "_" || this.token === "^" || this.token === "'";
    const base = isScript() ? m("mrow") : this.atom();
    if (!base) return null;
    while (this.token === "\\limits" || this.token === "\\nolimits") this.advance();
    let below = null;
    let above = null;
    while (isScript()) {
      const mark = this.next();
      if (mark === "'") above = m("mrow", {}, ...(above ? [above] : []), m("mo", {}, "′"));
      else if (mark === "_" && !below) below = this.argument();
      else if (mark === "^" && !above) above = this.argument();
      else if (mark === "^") above = m("mrow", {}, above, this.argument()); // f'^2
      else throw new Malformed();
    }
    if (!below && !above) return base;
    const [both, under, over] = base.isLimit ? ["munderover", "munder", "mover"] : ["msubsup", "msub", "msup"];
    if (below && above) return m(both, {}, base, below, above);
    return below ? m(under, {}, base, below) : m(over, {}, base, above);
  }

  atom() {
    const { token } = this;
    if (token === "{") return this.group();
    if (token.startsWith("\\") && token.length > 1) return this.command();
    this.advance();
    if (/^\d/.test(token)) return m("mn", {}, ...[...token].map((char) => inFont(char, this.font)));
    if (/^\p{L}$/u.test(token)) {
      const shown = inFont(token, this.font);
      return m("mi", this.font === "normal" || shown !== token ? { mathvariant: "normal" } : {}, shown);
    }
    if (token === "~") return m("mspace", { width: "0.25em" });
    if (token === "-") return m("mo", {}, "−");
    if (token === "*") return m("mo", {}, "∗");
    if (token === "|") return bar(token);
    const isBracket = "()[]/".includes(token);
    return m("mo", isBracket ? { stretchy: "false" } : {}, token);
  }

  command() {
    const name = this.token.slice(1);
    const raw = RAW[name] ?? (TEXTS.has(name) ? RAW.text : null);
    if (raw) return raw(this, name);
    this.advance();
    if (Object.hasOwn(COMMANDS, name)) return COMMANDS[name](this, name);
    if (LETTERS[name]) return m("mi", {}, LETTERS[name]);
    if (CAPITALS[name]) return m("mi", { mathvariant: "normal" }, CAPITALS[name]);
    if (OPERATORS[name]) return m("mo", "⟨⟩⌊⌋⌈⌉|‖{}[]".includes(OPERATORS[name]) ? { stretchy: "false" } : {}, OPERATORS[name]);
    if (LARGE[name]) return limit(m("mo", { movablelimits: "true", largeop: "true" }, LARGE[name]));
    if (INTEGRALS[name]) return m("mo", { largeop: "true" }, INTEGRALS[name]);
    if (FUNCTIONS.has(name)) return named(name);
    if (LIMITS.has(name)) return limit(m("mo", { movablelimits: "true", rspace: "0.17em" }, name.replace(/^(lim|arg)(?=.)/, "$1 ")));
    if (ACCENTS[name]) return this.accent("mover", ACCENTS[name], name);
    if (UNDER[name]) return this.accent("munder", UNDER[name], name);
    if (Object.hasOwn(FONTS, name)) return this.inFont(FONTS[name]);
    if (Object.hasOwn(SPACES, name)) return m("mspace", { width: SPACES[name] });
    if (IGNORED.has(name)) return null;
    if (name === "|") return bar("‖");
    if (/^[{}$%&#_]$/.test(name)) return m("mo", { stretchy: "false" }, name);
    return m("mtext", { class: "unknown" }, `\\${name}`);
  }

  accent(tag, sign, name) {
    const wide = /^(over|under|wide)/.test(name) ? "true" : "false";
    const made = m(tag, { [tag === "mover" ? "accent" : "accentunder"]: "true" }, this.argument(), m("mo", { stretchy: wide }, sign));
    return name.endsWith("brace") ? limit(made) : made;
  }

  inFont(font) {
    const before = this.font;
    this.font = font;
    const made = this.argument();
    this.font = before;
    return made;
  }

  /** The source of the group that begins behind the command that is the token: its spaces count. */
  rawGroup() {
    const open = /^\s*\{/.exec(this.source.slice(this.at, this.at + 20));
    if (!open) throw new Malformed();
    const start = this.at + open[0].length;
    let depth = 1;
    let end = start;
    for (; end < this.source.length && depth > 0; end++) {
      if (this.source[end] === "\\") end++;
      else if (this.source[end] === "{") depth++;
      else if (this.source[end] === "}") depth--;
    }
    if (depth > 0) throw new Malformed();
    this.at = end;
    this.advance();
    return this.source.slice(start, end - 1);
  }

  delimiter() {
    if (this.atEnd()) throw new Malformed();
    const token = this.next();
    if (token === ".") return "";
    if (token === "\\|") return "‖";
    if (token.startsWith("\\")) return OPERATORS[token.slice(1)] ?? token.slice(1);
    return token === "<" ? "⟨" : token === ">" ? "⟩" : token;
  }

  fenced() {
    const open = this.delimiter();
    const inner = this.row(["\\right"]);
    this.expect("\\right");
    return between(open, inner, this.delimiter());
  }

  environment(name) {
    if (SINGLE.has(name)) return this.ending(name, () => this.row(["\\end"]));
    const isKnown = GRIDS.has(name) || ALIGNED.has(name) || Object.hasOwn(FENCES, name);
    if (!isKnown) throw new Malformed();
    if (this.token === "[") while (!this.atEnd() && this.next() !== "]");
    if (name === "array" || name === "alignedat") this.group();
    const kind = ALIGNED.has(name) ? "aligned" : name.endsWith("cases") ? "cases" : "matrix";
    const grid = this.ending(name, () => this.rows(kind));
    const [open, close] = FENCES[name] ?? "  ";
    return between(open.trim(), grid, close.trim());
  }

  ending(name, make) {
    const made = make();
    if (this.token !== "\\end" || this.rawGroup().trim() !== name) throw new Malformed();
    return made;
  }

  rows(kind) {
    const rows = [];
    let cells = [];
    for (;;) {
      cells.push(m("mtd", {}, this.row(["&", "\\\\", "\\end"])));
      if (this.atEnd()) throw new Malformed();
      if (this.token === "&") {
        this.advance();
        continue;
      }
      rows.push(m("mtr", {}, ...cells));
      cells = [];
      if (this.token === "\\end") break;
      this.advance();
      if (this.token === "[" && /^\s*-?[\d.]+[a-z]{2}\]/.test(this.source.slice(this.at, this.at + 12))) while (this.next() !== "]");
      if (this.token === "\\end") break; // behind the last line break
    }
    return m("mtable", kind === "aligned" ? { class: kind, displaystyle: "true" } : { class: kind }, ...rows);
  }
}

function limit(element) {
  element.isLimit = true;
  return element;
}

const bar = (sign) => m("mo", { stretchy: "false", lspace: "0", rspace: "0" }, sign);
const named = (name) => m("mrow", {}, m("mi", { mathvariant: "normal" }, name), m("mspace", { width: "0.12em" }));

function between(open, inner, close) {
  const fence = (sign, form) => (sign ? [m("mo", { fence: "true", stretchy: "true", form }, sign)] : []);
  return m("mrow", {}, ...fence(open, "prefix"), inner, ...fence(close, "postfix"));
}

function root(parser) {
  if (parser.token !== "[") return m("msqrt", {}, parser.argument());
  parser.advance();
  const degree = parser.row(["]"]);
  parser.expect("]");
  return m("mroot", {}, parser.argument(), degree);
}

const fraction = (attributes) => (parser) => m("mfrac", attributes, parser.argument(), parser.argument());
const stacked = (tag) => (parser) => {
  const [mark, base] = [parser.argument(), parser.argument()];
  return m(tag, {}, base, mark);
};

const COMMANDS = {
  frac: fraction({}),
  dfrac: fraction({ displaystyle: "true" }),
  cfrac: fraction({ displaystyle: "true" }),
  tfrac: fraction({ displaystyle: "false" }),
  binom: (parser) => between("(", fraction({ linethickness: "0" })(parser), ")"),
  sqrt: root,
  left: (parser) => parser.fenced(),
  overset: stacked("mover"),
  stackrel: stacked("mover"),
  underset: stacked("munder"),
  boxed: (parser) => m("mrow", { class: "boxed" }, parser.argument()),
  phantom: (parser) => m("mphantom", {}, parser.argument()),
  bmod: () => m("mo", { lspace: "0.22em", rspace: "0.22em" }, "mod"),
  pmod: (parser) => m("mrow", {}, m("mspace", { width: "0.5em" }), m("mtext", {}, "(mod "), parser.argument(), m("mtext", {}, ")")),
  not: (parser) => m("mrow", { class: "not" }, parser.argument()),
};

const nameIn = (parser) => parser.rawGroup().replace(/\\[,;: ]/g, " ").replace(/[\\{}]/g, "");

/** Commands that read their argument as it was written. */
const RAW = Object.assign(Object.create(null), {
  text: (parser, name) => {
    const font = { textbf: "bold", texttt: "mono", textsf: "sans" }[name];
    const words = parser.rawGroup().replace(/\\([ {}$%&#_])/g, "$1").replace(/\$/g, "");
    return m("mtext", name === "textit" ? { class: "slanted" } : {}, [...words.replace(/ /g, "\u00a0")].map((char) => inFont(char, font)).join(""));
  },
  operatorname: (parser) => named(nameIn(parser)),
  "operatorname*": (parser) => limit(m("mo", { movablelimits: "true" }, nameIn(parser))),
  begin: (parser) => parser.environment(parser.rawGroup().trim()),
  tag: (parser) => m("mtext", {}, `\u2003(${parser.rawGroup()})`),
  label: (parser) => (parser.rawGroup(), null),
});
