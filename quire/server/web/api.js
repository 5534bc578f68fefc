// Talking to the server this page came from. The cookie goes along by itself.

import { reportDown, reportSignedOut, reportUp } from "/page/connection.js";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function check(response) {
  if (response.ok) {
    reportUp();
    return response;
  }
  if (response.status === 401) reportSignedOut();
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not from our server: a proxy, perhaps
  }
  throw new ApiError(response.status, message);
}

async function send(path, options) {
  try {
    return await fetch(path, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    reportDown();
    throw new ApiError(0, "the server can't be reached");
  }
}

export async function getJson(path) {
  return (await check(await send(path, {}))).json();
}

export async function post(path) {
  return check(await send(path, { method: "POST" }));
}

const LONGEST_TURN = 10;  // milliseconds of events that are taken before the page may draw

// Calls `onEvent` with the data of each server-sent event; resolves when the stream is over.
export async function streamJson(path, body, signal, onEvent) {
  const headers = { "content-type": "application/json" };
  const response = await check(await send(path, { method: "POST", headers, body: JSON.stringify(body), signal }));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let isWhole = false;
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      let begun = performance.now();
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
        if (data === "[DONE]") isWhole = true;
        else if (data) {
          const parsed = JSON.parse(data);
          if (parsed.error) throw new ApiError(500, parsed.error.message);
          onEvent(parsed);
        }
        if (performance.now() - begun > LONGEST_TURN) {
          await new Promise((resume) => requestAnimationFrame(() => setTimeout(resume)));
          begun = performance.now();
        }
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    reportDown();
    throw new ApiError(0, "the connection broke before the answer was complete");
  }
  if (!isWhole) {
    reportDown();
    throw new ApiError(0, "the connection ended before the answer was complete");
  }
}
