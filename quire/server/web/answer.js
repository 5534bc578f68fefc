// One answer on the page: its text as it comes, or its tokens with shades under them, its reasoning and its calls. What
// comes is written once per frame of the screen, however many events that are.

import { describeToken } from "/page/alternatives.js";
import { byId, make } from "/page/dom.js";
import { MarkdownStream } from "/page/markdown.js";

const LIMITS = [0.05, 0.25, 0.6, 0.9];  // probabilities; below the first the shade is darkest
const TOKENS_PER_LINE = 200;  // a longer line of tokens is broken: the browser lays out a line as a whole
const NEAR_END = 80;  // pixels

export class AnswerView {
  constructor() {
    this.reasoning = make("details", { className: "reasoning", hidden: true }, make("summary", {}, "Reasoning"), make("div", { className: "md" }));
    this.text = make("div", { className: "text md" });
    this.calls = make("div");
    this.element = make("div", {}, this.reasoning, this.text, this.calls);
    this.streams = { reasoning: new MarkdownStream(this.reasoning.lastChild), text: new MarkdownStream(this.text) };
    this.waiting = { reasoning: "", text: "", tokens: [] };
    this.isScheduled = false;
    this.decoder = new TextDecoder();
    this.tokens = [];
    this.line = null;
    this.text.addEventListener("keydown", (event) => this.moveFocus(event));
  }

  addReasoning(text) {
    this.waiting.reasoning += text;
    this.schedule();
  }

  addText(text) {
    this.waiting.text += text;
    this.schedule();
  }

  // Entries as chat completions have them. From the first on, tokens are shown in place of the text.
  addTokens(entries) {
    for (const entry of entries) this.waiting.tokens.push(entry);
    this.schedule();
  }

  schedule() {
    if (this.isScheduled) return;
    this.isScheduled = true;
    requestAnimationFrame(() => this.write());
  }

  // All that has come since the last frame.
  write() {
    this.isScheduled = false;
    const list = byId("conversation");
    const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < NEAR_END;
    const { reasoning, text, tokens } = this.waiting;
    this.waiting = { reasoning: "", text: "", tokens: [] };
    if (reasoning) {
      this.reasoning.hidden = false;
      this.streams.reasoning.push(reasoning);
    }
    if (tokens.length) this.writeTokens(tokens);
    else if (text && !this.tokens.length) this.streams.text.push(text);
    if (isAtEnd) list.scrollTop = list.scrollHeight;
  }

  // Nothing more comes.
  end() {
    this.write();
    this.streams.reasoning.end();
    this.streams.text.end();
  }

  writeTokens(entries) {
    if (!this.tokens.length) {
      this.text.replaceChildren();
      this.text.classList.remove("md");
    }
    for (const entry of entries) {
      const piece = this.decoder.decode(Uint8Array.from(entry.bytes), { stream: true });
      const probability = Math.exp(entry.logprob);
      const shade = 1 + LIMITS.filter((limit) => probability >= limit).length;
      const isSpecial = /^<\|.*\|>$/.test(entry.token);
      const span = make("span", { className: `token p${shade}${isSpecial ? " special" : ""}`, tabIndex: this.tokens.length ? -1 : 0 }, piece);
      describeToken(span, entry);
      this.tokens.push(span);
      if (this.line === null) this.text.append((this.line = make("div")));
      this.line.append(span);
      if (piece.includes("\n") || this.line.childElementCount >= TOKENS_PER_LINE) this.line = null;
    }
  }

  addCall(delta) {
    let card = this.calls.children[delta.index];
    if (card === undefined) {
      card = make("div", { className: "call", role: "group" }, make("div", {}, "Calls ", make("strong"), ""), make("code"));
      this.calls.append(card);
    }
    if (delta.function?.name) {
      card.querySelector("strong").textContent = delta.function.name;
      card.setAttribute("aria-label", `Call of ${delta.function.name}`);
    }
    card.querySelector("code").append(delta.function?.arguments ?? "");
  }

  // Left and right walk over the tokens: they are one stop of the tab key.
  moveFocus(event) {
    const at = this.tokens.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: this.tokens.length - 1 }[event.key];
    if (at < 0 || to === undefined || !this.tokens[to]) return;
    event.preventDefault();
    this.tokens[at].tabIndex = -1;
    this.tokens[to].tabIndex = 0;
    this.tokens[to].focus();
  }
}
