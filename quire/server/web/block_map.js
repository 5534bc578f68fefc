// The block pool as a map: a square for each block, in the colour of whoever computed what it holds.

import { byId, colours, legend, plural } from "/page/dom.js";
import { CACHED, FREE, SHARED, UNSEEN, USED, ownerOf, stateOf } from "/page/timeline.js";

const HIGHEST = 280;
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
    this.dark = matchMedia("(prefers-color-scheme: dark)");
  }

  blockAt(event) {
    const x = Math.floor(event.offsetX / this.size);
    const block = 1 + Math.floor(event.offsetY / this.size) * this.across + x;
    return x < this.across && this.drawn !== null && block < this.drawn.length ? block : null;
  }

  draw(codes) {
    const count = codes.length - 1;
    const width = this.canvas.clientWidth;
    if (count < 1 || width < 1) return;
    const size = Math.max(2, Math.min(26, Math.floor(Math.sqrt((width * HIGHEST) / count))));
    const key = `${count} ${width} ${devicePixelRatio} ${this.dark.matches}`;
    if (key !== this.key || this.drawn === null) {
      this.key = key;
      this.size = size;
      this.across = Math.max(1, Math.floor(width / size));
      const height = Math.ceil(count / this.across) * size;
      this.canvas.width = width * devicePixelRatio;
      this.canvas.height = height * devicePixelRatio;
      this.canvas.style.height = `${height}px`;
      this.drawn = new Float64Array(codes.length).fill(-1);
      const found = colours(["--free", "--unseen"]);
      this.plain = { [FREE]: found["--free"], [UNSEEN]: found["--unseen"] };
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    for (let block = 1; block <= count; block++) if (this.drawn[block] !== codes[block]) this.drawBlock(context, block, codes[block]);
    this.drawn.set(codes);
    this.describe(codes);
  }

  drawBlock(context, block, code) {
    const gap = this.size > 5 ? 1 : 0;
    const x = ((block - 1) % this.across) * this.size;
    const y = Math.floor((block - 1) / this.across) * this.size;
    const side = this.size - gap;
    const state = stateOf(code);
    context.clearRect(x, y, this.size, this.size);
    context.fillStyle = this.colour(state, ownerOf(code));
    context.fillRect(x, y, side, side);
    if (state === SHARED && side > 3) {
      context.fillStyle = "#fff";
      const dot = Math.max(2, Math.round(side / 3));
      context.fillRect(x + (side - dot) / 2, y + (side - dot) / 2, dot, dot);
    }
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
