// How a turn looks: a question, an answer with what can be done with it, the result of a tool's call.

import { AnswerView } from "/page/answer.js";
import { copyText } from "/page/copy.js";
import { duration, make, plural } from "/page/dom.js";
import { explain } from "/page/explain.js";

// `actions` is what talk.js can do with the turn.
export function renderTurn(turn, actions) {
  if (turn.role === "user") return renderQuestion(turn, actions);
  if (turn.role === "tool") {
    return make("li", { className: "turn tool" }, make("div", { className: "who" }, "Result of a call"), make("div", { className: "text", dir: "auto" }, turn.content));
  }
  // The same element as before: a long answer that moved would be laid out anew, as a whole.
  const item = turn.item ?? make("li", { "aria-label": "Answer" });
  item.className = `turn assistant ${turn.state ?? ""}`;
  if (turn.view === undefined) {
    turn.view = new AnswerView();
    if (turn.reasoning) turn.view.addReasoning(turn.reasoning);
    turn.view.addText(turn.content);
    for (const [place, call] of (turn.calls ?? []).entries()) turn.view.addCall({ index: place, function: call });
    turn.view.end();
  }
  if (turn.view.element.parentNode !== item) item.replaceChildren(turn.view.element);
  while (item.lastChild !== turn.view.element) item.lastChild.remove();
  if (turn.state === "failed") item.append(make("p", { className: "bad", role: "alert" }, turn.error));
  if (turn.state !== undefined && turn.state !== "streaming") item.append(...renderOutcome(turn, actions));
  return item;
}

function button(text, act, properties = {}) {
  return make("button", { type: "button", className: "plain", onclick: act, ...properties }, text);
}

function renderOutcome(turn, actions) {
  const row = make("div", { className: "actions" });
  const verdict = make("p", { role: "status", className: "verdict" });
  row.append(button(turn.state === "failed" ? "Try again" : "Regenerate", actions.regenerate));
  if (turn.content) row.append(button("Copy", (event) => copyText(event.target, turn.content)));
  if (turn.state === "done" && turn.typed && turn.tokenIds?.length) {
    row.append(button("Verify this answer", () => actions.verify(verdict), { title: "Computes it once more, now, and compares every token" }));
  }
  const link = actions.link();
  if (link !== null) {
    row.append(make("a", { href: link, className: "same-answer", onclick: (event) => {
      event.preventDefault();
      copyText(event.target, link);
    } }, "Link to this answer"));
  }
  row.append(button("Branch", actions.branch, { title: "A new conversation that begins like this one, up to here" }));
  if (turn.id) row.append(button("Where its time went", () => explain(turn.id)));
  if (turn.seed !== undefined) row.append(button(`seed ${turn.seed}`, actions.useSeed, { className: "plain seed", title: "Put this seed into the settings" }));
  const results = turn.finish === "tool_calls" && actions.isLast ? renderResults(turn, actions) : null;
  return [renderVerdict(turn), results, renderSpeed(turn), row, verdict].filter(Boolean);
}

// As the reader of this page saw it, the network included.
function renderSpeed(turn) {
  const count = turn.tokenIds?.length ?? 0;
  if (!count || turn.firstSeconds === undefined) return null;
  const rest = turn.seconds - turn.firstSeconds;
  const rate = count > 1 && rest > 0 ? `, ${((count - 1) / rest).toFixed(1)} tokens/s` : "";
  const limit = turn.finish === "length" ? ", stopped at the token limit" : "";
  return make("p", { className: "quiet speed" }, `${plural(count, "token")}, the first after ${duration(turn.firstSeconds)}${rate}${limit}`);
}

// Whether the answer is the one a link was made of.
function renderVerdict(turn) {
  if (!turn.expected?.digest || turn.state !== "done") return null;
  if (turn.digest === turn.expected.digest) {
    return make("p", { className: "good", role: "status" }, `✓ The same answer as the link's, bit for bit: ${plural(turn.tokenIds.length, "token")}.`);
  }
  const other = turn.fingerprint !== turn.expected.fingerprint;
  const why = other ? "It was made by another model or another kind of device." : "That should not be: the model and the parameters are the same.";
  return make("p", { className: "bad", role: "alert" }, `✗ Not the answer of the link. ${why}`);
}

function renderQuestion(turn, actions) {
  const item = make("li", { className: "turn user", "aria-label": "You" }, make("div", { className: "text", dir: "auto" }, turn.content));
  const edit = button("Edit", () => {
    if (!actions.canEdit()) return;
    const area = make("textarea", { rows: 3, value: turn.content, "aria-label": "Your message", dir: "auto" });
    const save = make("button", { type: "button", className: "primary" }, "Ask");
    const cancel = make("button", { type: "button", onclick: actions.cancel }, "Cancel");
    save.addEventListener("click", () => area.value.trim() !== "" && actions.ask(area.value));
    item.replaceChildren(make("div", { className: "edit" }, area, make("div", {}, cancel, save)));
    area.focus();
  });
  item.append(make("div", { className: "actions" }, edit));
  return item;
}

// Nobody runs tools here: whoever reads the call says what came of it.
function renderResults(turn, actions) {
  const form = make("form", { className: "call" });
  for (const call of turn.calls) {
    form.append(make("label", {}, `Result of ${call.name}`, make("textarea", { name: call.id, rows: 2, required: true })));
  }
  form.append(make("div", {}, make("button", { className: "primary" }, "Send results")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const areas = [...form.querySelectorAll("textarea")];
    actions.answerCalls(turn.calls.map((call, place) => ({ callId: call.id, content: areas[place].value })));
  });
  return form;
}
