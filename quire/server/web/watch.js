// The watching view: frames come in, the page shows the moment that was chosen, the last one unless somebody scrubs.

import { getJson } from "/page/api.js";
import { reportDown, whenUp } from "/page/connection.js";
import { BlockMap, countStates, describeBlock } from "/page/block_map.js";
import { byId, duration, make } from "/page/dom.js";
import { explain } from "/page/explain.js";
import { drawRequests } from "/page/requests.js";
import { StepChart, describeStep } from "/page/step_chart.js";
import { CACHED, FREE, STEP, Timeline, UNSEEN, ownerOf } from "/page/timeline.js";

const WINDOW_SECONDS = 5;
const LATE_SECONDS = 3, IDLE_SECONDS = 3;
const TABLE_PAUSE = 400;  // milliseconds between two drawings of the table, and of a page on which nothing happens
const FIRST_RETRY = 200, LONGEST_RETRY = 10_000;  // milliseconds
const TILES = ["Output", "Prompts", "Running", "Waiting", "Cache hits", "Blocks in use", "Cached", "Step", "Memory"];

export function startWatch() {
  const timeline = new Timeline();
  let source = null;
  let isLive = true;
  let isFresh = false;
  let isOpen = false;
  let heard = 0;  // when the last frame came, by the page's clock
  let lead = Infinity;  // seconds that this clock is ahead of the engine's, and the quickest frame took
  let scheduled = false;
  let retryPause = FIRST_RETRY;
  let tableDrawn = 0;
  let chosen = null;  // the column that was picked; null: the last
  const map = new BlockMap(byId("blocks"), pickBlock);
  const chart = new StepChart(byId("steps"), (at) => {
    chosen = at;
    draw();
  });
  byId("tiles").replaceChildren(...TILES.map((name) => make("div", {}, make("dt", {}, name), make("dd", {}, "–"))));

  byId("live").addEventListener("click", () => goLive());
  byId("time").addEventListener("input", () => {
    isLive = false;
    timeline.seek(Number(byId("time").value));
    chosen = null;
    if (timeline.position === timeline.last) goLive();
    else draw(true);
  });
  byId("step").addEventListener("input", () => {
    chosen = Number(byId("step").value);
    draw();
  });
  byId("block").addEventListener("input", drawBlock);
  byId("engine").addEventListener("change", () => {
    stopListening();
    goLive();
    open();
  });
  addEventListener("resize", () => draw());
  setInterval(() => {
    if (isOpen && isLive && performance.now() - heard > TABLE_PAUSE) draw(true);
  }, 1000);

  function goLive() {
    isLive = true;
    chosen = null;
    timeline.seek(timeline.last);
    draw(true);
  }

  function open() {
    isOpen = true;
    if (source !== null) return;
    source = new EventSource(`/page/watch?engine=${byId("engine").value || 0}`);
    isFresh = true;
    source.addEventListener("frame", (event) => {
      if (isFresh) {
        timeline.clear();
        lead = Infinity;
      }
      isFresh = false;
      retryPause = FIRST_RETRY;
      timeline.push(JSON.parse(event.data));
      if (!isLive && timeline.position < 0) timeline.seek(0);
      heard = performance.now();
      lead = Math.min(lead, heard / 1000 - timeline.frames[timeline.last].time);
      if (!scheduled) {
        scheduled = true;
        requestAnimationFrame(() => {
          scheduled = false;
          draw();
        });
      }
    });
    source.addEventListener("error", () => {
      // Ours to decide when to try again: the key may be the reason, too.
      stopListening();
      reportDown();
      retryLater();
    });
  }

  async function openAgain() {
    try {
      setEngines((await getJson("/page/about")).engines);
      if (isOpen) open();
    } catch {
      retryLater();
    }
  }

  // Less and less often: it may be there and still say no, to one watcher too many.
  function retryLater() {
    setTimeout(() => whenUp(openAgain), retryPause);
    retryPause = Math.min(LONGEST_RETRY, 2 * retryPause);
  }

  // A server may have several, and they may come and go.
  function setEngines(count) {
    const choice = byId("engine");
    const chosen = Number(choice.value) < count ? choice.value : "0";
    choice.replaceChildren(...Array.from({ length: count }, (_, number) => make("option", { value: String(number) }, String(number + 1))));
    choice.value = chosen || "0";
    byId("engines").hidden = count < 2;
  }

  function stopListening() {
    source?.close();
    source = null;
    draw();  // it says so
  }

  function close() {
    isOpen = false;
    stopListening();
  }

  // By the engine's clock. While nothing happens no frame comes, and time goes on all the same.
  const now = () => (timeline.frame?.time ?? 0) + (isLive && heard ? (performance.now() - heard) / 1000 : 0);

  function draw(force = false) {
    if (!isOpen || timeline.frame === null) return;
    const slider = byId("time");
    slider.max = String(timeline.last);
    slider.value = String(timeline.position);
    const at = new Date(1000 * (timeline.frame.time + timeline.wall));
    const state = stateOfView();
    byId("live").setAttribute("aria-pressed", String(isLive));
    byId("live").dataset.state = state;
    const last = timeline.frames[timeline.last].time;
    const words = {
      back: () => `${(last - timeline.frame.time).toFixed(1)} s back`, lost: () => "not connected, as of", late: () => `${lateness().toFixed(0)} s behind, catching up`,
      past: () => "catching up with the log", idle: () => "live, idle since", live: () => "live",
    };
    const moment = `${words[state]()}${["lost", "idle"].includes(state) ? " " : ", "}${at.toLocaleTimeString()}`;
    byId("moment").textContent = moment;
    slider.setAttribute("aria-valuetext", moment);
    drawTiles();
    map.draw(timeline.blocks);
    drawBlock();
    drawSteps();
    if (force || performance.now() - tableDrawn > TABLE_PAUSE) {
      tableDrawn = performance.now();
      drawRequests(timeline, now());
    }
  }

  // How late the last frame was when it came: the quickest one is taken to have come at once.
  const lateness = () => heard / 1000 - timeline.frames[timeline.last].time - lead;

  // What is shown: it is live only if the last that happened is what one sees.
  function stateOfView() {
    if (!isLive) return "back";
    if (source === null) return "lost";
    if (timeline.frame.past) return "past";
    if (lateness() > LATE_SECONDS) return "late";
    return performance.now() - heard > 1000 * IDLE_SECONDS && timeline.requests.size === 0 ? "idle" : "live";
  }

  function drawSteps() {
    const steps = timeline.stepsBefore(chart.room);
    const place = Math.min(chosen ?? steps.length - 1, steps.length - 1);
    chart.draw(steps, chosen === null ? -1 : place);
    const slider = byId("step");
    slider.max = String(Math.max(0, steps.length - 1));
    slider.value = String(Math.max(0, place));
    const text = place < 0 ? "No step yet." : describeStep(steps[place]);
    if (byId("step-text").textContent !== text) byId("step-text").textContent = text;
    slider.setAttribute("aria-valuetext", text);
  }

  function pickBlock(block) {
    byId("block").value = String(block);
    drawBlock();
    const name = timeline.names.get(ownerOf(timeline.blocks[block]));
    if (name !== undefined) explain(name);
  }

  function drawBlock() {
    const input = byId("block");
    input.max = String(timeline.blocks.length - 1);
    const block = Number(input.value);
    const isThere = Number.isInteger(block) && block >= 1 && block < timeline.blocks.length;
    byId("block-text").textContent = isThere ? describeBlock(block, timeline.blocks[block], timeline.names) : "Choose one, here or in the map.";
  }

  function drawTiles() {
    const steps = timeline.stepsWithin(WINDOW_SECONDS, now());
    const first = timeline.frames[0].time;
    const span = Math.max(0.2, Math.min(WINDOW_SECONDS, now() - first));
    const sum = (field) => steps.reduce((total, step) => total + step[field], 0);
    const last = timeline.stepsBefore(1)[0];
    const counts = countStates(timeline.blocks);
    const total = timeline.blocks.length - 1;
    const used = last ? total - last[STEP.free] : total - counts[FREE] - counts[CACHED] - counts[UNSEEN];
    const isIdle = timeline.requests.size === 0;
    const memory = timeline.memory;
    const bytes = memory.gpu_memory_used ?? memory.engine_resident_memory;
    const inBytes = (blocks) => (timeline.blockBytes ? `, ${((blocks * timeline.blockBytes) / 2 ** 30).toFixed(2)} GiB` : "");
    const values = [
      [rate(sum(STEP.sampled) / span), "tok/s"],
      [rate(sum(STEP.prompt) / span), "tok/s"],
      [String(isIdle || !last ? timeline.requests.size : last[STEP.running]), ""],
      [String(Math.max(timeline.queue.length, isIdle || !last ? 0 : last[STEP.waiting])), ""],
      sum(STEP.admitted) ? [`${Math.round((100 * sum(STEP.cached)) / sum(STEP.admitted))} %`, ""] : ["–", ""],
      [(isIdle ? 0 : used).toLocaleString("en"), `of ${total.toLocaleString("en")}${inBytes(isIdle ? 0 : used)}`],
      [counts[CACHED].toLocaleString("en"), "blocks"],
      steps.length ? duration(sum(STEP.seconds) / sum(STEP.steps)).split(" ") : ["–", ""],
      bytes ? [(bytes / 2 ** 30).toFixed(2), `GiB${memory.gpu_memory_total ? ` of ${(memory.gpu_memory_total / 2 ** 30).toFixed(0)}` : ""}`] : ["–", ""],
    ];
    values.forEach(([value, unit], at) => {
      const cell = byId("tiles").children[at].lastChild;
      const text = `${value} ${unit}`;
      if (cell.dataset.text === text) return;
      cell.dataset.text = text;
      cell.replaceChildren(value, " ", make("small", {}, unit));
    });
  }

  return { open, close, setEngines };
}

const rate = (value) => (value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(1));
