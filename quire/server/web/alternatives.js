// The box beside a token that says what else was likely there. It belongs to one token at a time, and goes as soon as that
// one is no longer pointed at, has no focus, or is not on the page any more.

import { byId, make } from "/page/dom.js";

const entries = new WeakMap();  // of tokens' elements
let owner = null;

export function describeToken(span, entry) {
  entries.set(span, entry);
}

// `place` is an element with tokens in it, now or later.
export function watchTokens(place) {
  const tokenOf = (event) => event.target.closest?.(".token") ?? null;
  for (const kind of ["pointerover", "focusin"]) place.addEventListener(kind, (event) => show(tokenOf(event)));
  for (const kind of ["pointerout", "focusout"]) place.addEventListener(kind, (event) => tokenOf(event) === owner && hide());
  place.addEventListener("scroll", hide);
  new MutationObserver(() => owner?.isConnected === false && hide()).observe(place, { childList: true, subtree: true });
  document.addEventListener("pointermove", (event) => {
    if (owner !== null && event.target !== owner && owner !== document.activeElement) hide();
  });
  addEventListener("blur", hide);
}

export const isShown = () => owner !== null;

export function hide() {
  byId("alternatives").hidden = true;
  owner?.removeAttribute("aria-describedby");
  owner = null;
}

function show(span) {
  const entry = entries.get(span);
  if (span === owner || entry === undefined) return;
  hide();
  owner = span;
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

const shown = (token) => token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";
