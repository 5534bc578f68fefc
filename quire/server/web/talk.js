// The chat: turns as data, and the page made of them.

import { streamJson } from "/page/api.js";
import { AnswerView } from "/page/answer.js";
import { isUp, whenUp } from "/page/connection.js";
import { byId, make, plural } from "/page/dom.js";
import { explain } from "/page/explain.js";
import { digest, linkTo, readLink } from "/page/link.js";
import { SettingsError, buildSettings, requestFields, seedOf, showSettingsError, typeSettings, typedSettings } from "/page/settings.js";

// A turn: {role: "user" | "tool" | "assistant", content, …}; what an answer has besides is made in `ask`.
let turns = [];
let model = "";
let running = null;
let offered = null;  // a link whose answer nobody has asked for yet

export function startTalk(about) {
  model = about.models[0];
  buildSettings(about.settings);
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    sendQuestion();
  });
  byId("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      sendQuestion();
    }
  });
  byId("stop").addEventListener("click", stop);
  byId("new-chat").addEventListener("click", () => {
    stop();
    turns = [];
    offer(null);
    render();
    byId("question").focus();
  });
  byId("link-ask").addEventListener("click", () => {
    if (!running && offered !== null) ask({ expected: offered });
  });
  addEventListener("hashchange", openLink);
  openLink();
}

function openLink() {
  const link = readLink(location.hash);
  if (link === null) return;
  stop();
  typeSettings({ ...link.settings, seed: String(link.seed) });
  turns = link.turns;
  render();
  offer(link);
}

// Whoever made the link is not whose key pays for the answer: that one is asked first.
function offer(link) {
  offered = link;
  byId("link-offer").hidden = link === null;
}

function sendQuestion() {
  const text = byId("question").value;
  if (running || text.trim() === "") return;
  if (!areSettingsRight()) return;  // the question stays where it was typed
  turns.push({ role: "user", content: text });
  byId("question").value = "";
  ask({});
}

function areSettingsRight() {
  try {
    const typed = typedSettings();
    seedOf(typed);
    requestFields(typed);
  } catch (error) {
    if (!(error instanceof SettingsError)) throw error;
    showSettingsError(error);
    byId("talk-status").textContent = `Not sent: ${error.message}`;
    return false;
  }
  showSettingsError(null);
  return true;
}

function stop() {
  running?.abort();
  running = null;
  setBusy(false);
}

// Asks for an answer to the turns there are. `expected` is what a link says of the answer.
async function ask({ expected = null }) {
  if (running) return;
  if (!areSettingsRight()) {
    render();
    return;
  }
  offer(null);
  const typed = typedSettings();
  const seed = seedOf(typed);
  const fields = requestFields(typed);
  const question = messagesOf(turns, typed.system);
  const turn = { role: "assistant", content: "", reasoning: "", calls: [], tokenIds: [], logprobs: [], seed, typed, expected, state: "streaming", view: new AnswerView() };
  const before = turns.slice();
  turns.push(turn);
  render();
  const own = (running = new AbortController());
  setBusy(true);
  const body = { model, messages: question, stream: true, stream_options: { include_usage: true }, return_token_ids: true, ...fields, seed };
  try {
    await streamJson("/v1/chat/completions", body, own.signal, (event) => take(turn, event));
    turn.state = "done";
    turn.digest = digest(turn.tokenIds, turn.logprobs);
  } catch (error) {
    turn.state = error.name === "AbortError" ? "stopped" : "failed";
    turn.error = error.message;
  }
  if (turn.state === "done") turn.link = linkTo(linkOf(turn, before));
  if (running === own || running === null) {  // not if somebody has asked anew meanwhile
    running = null;
    setBusy(false);
    say(turn);
  }
  render();
}

function linkOf(turn, before) {
  const kept = before.map(({ role, content, calls, callId }) => ({ role, content, calls, callId }));
  const { seed: _, ...settings } = turn.typed;
  return { settings, seed: turn.seed, turns: kept, digest: turn.digest, tokens: turn.tokenIds.length, fingerprint: turn.fingerprint };
}

function take(turn, event) {
  turn.id = event.id;
  turn.fingerprint = event.system_fingerprint;
  if (event.usage) turn.usage = event.usage;
  const choice = event.choices[0];
  if (choice === undefined) return;
  const { delta, logprobs } = choice;
  if (choice.token_ids) turn.tokenIds.push(...choice.token_ids);
  if (choice.finish_reason) turn.finish = choice.finish_reason;
  const list = byId("conversation");
  const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 80;
  if (delta.reasoning_content) {
    turn.reasoning += delta.reasoning_content;
    turn.view.addReasoning(delta.reasoning_content);
  }
  if (delta.content) {
    turn.content += delta.content;
    turn.view.addText(delta.content);
  }
  if (logprobs?.content) {
    turn.logprobs.push(...logprobs.content.map((entry) => entry.logprob));
    turn.view.addTokens(logprobs.content);
  }
  for (const call of delta.tool_calls ?? []) {
    const known = (turn.calls[call.index] ??= { id: "", name: "", arguments: "" });
    if (call.id) known.id = call.id;
    if (call.function?.name) known.name = call.function.name;
    known.arguments += call.function?.arguments ?? "";
    turn.view.addCall(call);
  }
  if (atEnd) list.scrollTop = list.scrollHeight;
}

function messagesOf(list, system) {
  const messages = system === undefined ? [] : [{ role: "system", content: system }];
  for (const turn of list) {
    if (turn.role === "tool") messages.push({ role: "tool", tool_call_id: turn.callId, content: turn.content });
    else if (turn.role === "assistant" && turn.calls?.length) {
      const calls = turn.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
      messages.push({ role: "assistant", content: turn.content || null, tool_calls: calls });
    } else messages.push({ role: turn.role, content: turn.content });
  }
  return messages;
}

// What has been shown

function setBusy(busy) {
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
  byId("conversation").setAttribute("aria-busy", String(busy));
  byId("talk-status").textContent = busy ? "Answering" : "";
  // Whoever pressed a button that is gone now finds the next one that makes sense.
  const lost = [document.body, byId("send"), byId("stop")].includes(document.activeElement);
  if (busy && lost) byId("stop").focus();
  else if (!busy && lost) byId("question").focus();
}

function say(turn) {
  const length = plural(turn.tokenIds.length, "token");
  const cached = turn.usage?.prompt_tokens_details?.cached_tokens;
  const ends = { stop: "", length: ", as many as it may have", tool_calls: ", and calls of tools" }[turn.finish] ?? "";
  const asked = turn.usage ? `; ${plural(turn.usage.prompt_tokens, "token")} of prompt, ${cached} of them cached` : "";
  const texts = { done: `Answered: ${length}${ends}${asked}`, stopped: `Stopped after ${length}`, failed: `Failed: ${turn.error}` };
  byId("talk-status").textContent = texts[turn.state];
}

// Only what changed is made anew: the focus stays where it is, and a screen reader hears what is new.
function render() {
  const list = byId("conversation");
  byId("empty").hidden = turns.length > 0;
  turns.forEach((turn, index) => {
    const version = `${turn.state} ${turn.finish === "tool_calls" && index === turns.length - 1}`;
    if (turn.version !== version) {
      const made = renderTurn(turn, index);
      turn.item?.replaceWith(made);
      turn.item = made;
      turn.version = version;
    }
    if (list.children[index] !== turn.item) list.insertBefore(turn.item, list.children[index] ?? null);
  });
  while (list.children.length > turns.length) list.lastChild.remove();
  list.scrollTop = list.scrollHeight;
}

function renderTurn(turn, index) {
  if (turn.role === "user") return renderQuestion(turn, index);
  if (turn.role === "tool") {
    return make("li", { className: "turn tool" }, make("div", { className: "who" }, "Result of a call"), make("div", { className: "text" }, turn.content));
  }
  const item = make("li", { className: `turn assistant ${turn.state ?? ""}`, "aria-label": "Answer" });
  if (turn.view === undefined) {
    turn.view = new AnswerView();
    turn.view.addText(turn.content);
    for (const [place, call] of (turn.calls ?? []).entries()) turn.view.addCall({ index: place, function: call });
  }
  item.append(turn.view.element);
  if (turn.state === "failed") item.append(make("p", { className: "bad", role: "alert" }, turn.error));
  if (turn.state !== undefined && turn.state !== "streaming") item.append(...renderOutcome(turn, index));
  return item;
}

function renderOutcome(turn, index) {
  const actions = make("div", { className: "actions" });
  const add = (text, act) => actions.append(make("button", { type: "button", className: "plain", onclick: act }, text));
  add(turn.state === "failed" ? "Try again" : "Regenerate", () => askAgain(index));
  if (turn.content) add("Copy", (event) => copy(event.target, turn.content));
  if (turn.link) {
    actions.append(make("a", { href: turn.link, className: "same-answer", onclick: (event) => {
      event.preventDefault();
      copy(event.target, turn.link);
    } }, "Link to this answer"));
  }
  if (turn.id) add("Where its time went", () => explain(turn.id));
  actions.append(make("span", { className: "quiet" }, `seed ${turn.seed}`));
  return [renderVerdict(turn), turn.finish === "tool_calls" && index === turns.length - 1 ? renderResults(turn) : null, actions].filter(Boolean);
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

function renderQuestion(turn, index) {
  const item = make("li", { className: "turn user", "aria-label": "You" }, make("div", { className: "text" }, turn.content));
  const edit = make("button", { type: "button", className: "plain" }, "Edit");
  edit.addEventListener("click", () => {
    if (running) return;
    const area = make("textarea", { rows: 3, value: turn.content, "aria-label": "Your message" });
    const save = make("button", { type: "button", className: "primary" }, "Ask");
    const cancel = make("button", { type: "button" }, "Cancel");
    save.addEventListener("click", () => {
      if (running || area.value.trim() === "") return;
      turns = [...turns.slice(0, index), { role: "user", content: area.value }];
      ask({});
    });
    cancel.addEventListener("click", () => {
      turn.version = null;
      render();
    });
    item.replaceChildren(make("div", { className: "edit" }, area, make("div", {}, cancel, save)));
    area.focus();
  });
  item.append(make("div", { className: "actions" }, edit));
  return item;
}

// Nobody runs tools here: whoever reads the call says what came of it.
function renderResults(turn) {
  const form = make("form", { className: "call" });
  for (const call of turn.calls) {
    form.append(make("label", {}, `Result of ${call.name}`, make("textarea", { name: call.id, rows: 2, required: true })));
  }
  form.append(make("div", {}, make("button", { className: "primary" }, "Send results")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return;
    const areas = [...form.querySelectorAll("textarea")];
    turns.push(...turn.calls.map((call, place) => ({ role: "tool", callId: call.id, content: areas[place].value })));
    ask({});
  });
  return form;
}

function askAgain(index) {
  if (running) return;
  const again = turns[index].state === "failed" ? turns[index].expected : null;
  turns = turns.slice(0, index);
  if (isUp()) ask({ expected: again });
  else {
    byId("talk-status").textContent = "Waiting for the server";
    whenUp(() => ask({ expected: again }));
  }
}

async function copy(element, text) {
  const label = element.textContent;
  try {
    await navigator.clipboard.writeText(text);
    element.textContent = "Copied";
  } catch {
    // Not over plain HTTP: then the address bar has it.
    if (element.href) history.replaceState(null, "", element.href);
    element.textContent = element.href ? "In the address bar" : "Not allowed here";
  }
  setTimeout(() => (element.textContent = label), 1500);
}
