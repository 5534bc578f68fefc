// Whether the server is there and knows us. While it is not there, it is asked again and again.

import { byId } from "/page/dom.js";

const LONGEST_PAUSE = 5000;
const waiting = new Set();
let state = "up";
let pause = 500;

export const isUp = () => state === "up";

// Calls back when the server is there again.
export function whenUp(callback) {
  if (state === "up") callback();
  else waiting.add(callback);
}

export function reportUp() {
  if (state === "up") return;
  state = "up";
  pause = 500;
  byId("connection").textContent = "Connected again";
  byId("signed-out").close();
  const callbacks = [...waiting];
  waiting.clear();
  for (const callback of callbacks) callback();
}

export function reportDown() {
  if (state !== "up") return;
  state = "down";
  byId("connection").textContent = "The server can't be reached; trying again";
  setTimeout(askAgain, pause);
}

export function reportSignedOut() {
  if (state === "out") return;
  state = "out";
  byId("connection").textContent = "Signed out";
  byId("signed-out").showModal();
}

async function askAgain() {
  if (state !== "down") return;
  try {
    const response = await fetch("/page/about", { credentials: "same-origin" });
    if (response.status === 401) return reportSignedOut();
    if (response.ok) return reportUp();
  } catch {
    // still away
  }
  pause = Math.min(LONGEST_PAUSE, 1.5 * pause);
  setTimeout(askAgain, pause);
}
