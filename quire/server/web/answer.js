// One answer on the page: its text as it comes, or its tokens with shades under them, its reasoning and its calls.

import { byId, make } from "/page/dom.js";

const LIMITS = [0.05, 0.25, 0.6, 0.9];  // probabilities; below the first the shade is darkest

export class AnswerView {
  constructor() {
    this.reasoning = make("details", { className: "reasoning", hidden: true }, make("summary", {}, "Reasoning"), make("div", { className: "text" }));
    this.text = make("div", { className: "text" });
    this.calls = make("div");
    this.element = make("div", {}, this.reasoning, this.text, this.calls);
    this.decoder = new TextDecoder();
    this.tokens = [];
    this.text.addEventListener("keydown", (event) => this.moveFocus(event));
  }

  addReasoning(text) {
    this.reasoning.hidden = false;
    this.reasoning.lastChild.append(text);
  }

  addText(text) {
    if (!this.tokens.length) this.text.append(text);
  }

  // Entries as chat completions have them. From the first on, tokens are shown in place of the text.
  addTokens(entries) {
    if (!this.tokens.length) this.text.replaceChildren();
    const spans = entries.map((entry) => {
      const piece = this.decoder.decode(Uint8Array.from(entry.bytes), { stream: true });
      const probability = Math.exp(entry.logprob);
      const shade = 1 + LIMITS.filter((limit) => probability >= limit).length;
      const isSpecial = /^<\|.*\|>$/.test(entry.token);
      const span = make("span", { className: `token p${shade}${isSpecial ? " special" : ""}`, tabIndex: this.tokens.length ? -1 : 0 }, piece);
      span.addEventListener("pointerenter", () => showAlternatives(span, entry));
      span.addEventListener("pointerleave", hideAlternatives);
      span.addEventListener("focus", () => showAlternatives(span, entry));
      span.addEventListener("blur", hideAlternatives);
      this.tokens.push(span);
      return span;
    });
    this.text.append(...spans);
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

function showAlternatives(span, entry) {
  const box = byId("alternatives");
  const listed = entry.top_logprobs.some((one) => one.token === entry.token && one.logprob === entry.logprob);
  const rows = [...(listed ? [] : [entry]), ...entry.top_logprobs].map((one) => {
    const probability = Math.exp(one.logprob);
    const chosen = one.token === entry.token && one.logprob === entry.logprob;
    const meter = make("meter", { min: 0, max: 1, value: probability });
    return make("tr", { className: chosen ? "chosen" : "" }, make("td", {}, shown(one.token)), make("td", {}, meter),
      make("td", { className: "number" }, `${(100 * probability).toFixed(probability < 0.1 ? 2 : 1)} %`));
  });
  box.replaceChildren(make("table", {}, make("tbody", {}, ...rows)));
  box.hidden = false;
  span.setAttribute("aria-describedby", "alternatives");
  const place = span.getBoundingClientRect();
  const size = box.getBoundingClientRect();
  const below = place.bottom + size.height + 8 < innerHeight;
  box.style.left = `${Math.max(4, Math.min(place.left, innerWidth - size.width - 4))}px`;
  box.style.top = `${below ? place.bottom + 4 : Math.max(4, place.top - size.height - 4)}px`;
}

function hideAlternatives(event) {
  byId("alternatives").hidden = true;
  event.currentTarget.removeAttribute("aria-describedby");
}

const shown = (token) => token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";
