// The explanation of one request, in a dialog: where its time went, as a bar and in words.

import { getJson } from "/page/api.js";
import { byId, duration, legend, make } from "/page/dom.js";

let isReady = false;

// `name` is a response's id, or the name of one of its answers: id/0, id.1/0.
export async function explain(name) {
  const dialog = byId("explain");
  if (!isReady) {
    byId("explain-close").addEventListener("click", () => dialog.close());
    isReady = true;
  }
  const body = byId("explain-body");
  body.replaceChildren(make("p", { className: "quiet" }, "Looking it up"));
  if (!dialog.open) dialog.showModal();
  try {
    const found = await getJson(`/v1/requests/${encodeURIComponent(name.replace(/(\.\d+)?(\/\d+)?$/, ""))}/explain`);
    body.replaceChildren(...found.answers.map(bar), make("pre", {}, found.text));
  } catch (error) {
    body.replaceChildren(make("p", { className: "bad", role: "alert" }, error.message));
  }
}

function bar(answer) {
  const parts = Object.entries(answer.parts).filter(([, seconds]) => seconds > 0);
  const total = parts.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
  const spans = parts.map(([part, seconds]) => {
    const span = make("span", { className: `part-${part}`, title: `${part}: ${duration(seconds)}` });
    span.style.flexGrow = String(seconds / total);
    return span;
  });
  const words = parts.map(([part, seconds]) => `${part} ${duration(seconds)}`);
  const named = make("p", { className: "legend" });
  legend(named, parts.map(([part], place) => [`part-${part}`, words[place]]));
  return make("div", {}, make("div", { className: "parts", role: "img", "aria-label": words.join(", ") }, ...spans), named);
}
