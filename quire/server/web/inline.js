// Markdown within a line: emphasis, code, links and maths, as nodes. Nothing is ever read as HTML, and the work is linear.

import { make } from "/page/dom.js";
import { renderMaths } from "/page/maths.js";

const DEEPEST = 12;  // emphasis in emphasis, links in emphasis, …; deeper marks stay text
const LONGEST_MATHS = 2000;
const ENTITIES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'", "&nbsp;": "\u00a0" };
const PUNCTUATION = /[\p{P}\p{S}]/u;
const SPACE = /\s/;
const SPECIAL = /[\\`*_~[!<&$h\n]/g;  // where something may begin; the rest is copied in one piece
const DESTINATION = /\(\s*<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/y;
const BARE_LINK = /https?:\/\/[^\s<>"`]+/y;
const ANGLE_LINK = /<(https?:\/\/[^\s<>]+|mailto:[^\s<>]+)>/y;
const BREAK = /<br\s*\/?>/iy;
const ENTITY = /&(?:amp|lt|gt|quot|#39|nbsp);/y;

export function renderInline(text, depth = 0) {
  return new Inline(text, depth).render();
}

// Only addresses that a reader can follow safely; null for javascript:, data: and all others.
export function safeAddress(address) {
  try {
    const url = new URL(address);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function link(address, ...children) {
  const href = safeAddress(address);
  if (href === null) return make("span", { className: "no-link", title: "Not a web address: not made a link" }, ...children);
  return make("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

class Inline {
  constructor(text, depth) {
    this.text = text;
    this.depth = depth;
    this.frames = [{ mark: "", children: [] }];  // open emphasis, the outermost first
    this.plain = "";
    this.closings = null;
    this.runs = null;
    this.missing = new Set();  // closing marks of which there are no more
  }

  render() {
    const { text } = this;
    let at = 0;
    while (at < text.length) {
      SPECIAL.lastIndex = at;
      const found = SPECIAL.exec(text);
      if (found === null) break;
      this.plain += text.slice(at, found.index);
      at = this.take(found[0], found.index);
    }
    this.plain += text.slice(at);
    while (this.frames.length > 1) this.giveUp();
    this.flush();
    return this.frames[0].children;
  }

  flush() {
    if (this.plain) this.frames.at(-1).children.push(this.plain);
    this.plain = "";
  }

  add(node, end) {
    this.flush();
    this.frames.at(-1).children.push(node);
    return end;
  }

  // Takes what begins at `at` with `mark`; returns where it ends.
  take(mark, at) {
    const { text } = this;
    const end = this.takeSpecial(mark, at);
    if (end !== null) return end;
    this.plain += text[at];
    return at + 1;
  }

  takeSpecial(mark, at) {
    const { text } = this;
    if (mark === "\\") return this.takeEscape(at);
    if (mark === "`") return this.takeCode(at);
    if (mark === "*" || mark === "_" || mark === "~") return this.takeEmphasis(mark, at);
    if (mark === "$") return this.takeDollars(at);
    if (mark === "[") return this.takeLink(at, at);
    if (mark === "!" && text[at + 1] === "[") return this.takeLink(at, at + 1);
    if (mark === "h") return this.takeBareLink(at);
    if (mark === "&") {
      const found = match(ENTITY, text, at);
      if (found === null) return null;
      this.plain += ENTITIES[found[0]];
      return at + found[0].length;
    }
    if (mark === "<") return this.takeAngle(at);
    if (mark === "\n") return this.takeNewline(at);
    return null;
  }

  takeNewline(at) {
    this.plain = this.plain.replace(/ +$/, "");
    this.plain += "\n";
    return at + 1;
  }

  takeEscape(at) {
    const next = this.text[at + 1];
    if (next === "(" || next === "[") {
      const end = this.find(next === "(" ? "\\)" : "\\]", at + 2);
      if (end !== null && end - at <= LONGEST_MATHS) return this.add(renderMaths(this.text.slice(at + 2, end), next === "["), end + 2);
    }
    if (next === "\n") return this.takeNewline(at + 1);
    if (next === undefined || !/[!-/:-@[-`{-~]/.test(next)) return null;
    this.plain += next;
    return at + 2;
  }

  // Where a closing mark comes next. What was not found once is not looked for again.
  find(mark, from) {
    if (this.missing.has(mark)) return null;
    const at = this.text.indexOf(mark, from);
    if (at < 0) this.missing.add(mark);
    return at < 0 ? null : at;
  }

  takeDollars(at) {
    const { text } = this;
    if (text.startsWith("$$", at)) {
      const end = this.find("$$", at + 2);
      return end === null || end === at + 2 || end - at > LONGEST_MATHS ? this.skip("$$", at) : this.add(renderMaths(text.slice(at + 2, end), true), end + 2);
    }
    // One dollar is money unless it encloses something: "$x$", and not "$5 and $6".
    if (text[at + 1] === undefined || SPACE.test(text[at + 1])) return null;
    const end = this.find("$", at + 1);
    if (end === null || end - at > LONGEST_MATHS || SPACE.test(text[end - 1]) || /\d/.test(text[end + 1] ?? "") || text.slice(at, end).includes("\n\n")) return null;
    return this.add(renderMaths(text.slice(at + 1, end), false), end + 1);
  }

  skip(mark, at) {
    this.plain += mark;
    return at + mark.length;
  }

  takeCode(at) {
    const { text } = this;
    this.runs ??= backtickRuns(text);
    const length = runLength(text, at, "`");
    const places = this.runs.get(length);
    while (places.length && places.at(-1) <= at) places.pop();
    const end = places.at(-1);
    if (end === undefined) return this.skip("`".repeat(length), at);
    let code = text.slice(at + length, end);
    if (code.startsWith(" ") && code.endsWith(" ") && code.trim() !== "") code = code.slice(1, -1);
    return this.add(make("code", {}, code), end + length);
  }

  takeLink(at, bracket) {
    const { text } = this;
    this.closings ??= matchBrackets(text);
    const close = this.closings.get(bracket);
    if (close === undefined || this.depth >= DEEPEST) return null;
    const found = match(DESTINATION, text, close + 1);
    if (found === null) return null;
    const end = close + 1 + found[0].length;
    const words = text.slice(bracket + 1, close);
    // No image is ever fetched: whoever wants to see it follows the link.
    if (bracket > at) return this.add(link(found[1], `🖼 ${words || "image"}`), end);
    return this.add(link(found[1], ...renderInline(words, this.depth + 1)), end);
  }

  takeAngle(at) {
    const address = match(ANGLE_LINK, this.text, at);
    if (address !== null) return this.add(link(address[1], address[1]), at + address[0].length);
    const found = match(BREAK, this.text, at);
    return found === null ? null : this.add(make("br"), at + found[0].length);
  }

  takeBareLink(at) {
    if (/[\p{L}\p{N}]/u.test(this.text[at - 1] ?? " ")) return null;
    const found = match(BARE_LINK, this.text, at);
    if (found === null) return null;
    let address = found[0].replace(/[.,;:!?*_~'"]{1,20}$/, "");
    if (address.endsWith(")") && !address.includes("(")) address = address.slice(0, -1);
    return this.add(link(address, address), at + address.length);
  }

  takeEmphasis(mark, at) {
    const { text } = this;
    const length = runLength(text, at, mark);
    const before = text[at - 1] ?? " ", after = text[at + length] ?? " ";
    const opens = !SPACE.test(after) && (!PUNCTUATION.test(after) || SPACE.test(before) || PUNCTUATION.test(before));
    const closes = !SPACE.test(before) && (!PUNCTUATION.test(before) || SPACE.test(after) || PUNCTUATION.test(after));
    const isWord = mark === "_" && opens && closes;  // snake_case stays as it is
    if (length > 3 || isWord || (mark === "~" && length !== 2)) return this.skip(mark.repeat(length), at);
    let left = length;
    while (closes && left > 0) {
      const place = this.frames.findLastIndex((frame) => frame.mark[0] === mark && frame.mark.length <= left);
      if (place < 1) break;
      while (this.frames.length - 1 > place) this.giveUp();
      left -= this.closeFrame();
    }
    if (left > 0 && opens && this.frames.length + this.depth < DEEPEST) {
      this.flush();
      if (left !== 2) this.frames.push({ mark, children: [] });
      if (left >= 2) this.frames.push({ mark: mark + mark, children: [] });
    } else this.plain += mark.repeat(left);
    return at + length;
  }

  closeFrame() {
    this.flush();
    const { mark, children } = this.frames.pop();
    const tag = mark === "~~" ? "del" : mark.length === 2 ? "strong" : "em";
    this.frames.at(-1).children.push(make(tag, {}, ...children));
    return mark.length;
  }

  // An emphasis that nobody closed was text.
  giveUp() {
    this.flush();
    const { mark, children } = this.frames.pop();
    const parent = this.frames.at(-1).children;
    parent.push(mark);
    for (const child of children) parent.push(child);
  }
}

function match(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

function runLength(text, at, mark) {
  let end = at;
  while (text[end] === mark) end++;
  return end - at;
}

// Where runs of backticks begin, by their length, the last first.
function backtickRuns(text) {
  const runs = new Map();
  for (const found of text.matchAll(/`+/g)) {
    if (!runs.has(found[0].length)) runs.set(found[0].length, []);
    runs.get(found[0].length).push(found.index);
  }
  for (const places of runs.values()) places.reverse();
  return runs;
}

function matchBrackets(text) {
  const closings = new Map(), open = [];
  for (let at = 0; at < text.length; at++) {
    if (text[at] === "\\") at++;
    else if (text[at] === "[") open.push(at);
    else if (text[at] === "]" && open.length) closings.set(open.pop(), at);
  }
  return closings;
}
