// Colours for code, a line at a time as it comes: comments, strings, numbers and keywords. Not a parser; a reader's aid.

import { make } from "/page/dom.js";

const LONGEST_LINE = 2000;
const words = (text) => new Set(text.split(" "));
const C_LIKE = "if else for while do switch case default break continue return struct class enum interface const static public private protected new delete this void int long short char float double bool auto using namespace template typename try catch throw true false null";
const KEYWORDS = {
  python: words("and as assert async await break class continue def del elif else except finally for from global if import in is lambda nonlocal not or pass raise return try while with yield None True False self match case"),
  javascript: words(`${C_LIKE} function let var const of in import export from async await yield typeof instanceof undefined extends super type implements readonly`),
  c: words(`${C_LIKE} unsigned signed sizeof typedef extern inline virtual override final package import func fn let mut impl trait pub use mod match var go defer range chan map string nil self Self where move val fun object when`),
  shell: words("if then else elif fi for while do done case esac function in return export local sudo cd echo exit set source alias"),
  sql: words("select from where and or not insert into values update set delete create table drop alter join left right inner outer on group by order having limit as distinct union all null is in like between primary key index view with case when then else end"),
  none: new Set(),
};
const FAMILIES = {
  python: ["python", "#"], py: ["python", "#"], python3: ["python", "#"], ruby: ["python", "#"], rb: ["python", "#"],
  javascript: ["javascript", "//"], js: ["javascript", "//"], typescript: ["javascript", "//"], ts: ["javascript", "//"], jsx: ["javascript", "//"], tsx: ["javascript", "//"],
  bash: ["shell", "#"], sh: ["shell", "#"], shell: ["shell", "#"], zsh: ["shell", "#"], console: ["shell", "#"], dockerfile: ["shell", "#"], makefile: ["shell", "#"],
  yaml: ["none", "#"], yml: ["none", "#"], toml: ["none", "#"], ini: ["none", "#"], r: ["python", "#"],
  sql: ["sql", "--"], lua: ["python", "--"], haskell: ["python", "--"], json: ["none", ""], html: ["none", ""], xml: ["none", ""], text: null, txt: null, plain: null,
};
const STRING = `"(?:[^"\\\\]|\\\\.)*"?|'(?:[^'\\\\]|\\\\.)*'?|\`(?:[^\`\\\\]|\\\\.)*\`?`;

export class Highlighter {
  constructor(language) {
    const name = language.trim().toLowerCase();
    const family = name === "" ? null : name in FAMILIES ? FAMILIES[name] : ["c", "//"];
    this.isPlain = family === null;
    if (this.isPlain) return;
    const [kind, comment] = family;
    this.keywords = KEYWORDS[kind];
    this.ignoresCase = kind === "sql";
    this.block = comment === "//" ? ["/*", "*/"] : kind === "python" ? ['"""', '"""'] : null;
    this.inside = false;  // a comment or string that goes over several lines
    const escaped = comment.replace(/\//g, "\\/");
    const parts = [
      this.block && `(?<block>${this.block[0].replace(/[/*]/g, "\\$&")})`,
      comment && `(?<comment>${escaped}.*)`,
      `(?<string>${STRING})`, "(?<number>\\b\\d[\\w.]*)", "(?<word>[\\p{L}_$][\\w$]*)",
    ];
    this.pattern = new RegExp(parts.filter(Boolean).join("|"), "gu");
  }

  // The nodes of one line, without its newline.
  line(text) {
    if (this.isPlain || text.length > LONGEST_LINE) return [text];
    const nodes = [];
    let at = 0;
    const colour = (kind, piece) => nodes.push(make("span", { className: `hl-${kind}` }, piece));
    while (at < text.length) {
      if (this.inside) {
        const end = text.indexOf(this.block[1], at);
        const stop = end < 0 ? text.length : end + this.block[1].length;
        colour("comment", text.slice(at, stop));
        this.inside = end < 0;
        at = stop;
        continue;
      }
      this.pattern.lastIndex = at;
      const found = this.pattern.exec(text);
      if (found === null) break;
      if (found.index > at) nodes.push(text.slice(at, found.index));
      at = found.index + found[0].length;
      const { groups } = found;
      if (groups.block) {
        this.inside = true;
        const end = text.indexOf(this.block[1], at);
        const stop = end < 0 ? text.length : end + this.block[1].length;
        colour("comment", text.slice(found.index, stop));
        this.inside = end < 0;
        at = stop;
      } else if (groups.comment) colour("comment", found[0]);
      else if (groups.string) colour("string", found[0]);
      else if (groups.number) colour("number", found[0]);
      else if (this.keywords.has(this.ignoresCase ? found[0].toLowerCase() : found[0])) colour("keyword", found[0]);
      else nodes.push(found[0]);
    }
    if (at < text.length) nodes.push(text.slice(at));
    return nodes;
  }
}
