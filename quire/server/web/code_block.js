// A block of code on the page: its language, a button that copies it, and lines that are coloured as they come.

import { copyText } from "/page/copy.js";
import { make } from "/page/dom.js";
import { Highlighter } from "/page/highlight.js";

export class CodeBlock {
  constructor(info) {
    const language = info.trim().split(/[\s{,]/)[0].slice(0, 30);
    this.highlighter = new Highlighter(language);
    this.code = make("code");
    this.tail = document.createTextNode("");  // a line that is not complete
    this.code.append(this.tail);
    const copy = make("button", { type: "button", className: "plain" }, "Copy");
    copy.addEventListener("click", () => copyText(copy, this.code.textContent));
    const caption = make("figcaption", {}, make("span", {}, language || "code"), copy);
    this.element = make("figure", { className: "code" }, caption, make("pre", { tabIndex: 0, dir: "ltr" }, this.code));
  }

  addLine(text) {
    this.tail.data = "";
    this.tail.before(...this.highlighter.line(text), "\n");
  }

  // A piece of a line that is too long to wait for.
  addPiece(text) {
    this.tail.data = "";
    this.tail.before(text);
  }

  setTail(text) {
    if (this.tail.data !== text) this.tail.data = text;
  }
}
