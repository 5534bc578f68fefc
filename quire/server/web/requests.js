// The table of requests: running, preempted, waiting, and those that ended last. Bounded, however many there are.

import { byId, make } from "/page/dom.js";
import { hueOf } from "/page/block_map.js";
import { explain } from "/page/explain.js";
import { ENDED, REQUEST } from "/page/timeline.js";

const MOST_ROWS = 60;
const MOST_ENDED = 15;
const rows = new Map();  // by name: elements are kept, so that focus and selection stay where they are

export function drawRequests(timeline, now) {
  const live = [...timeline.requests.values()].sort((one, other) => one[REQUEST.index] - other[REQUEST.index]);
  const started = new Set(live.map((one) => base(one[REQUEST.name])));
  const waiting = timeline.queue.filter(([name]) => !started.has(name));
  const ended = timeline.endedBefore(MOST_ENDED);
  const lines = [
    ...live.map((one) => liveLine(one, now)),
    ...waiting.map(([name, created, prompt]) => [name, null, "waiting", prompt, "", "", "", now + timeline.wall - created]),
    ...ended.map(endedLine),
  ];
  const shown = lines.slice(0, MOST_ROWS);
  const names = new Set(shown.map((line) => line[0]));
  for (const [name, row] of rows) {
    if (!names.has(name)) {
      row.element.remove();
      rows.delete(name);
    }
  }
  const body = byId("requests");
  shown.forEach((line, place) => {
    const row = rowOf(line);
    if (body.children[place] !== row.element) body.insertBefore(row.element, body.children[place] ?? null);
  });
  const more = lines.length - shown.length;
  byId("requests-more").textContent = lines.length === 0 ? "Nobody is here." : more > 0 ? `and ${more} more` : "";
}

function liveLine(one, now) {
  const state = !one[REQUEST.running] ? "preempted, waits" : one[REQUEST.output] > 0 ? "answering" : "reading its prompt";
  const seconds = one[REQUEST.arrival] === null ? null : now - one[REQUEST.arrival];
  const prompt = one[REQUEST.prompt] ?? "?";
  const read = one[REQUEST.prompt] !== null && one[REQUEST.computed] < one[REQUEST.prompt] ? `${one[REQUEST.computed]} / ${prompt}` : prompt;
  return [one[REQUEST.name], one[REQUEST.index], state, read, one[REQUEST.cached], one[REQUEST.output], one[REQUEST.blocks], seconds];
}

function endedLine(one) {
  const seconds = one[ENDED.time] - one[ENDED.arrival];
  return [one[ENDED.name], one[ENDED.index], `ended: ${one[ENDED.reason]}`, one[ENDED.prompt], one[ENDED.cached], one[ENDED.output], "", seconds];
}

function rowOf([name, index, ...cells]) {
  let row = rows.get(name);
  if (row === undefined) {
    const button = make("button", { type: "button", className: "plain", title: "Explain it", onclick: () => explain(name) }, name);
    const swatch = make("span", { className: "swatch" });
    const element = make("tr", {}, make("td", {}, swatch, button), ...cells.map((_, at) => make("td", { className: at ? "number" : "" })));
    row = { element, swatch };
    rows.set(name, row);
  }
  row.swatch.style.background = index === null ? "transparent" : `hsl(${hueOf(index)} 60% 50%)`;
  row.element.className = String(cells[0]).startsWith("ended") ? "ended" : "";
  cells.forEach((value, at) => {
    const text = at === 5 ? (value === null ? "" : Math.max(0, value).toFixed(1)) : String(value);
    const cell = row.element.children[at + 1];
    if (cell.textContent !== text) cell.textContent = text;
  });
  return row;
}

const base = (name) => name.replace(/(\.\d+)?(\/\d+)?$/, "");
