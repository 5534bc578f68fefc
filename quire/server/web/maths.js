// Maths as a model writes it (the common part of TeX's notation), shown as MathML that is built node by node. What is not
// known stays readable: the name of the command.

const NAMESPACE = "http://www.w3.org/1998/Math/MathML";
const DEEPEST = 24;
const MOST_TOKENS = 1500;

const SYMBOLS = {
  alpha: "α", beta: "β", gamma: "γ", delta: "δ", epsilon: "ϵ", varepsilon: "ε", zeta: "ζ", eta: "η", theta: "θ", iota: "ι", kappa: "κ",
  lambda: "λ", mu: "μ", nu: "ν", xi: "ξ", pi: "π", rho: "ρ", sigma: "σ", tau: "τ", phi: "ϕ", varphi: "φ", chi: "χ", psi: "ψ", omega: "ω",
  Gamma: "Γ", Delta: "Δ", Theta: "Θ", Lambda: "Λ", Xi: "Ξ", Pi: "Π", Sigma: "Σ", Phi: "Φ", Psi: "Ψ", Omega: "Ω", ell: "ℓ", hbar: "ℏ",
  infty: "∞", partial: "∂", nabla: "∇", emptyset: "∅", forall: "∀", exists: "∃", Re: "ℜ", Im: "ℑ", degree: "°",
};
const OPERATORS = {
  times: "×", cdot: "·", div: "÷", pm: "±", mp: "∓", leq: "≤", le: "≤", geq: "≥", ge: "≥", neq: "≠", ne: "≠", approx: "≈", equiv: "≡",
  sim: "∼", propto: "∝", ll: "≪", gg: "≫", to: "→", rightarrow: "→", leftarrow: "←", Rightarrow: "⇒", implies: "⇒", iff: "⇔",
  Leftrightarrow: "⇔", leftrightarrow: "↔", mapsto: "↦", in: "∈", notin: "∉", subset: "⊂", subseteq: "⊆", supset: "⊃", cup: "∪", cap: "∩",
  setminus: "∖", land: "∧", lor: "∨", wedge: "∧", vee: "∨", neg: "¬", oplus: "⊕", otimes: "⊗", circ: "∘", bullet: "•", star: "⋆",
  cdots: "⋯", ldots: "…", dots: "…", vdots: "⋮", ddots: "⋱", mid: "∣", parallel: "∥", perp: "⊥", angle: "∠", langle: "⟨", rangle: "⟩",
  lfloor: "⌊", rfloor: "⌋", lceil: "⌈", rceil: "⌉", lbrace: "{", rbrace: "}", vert: "|", Vert: "‖", prime: "′", colon: ":", quad: "\u2003", qquad: "\u2003\u2003",
};
const LARGE = { sum: "∑", prod: "∏", int: "∫", iint: "∬", oint: "∮", bigcup: "⋃", bigcap: "⋂" };
const FUNCTIONS = new Set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp lim max min sup inf det dim ker gcd arg argmax argmin Pr mod".split(" "));
const ACCENTS = { hat: "^", bar: "¯", overline: "¯", vec: "→", dot: "˙", ddot: "¨", tilde: "~", widehat: "^", widetilde: "~" };
const STYLES = { mathbb: "double-struck", mathbf: "bold", mathcal: "script", mathrm: "normal", boldsymbol: "bold", bm: "bold" };
const SPACES = new Set([",", ";", ":", "!", " "]);
const IGNORED = new Set(["displaystyle", "textstyle", "limits", "nolimits", "big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "nonumber"]);
const FENCES = { pmatrix: ["(", ")"], bmatrix: ["[", "]"], vmatrix: ["|", "|"], Bmatrix: ["{", "}"], cases: ["{", ""] };

function node(tag, attributes, ...children) {
  const element = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function renderMaths(source, isBlock) {
  const maths = node("math", { display: isBlock ? "block" : "inline" });
  maths.setAttribute("aria-label", source.trim());
  const tokens = source.match(/\\[a-zA-Z]+\*?|\\[^]|\d+(?:\.\d+)?|\s+|[^]/gu) ?? [];
  if (tokens.length > MOST_TOKENS) {
    maths.append(node("mtext", {}, source));
    return maths;
  }
  const parser = new Parser(tokens);
  maths.append(...parser.row(() => false, 0));
  return maths;
}

class Parser {
  constructor(tokens) {
    this.tokens = tokens;
    this.at = 0;
  }

  // Spaces mean nothing, except in \text{…}, which reads the tokens itself.
  get next() {
    while (this.tokens[this.at]?.trim() === "") this.at++;
    return this.tokens[this.at];
  }

  take() {
    const token = this.next;
    this.at++;
    return token;
  }

  // Nodes up to a token of which `isEnd` is true, or to the end.
  row(isEnd, depth) {
    const found = [];
    while (this.next !== undefined && !isEnd(this.next)) {
      const made = this.scripted(depth);
      if (made !== null) found.push(made);
    }
    return found;
  }

  // An atom with what stands below and above it.
  scripted(depth) {
    const isLarge = this.next.startsWith("\\") && (this.next.slice(1) in LARGE || ["\\lim", "\\max", "\\min", "\\argmax", "\\argmin"].includes(this.next));
    const base = this.next === "^" || this.next === "_" ? node("mrow", {}) : this.atom(depth);
    let below = null, above = null;
    while (this.next === "_" || this.next === "^" || this.next === "'") {
      const mark = this.take();
      if (mark === "'") above = node("mo", {}, "′");
      else if (mark === "_") below = this.argument(depth);
      else above = this.argument(depth);
    }
    if (base === null || (below === null && above === null)) return base;
    const [both, under, over] = isLarge ? ["munderover", "munder", "mover"] : ["msubsup", "msub", "msup"];
    if (below !== null && above !== null) return node(both, {}, base, below, above);
    return below !== null ? node(under, {}, base, below) : node(over, {}, base, above);
  }

  argument(depth) {
    if (this.next === undefined) return node("mrow", {});
    return this.atom(depth + 1) ?? node("mrow", {});
  }

  group(depth) {
    const inside = this.row((token) => token === "}", depth + 1);
    this.at++;
    return node("mrow", {}, ...inside);
  }

  atom(depth) {
    const token = this.take();
    if (depth > DEEPEST) return node("mtext", {}, token);
    if (token === "{") return this.group(depth);
    if (token === "}") return null;
    if (token.startsWith("\\")) return this.command(token.slice(1), depth);
    if (/^\d/.test(token)) return node("mn", {}, token);
    if (/^\p{L}$/u.test(token)) return node("mi", {}, token);
    if (token === "&") return node("mspace", { width: "0.5em" });
    return node("mo", {}, token === "-" ? "−" : token);
  }

  command(name, depth) {
    if (name in SYMBOLS) return node("mi", {}, SYMBOLS[name]);
    if (name in OPERATORS) return node("mo", {}, OPERATORS[name]);
    if (name in LARGE) return node("mo", { largeop: "true" }, LARGE[name]);
    if (FUNCTIONS.has(name)) return node("mi", {}, name);
    if (name in ACCENTS) return node("mover", { accent: "true" }, this.argument(depth), node("mo", {}, ACCENTS[name]));
    if (name in STYLES) return node("mstyle", { mathvariant: STYLES[name], class: `maths-${STYLES[name]}` }, this.argument(depth));
    if (name === "frac" || name === "dfrac" || name === "tfrac") return node("mfrac", {}, this.argument(depth), this.argument(depth));
    if (name === "binom") return node("mrow", {}, node("mo", {}, "("), node("mfrac", { linethickness: "0" }, this.argument(depth), this.argument(depth)), node("mo", {}, ")"));
    if (name === "sqrt") return this.root(depth);
    if (["text", "textbf", "mathit", "operatorname", "mbox", "textrm", "tag"].includes(name)) return node("mtext", {}, this.words());
    if (name === "boxed") return node("mrow", { class: "maths-boxed" }, this.argument(depth));
    if (name === "left" || name === "right" || name === "middle") return this.fence();
    if (name === "begin") return this.environment(this.words(), depth);
    if (name === "end") return this.words() && null;
    if (name === "\\") return node("mspace", { linebreak: "newline", width: "1em" });
    if (SPACES.has(name)) return node("mspace", { width: "0.2em" });
    if (IGNORED.has(name)) return null;
    if (name.length === 1) return node("mo", {}, name);  // \{ \} \% \| …
    return node("mtext", {}, `\\${name}`);
  }

  root(depth) {
    if (this.next !== "[") return node("msqrt", {}, this.argument(depth));
    this.at++;
    const degree = this.row((token) => token === "]", depth + 1);
    this.at++;
    return node("mroot", {}, this.argument(depth), node("mrow", {}, ...degree));
  }

  // \left( and \right.: the brackets alone, as large as what they enclose.
  fence() {
    const token = this.take() ?? ".";
    const shown = token.startsWith("\\") ? OPERATORS[token.slice(1)] ?? token.slice(1) : token;
    return shown === "." ? null : node("mo", { stretchy: "true" }, shown);
  }

  // {as it is}
  words() {
    if (this.next !== "{") return this.take() ?? "";
    this.at++;
    let text = "";
    while (this.at < this.tokens.length && this.tokens[this.at] !== "}") text += this.tokens[this.at++];
    this.at++;
    return text;
  }

  environment(name, depth) {
    const rows = [];
    let cells = [];
    const isEnd = (token) => token === "&" || token === "\\\\" || token === "\\end";
    while (this.next !== undefined) {
      cells.push(node("mtd", {}, ...this.row(isEnd, depth + 1)));
      const mark = this.take();
      if (mark === "&") continue;
      rows.push(node("mtr", {}, ...cells));
      cells = [];
      if (mark !== "\\\\") break;
    }
    if (this.next === "{") this.words();  // of \end{…}
    const [open, close] = FENCES[name] ?? ["", ""];
    const table = node("mtable", {}, ...rows);
    return node("mrow", {}, ...(open ? [node("mo", { stretchy: "true" }, open)] : []), table, ...(close ? [node("mo", { stretchy: "true" }, close)] : []));
  }
}
