// The chat: turns as data, asked for, stopped, verified and kept. How they look is in turn_view.js.

import { hide, isShown, watchTokens } from "/page/alternatives.js";
import { AnswerView } from "/page/answer.js";
import { streamJson } from "/page/api.js";
import { isUp, whenUp } from "/page/connection.js";
import { load, refresh, save, startConversations } from "/page/conversations.js";
import { byId, newId, plural } from "/page/dom.js";
import { digest, linkTo, readLink } from "/page/link.js";
import { SettingsError, buildSettings, drawSeed, requestFields, seedOf, showSettingsError, typeSettings, typedSettings } from "/page/settings.js";
import { renderTurn } from "/page/turn_view.js";

const SAVE_PAUSE = 3000;  // milliseconds between two savings of an answer that still grows
const LONGEST_TITLE = 60;

// A turn: {role: "user" | "tool" | "assistant", content, …}; what an answer has besides is made in `ask`.
let conversation = newConversation([]);
let model = "";
let running = null;
let offered = null;  // a link whose answer nobody has asked for yet

function newConversation(turns) {
  return { id: newId(), title: "", isNamed: false, created: Date.now(), updated: Date.now(), turns };
}

export async function startTalk(about) {
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
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || document.querySelector("dialog[open]") !== null) return;
    if (isShown()) hide();
    else stop();
  });
  watchTokens(byId("conversation"));
  byId("stop").addEventListener("click", stop);
  byId("new-chat").addEventListener("click", () => {
    openConversation(null);
    byId("question").focus();
  });
  byId("link-ask").addEventListener("click", () => {
    if (!running && offered !== null) ask({ expected: offered });
  });
  addEventListener("renamed", ({ detail }) => {
    if (detail.id === conversation.id) Object.assign(conversation, { title: detail.title, isNamed: true });
  });
  addEventListener("hashchange", openLink);
  startConversations({ open: openConversation, currentId: () => conversation.id });
  const last = sessionStorage.getItem("quire-conversation");
  if (!openLink() && last !== null) openConversation(await load(last));
}

function openConversation(found) {
  stop();
  conversation = found ?? newConversation([]);
  offer(null);
  if (found !== null) sessionStorage.setItem("quire-conversation", found.id);
  else sessionStorage.removeItem("quire-conversation");
  byId("conversation").replaceChildren();
  byId("talk-status").textContent = "";
  byId("sidebar").classList.remove("shown");
  render();
  refresh();
}

// Keeps the conversation as it is now; its title is the first question unless somebody gave it another.
function keep() {
  const { turns } = conversation;
  if (!turns.length) return;
  if (!conversation.isNamed) conversation.title = turns[0].content.trim().split("\n")[0].slice(0, LONGEST_TITLE) || "Conversation";
  conversation.updated = Date.now();
  sessionStorage.setItem("quire-conversation", conversation.id);
  save(conversation);
}

function openLink() {
  const link = readLink(location.hash);
  if (link === null) return false;
  stop();
  typeSettings({ ...link.settings, seed: String(link.seed) });
  conversation = newConversation(link.turns);
  byId("conversation").replaceChildren();
  render();
  offer(link);
  return true;
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
  conversation.turns.push({ role: "user", content: text });
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

function requestOf(before, typed, seed) {
  const options = { stream: true, stream_options: { include_usage: true }, return_token_ids: true };
  return { model, messages: messagesOf(before, typed.system), ...options, ...requestFields(typed), seed };
}

// Asks for an answer to the turns there are. `expected` is what a link says of the answer, `seed` one that was chosen.
async function ask({ expected = null, seed = null }) {
  if (running) return;
  if (!areSettingsRight()) {
    render();
    return;
  }
  offer(null);
  const asked = conversation;
  const typed = typedSettings();
  const before = asked.turns.slice();
  const turn = { role: "assistant", content: "", reasoning: "", calls: [], tokenIds: [], logprobs: [], seed: seed ?? seedOf(typed), typed, expected, state: "streaming", view: new AnswerView() };
  const body = requestOf(before, typed, turn.seed);
  asked.turns.push(turn);
  render();
  keep();
  const own = (running = new AbortController());
  setBusy(true);
  const started = performance.now();
  let kept = started;
  try {
    await streamJson("/v1/chat/completions", body, own.signal, (event) => {
      take(turn, event, started);
      if (performance.now() - kept < SAVE_PAUSE || asked !== conversation) return;
      kept = performance.now();
      keep();
    });
    turn.state = "done";
  } catch (error) {
    turn.state = error.name === "AbortError" ? "stopped" : "failed";
    turn.error = error.message;
  }
  turn.view.end();
  await new Promise((resume) => setTimeout(resume));  // the answer is seen before all the rest is done
  if (turn.state === "done") turn.digest = digest(turn.tokenIds, turn.logprobs);
  if (running === own || running === null) {  // not if somebody has asked anew meanwhile
    running = null;
    setBusy(false);
    if (asked === conversation) say(turn);
  }
  if (asked === conversation) {
    render();
    setTimeout(keep);
  } else save({ ...asked, updated: Date.now() });
}

function linkOf(turn, before) {
  const kept = before.map(({ role, content, calls, callId }) => ({ role, content, calls, callId }));
  const { seed: _, ...settings } = turn.typed;
  return { settings, seed: turn.seed, turns: kept, digest: turn.digest, tokens: turn.tokenIds.length, fingerprint: turn.fingerprint };
}

function take(turn, event, started) {
  turn.id = event.id;
  turn.fingerprint = event.system_fingerprint;
  if (event.usage) {
    turn.promptTokens = event.usage.prompt_tokens;
    turn.cachedTokens = event.usage.prompt_tokens_details?.cached_tokens ?? 0;
  }
  const choice = event.choices[0];
  if (choice === undefined) return;
  const { delta, logprobs } = choice;
  if (choice.token_ids?.length) {
    turn.firstSeconds ??= (performance.now() - started) / 1000;
    turn.seconds = (performance.now() - started) / 1000;
    turn.tokenIds.push(...choice.token_ids);
  }
  if (choice.finish_reason) turn.finish = choice.finish_reason;
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

function setBusy(busy) {
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
  byId("conversation").setAttribute("aria-busy", String(busy));
  byId("talk-status").textContent = busy ? "Answering; Esc stops" : "";
  // Whoever pressed a button that is gone now finds the next one that makes sense.
  const lost = [document.body, byId("send"), byId("stop")].includes(document.activeElement);
  if (busy && lost) byId("stop").focus();
  else if (!busy && lost) byId("question").focus();
}

function say(turn) {
  const length = plural(turn.tokenIds.length, "token");
  const ends = { stop: "", length: ", stopped at the token limit", tool_calls: ", and calls tools" }[turn.finish] ?? "";
  const asked = turn.promptTokens === undefined ? "" : `; ${plural(turn.promptTokens, "token")} of prompt, ${turn.cachedTokens} of them cached`;
  const texts = { done: `Answered: ${length}${ends}${asked}`, stopped: `Stopped after ${length}`, failed: `Failed: ${turn.error}` };
  byId("talk-status").textContent = texts[turn.state];
}

// Only what changed is made anew: the focus stays where it is, and a screen reader hears what is new.
function render() {
  const list = byId("conversation");
  const { turns } = conversation;
  byId("empty").hidden = turns.length > 0;
  turns.forEach((turn, index) => {
    const version = `${turn.state} ${turn.finish === "tool_calls" && index === turns.length - 1}`;
    if (turn.version !== version || turn.item === undefined) {
      const made = renderTurn(turn, actionsOf(index));
      if (made !== turn.item) turn.item?.replaceWith(made);
      turn.item = made;
      turn.version = version;
    }
    if (list.children[index] !== turn.item) list.insertBefore(turn.item, list.children[index] ?? null);
  });
  while (list.children.length > turns.length) list.lastChild.remove();
  list.scrollTop = list.scrollHeight;
}

// What can be done with a turn; turn_view.js makes buttons of it.
function actionsOf(index) {
  const { turns } = conversation;
  const turn = turns[index];
  return {
    isLast: index === turns.length - 1,
    link: () => (turn.state === "done" && turn.typed && turn.digest ? linkTo(linkOf(turn, turns.slice(0, index))) : null),
    regenerate: () => askAgain(index),
    verify: (place) => verify(index, place),
    branch: () => branch(index),
    useSeed: () => typeSettings({ ...typedSettings(), seed: String(turn.seed) }),
    ask: (text) => {
      if (running) return;
      conversation.turns = [...turns.slice(0, index), { role: "user", content: text }];
      ask({});
    },
    cancel: () => {
      turn.version = null;
      render();
    },
    canEdit: () => running === null,
    answerCalls: (results) => {
      if (running) return;
      turns.push(...results.map((one) => ({ role: "tool", ...one })));
      ask({});
    },
  };
}

// A new conversation that begins as this one did, up to a turn.
function branch(index) {
  keep();
  const turns = conversation.turns.slice(0, index + 1).map(({ view: _view, item: _item, version: _version, ...turn }) => ({ ...turn }));
  const title = `${conversation.title} (branch)`;
  openConversation({ ...newConversation(turns), title, isNamed: true });
  keep();
  byId("question").focus();
}

// Another answer has another seed; a seed that was typed since counts.
function askAgain(index) {
  if (running) return;
  const { state, expected, seed: old } = conversation.turns[index];
  const again = state === "failed" ? { expected, seed: old } : { expected: null, seed: newSeed(old) };
  conversation.turns = conversation.turns.slice(0, index);
  if (isUp()) ask(again);
  else {
    byId("talk-status").textContent = "Waiting for the server";
    whenUp(() => ask(again));
  }
}

function newSeed(old) {
  const { seed } = typedSettings();
  return seed === undefined || Number(seed) === old ? drawSeed() : null;
}

// Computes an answer once more, now, among whatever else the server does, and compares token by token.
async function verify(index, place) {
  if (running) return;
  const turn = conversation.turns[index];
  const own = (running = new AbortController());
  setBusy(true);
  place.className = "verdict quiet";
  const total = turn.tokenIds.length;
  const tokenIds = [], logprobs = [];
  let fingerprint = "";
  const started = performance.now();
  try {
    await streamJson("/v1/chat/completions", requestOf(conversation.turns.slice(0, index), turn.typed, turn.seed), own.signal, (event) => {
      fingerprint = event.system_fingerprint;
      const choice = event.choices[0];
      if (choice?.token_ids) tokenIds.push(...choice.token_ids);
      if (choice?.logprobs?.content) logprobs.push(...choice.logprobs.content.map((entry) => entry.logprob));
      place.textContent = `Recomputing: ${tokenIds.length} of ${plural(total, "token")}`;
    });
    const differs = [...Array(Math.max(total, tokenIds.length)).keys()].find((at) => tokenIds[at] !== turn.tokenIds[at] || (turn.logprobs?.length && logprobs[at] !== turn.logprobs[at]));
    const seconds = ((performance.now() - started) / 1000).toFixed(1);
    const what = turn.logprobs?.length ? "and logprobs " : "";
    const why = fingerprint !== turn.fingerprint ? "It was made by another model or another kind of device." : "That should not be: the model and the parameters are the same.";
    place.className = `verdict ${differs === undefined ? "good" : "bad"}`;
    place.textContent = differs === undefined
      ? `✓ Recomputed in ${seconds} s: all ${plural(total, "token")} ${what}are the same, bit for bit.`
      : `✗ Recomputed, and token ${differs + 1} is another one. ${why}`;
  } catch (error) {
    place.textContent = error.name === "AbortError" ? "Not verified: stopped." : `Not verified: ${error.message}`;
  }
  if (running === own || running === null) {
    running = null;
    setBusy(false);
  }
}
