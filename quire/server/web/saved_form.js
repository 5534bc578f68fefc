// What is kept of a conversation, and how a file of them is read: every field by name and type, nothing else.

import { newId } from "/page/dom.js";

export const VERSION = 1;
const MOST_TURNS = 10_000;
const text = (value) => (typeof value === "string" ? value : undefined);
const number = (value) => (Number.isFinite(value) ? value : undefined);
const numbers = (value) => (Array.isArray(value) && value.every(Number.isFinite) ? value : undefined);
const call = (one) => ({ id: text(one?.id) ?? "", name: text(one?.name) ?? "", arguments: text(one?.arguments) ?? "" });
const calls = (value) => (Array.isArray(value) ? value.slice(0, 100).map(call) : undefined);
const FIELDS = {
  role: (value) => (["user", "assistant", "tool"].includes(value) ? value : undefined),
  content: text, reasoning: text, callId: text, calls, tokenIds: numbers, logprobs: numbers, seed: number, id: text, fingerprint: text,
  state: (value) => (["done", "stopped", "failed"].includes(value) ? value : undefined),
  finish: text, error: text, digest: text, promptTokens: number, cachedTokens: number, firstSeconds: number, seconds: number, typed: settings,
};

// Settings as typed: texts, and whether logprobs are wanted.
function settings(value) {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return undefined;
  return Object.fromEntries(Object.entries(value).filter(([name, one]) => /^[a-z_]{1,40}$/.test(name) && (typeof one === "string" || one === true)));
}

export function savedTurn(turn) {
  const kept = {};
  for (const [name, read] of Object.entries(FIELDS)) {
    const value = read(turn[name]);
    if (value !== undefined) kept[name] = value;
  }
  if (turn.state === "streaming") kept.state = "stopped";  // as it is if the page is left now
  return kept;
}

export function savedConversation({ id, title, isNamed, created, updated, turns }) {
  return { id, title, isNamed, created, updated, turns: turns.map(savedTurn) };
}

export const toFile = (conversations) => JSON.stringify({ quire_conversations: VERSION, conversations }, null, 1);

// The conversations of a file; raises an error that says what is wrong with it.
export function fromFile(written) {
  let found;
  try {
    found = JSON.parse(written);
  } catch (error) {
    throw new Error(`not JSON: ${error.message}`);
  }
  if (found?.quire_conversations !== VERSION || !Array.isArray(found.conversations)) {
    throw new Error(`not a file of conversations: "quire_conversations" must be ${VERSION}, beside a list "conversations"`);
  }
  return found.conversations.map((one, place) => {
    const isRight = text(one?.title) !== undefined && Array.isArray(one.turns) && one.turns.length <= MOST_TURNS;
    const turns = isRight ? one.turns.map((turn) => savedTurn(turn ?? {})) : [];
    if (!isRight || !turns.every((turn) => turn.role !== undefined && turn.content !== undefined)) {
      throw new Error(`conversation ${place + 1} has no title, or turns without a role and a content`);
    }
    const now = Date.now();
    return { id: text(one.id) ?? newId(), title: one.title.slice(0, 200), isNamed: one.isNamed === true, created: number(one.created) ?? now, updated: number(one.updated) ?? now, turns };
  });
}
