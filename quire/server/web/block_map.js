// The block pool as a map: a square for each block (or for a few, where there are thousands), in the colour of whoever computed what it holds.

import { byId, colours, legend, plural } from "/page/dom.js";
import { CACHED, FREE, SHARED, UNSEEN, USED, ownerOf, stateOf } from "/page/timeline.js";

const HIGHEST = 280;
const SMALLEST = 7;  // pixels of a square's side: smaller ones can't be told apart, nor hit
const MOST_PARTS = 4;  // blocks that one square shows side by side; with more, it shows what most of them are
const WORDS = ["free", "in use by", "shared; computed by", "cached; computed by", "not named by any step that is remembered"];

export const hueOf = (owner) => (owner * 137.508) % 360;

export class BlockMap {
  constructor(canvas, onPick) {
    this.canvas = canvas;
    this.drawn = null;  // codes as they are on the canvas
    this.key = "";
    legend(byId("blocks-legend"), [["used", "in use"], ["shared", "shared"], ["cached", "cached"], ["free", "free"], ["unseen", "not seen yet"]]);
    canvas.addEventListener("click", (event) => {
      const block = this.blockAt(event);
      if (block !== null) onPick(block);
    });
    canvas.addEventListener("pointermove", (event) => {
      const block = this.blockAt(event);
      canvas.title = block === null ? "" : `Block ${block}: ${WORDS[stateOf(this.drawn[block])].replace(/ ?(by|; computed by)$/, "")}`;
    });
    this.dark = matchMedia("(prefers-color-scheme: dark)");
  }

  blockAt(event) {
    const x = Math.floor(event.offsetX / this.size);
    const part = Math.floor(((event.offsetX % this.size) / this.size) * this.perSquare);
    const block = 1 + (Math.floor(event.offsetY / this.size) * this.across + x) * this.perSquare + part;
    return x < this.across && this.drawn !== null && block < this.drawn.length ? block : null;
  }

  draw(codes) {
    const count = codes.length - 1;
    const width = this.canvas.clientWidth;
    if (count < 1 || width < 1) return;
    const key = `${count} ${width} ${devicePixelRatio} ${this.dark.matches}`;
    if (key !== this.key || this.drawn === null) {
      this.key = key;
      const room = Math.floor(width / SMALLEST) * Math.floor(HIGHEST / SMALLEST);
      this.perSquare = Math.max(1, Math.ceil(count / room));
      const squares = Math.ceil(count / this.perSquare);
      this.size = Math.max(SMALLEST, Math.min(26, Math.floor(Math.sqrt((width * HIGHEST) / squares))));
      this.across = Math.max(1, Math.floor(width / this.size));
      const height = Math.ceil(squares / this.across) * this.size;
      byId("blocks-scale").textContent = this.perSquare === 1 ? "" : `A square is ${this.perSquare} blocks.`;
      this.canvas.width = width * devicePixelRatio;
      this.canvas.height = height * devicePixelRatio;
      this.canvas.style.height = `${height}px`;
      this.drawn = new Float64Array(codes.length).fill(-1);
      const found = colours(["--free", "--unseen"]);
      this.plain = { [FREE]: found["--free"], [UNSEEN]: found["--unseen"] };
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    for (let first = 1; first <= count; first += this.perSquare) {
      const end = Math.min(first + this.perSquare, count + 1);
      for (let block = first; block < end; block++) {
        if (this.drawn[block] === codes[block]) continue;
        this.drawSquare(context, (first - 1) / this.perSquare, codes.subarray(first, end));
        break;
      }
    }
    this.drawn.set(codes);
    this.describe(codes);
  }

  drawSquare(context, place, codes) {
    const gap = this.size > 5 ? 1 : 0;
    const x = (place % this.across) * this.size;
    const y = Math.floor(place / this.across) * this.size;
    const side = this.size - gap;
    context.clearRect(x, y, this.size, this.size);
    const shown = codes.length <= MOST_PARTS ? codes : [commonest(codes)];
    const width = side / shown.length;
    shown.forEach((code, part) => {
      const state = stateOf(code);
      context.fillStyle = this.colour(state, ownerOf(code));
      context.fillRect(x + part * width, y, width, side);
      if (state !== SHARED) return;
      context.fillStyle = "#fff";
      const dot = Math.max(2, Math.round(Math.min(side, width) / 3));
      context.fillRect(x + part * width + (width - dot) / 2, y + (side - dot) / 2, dot, dot);
    });
  }

  colour(state, owner) {
    if (state === FREE || state === UNSEEN) return this.plain[state];
    const hue = hueOf(owner);
    if (state === CACHED) return this.dark.matches ? `hsl(${hue} 30% 30%)` : `hsl(${hue} 45% 84%)`;
    return `hsl(${hue} 60% 50%)`;
  }

  describe(codes) {
    const counts = countStates(codes);
    const words = `${plural(counts[USED], "block")} in use, ${counts[SHARED]} shared, ${counts[CACHED]} cached, ${counts[FREE]} free`;
    this.canvas.setAttribute("aria-label", `Block pool: ${words}${counts[UNSEEN] ? `, ${counts[UNSEEN]} not seen yet` : ""}`);
  }
}

// The code of the state that most blocks are in; of equally many, the busier one.
function commonest(codes) {
  const counts = countStates([UNSEEN, ...codes]);
  const state = [USED, SHARED, CACHED, FREE, UNSEEN].reduce((best, one) => (counts[one] > counts[best] ? one : best));
  return codes.find((code) => stateOf(code) === state);
}

export function countStates(codes) {
  const counts = [0, 0, 0, 0, 0];
  for (let block = 1; block < codes.length; block++) counts[stateOf(codes[block])]++;
  return counts;
}

export function describeBlock(block, code, names) {
  const state = stateOf(code);
  const owner = ownerOf(code);
  const who = state === FREE || state === UNSEEN ? "" : ` ${names.get(owner) ?? "someone before the log begins"}`;
  return `Block ${block}: ${WORDS[state]}${who}`;
}
