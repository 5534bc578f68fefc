// The last ten minutes: frames as they came, and the engine's state at one of them. A frame tells differences; what it
// changed is kept beside it, so that one can go back as well as forth.

export const FREE = 0, USED = 1, SHARED = 2, CACHED = 3, UNSEEN = 4;
export const stateOf = (code) => code % 8;
export const ownerOf = (code) => Math.floor(code / 8);

// Of a step (`Column` in quire/observe/live_view.py).
export const STEP = {
  id: 0, time: 1, seconds: 2, steps: 3, prompt: 4, decodes: 5, accepted: 6, refused: 7, sampled: 8, running: 9, waiting: 10,
  free: 11, cached: 12, admitted: 13, preempted: 14, failed: 15, planned: 16, late: 17,
};
// Of a request (`LiveRequest.describe`) and of one that ended.
export const REQUEST = { index: 0, name: 1, arrival: 2, prompt: 3, cached: 4, preemptions: 5, running: 6, computed: 7, output: 8, blocks: 9 };
export const ENDED = { index: 0, name: 1, arrival: 2, time: 3, reason: 4, prompt: 5, output: 6, cached: 7, preemptions: 8 };

const KEPT_SECONDS = 600;
const KEPT_NAMES = 20000;

export class Timeline {
  constructor() {
    this.clear();
  }

  clear() {
    this.frames = [];
    this.position = -1;
    this.blocks = new Float64Array(0);  // codes: larger than 32 bits after many requests
    this.requests = new Map();  // by index
    this.names = new Map();  // of owners; never undone, a number means one name for good
    this.queue = [];
    this.memory = {};
    this.wall = 0;
    this.blockSize = 16;
    this.blockBytes = 0;
  }

  get last() {
    return this.frames.length - 1;
  }

  get frame() {
    return this.frames[this.position] ?? null;
  }

  // Adds a frame; goes to it if we were at the end.
  push({ frame, queue, past }) {
    if (frame.key?.begins) this.clear();  // of another engine, which counts its requests anew
    const wasLive = this.position === this.last;
    this.learnNames(frame);
    this.frames.push({ ...frame, queue, past, undo: null });
    if (wasLive) this.seek(this.last);
    let old = 0;
    while (old < this.last && this.frames[old].time < frame.time - KEPT_SECONDS) old++;
    if (old >= 50) {
      if (this.position < old) this.seek(old);  // whoever looked at it is taken along
      this.frames.splice(0, old);
      this.position -= old;
    }
  }

  seek(target) {
    while (this.position < target) this.apply(this.frames[++this.position]);
    while (this.position > target) this.undo(this.frames[this.position--]);
  }

  apply(frame) {
    const undo = { queue: this.queue, memory: this.memory, blocks: null, allBlocks: null, requests: new Map() };
    this.queue = frame.queue;
    if (frame.memory) this.memory = frame.memory;
    if (frame.key) this.applyKey(frame.key, undo);
    if (frame.blocks) undo.blocks = this.swapBlocks(frame.blocks);
    for (const one of frame.ended ?? []) this.setRequest(one[0], null, undo);
    for (const one of frame.requests ?? []) this.setRequest(one[0], one, undo);
    const progress = frame.progress ?? [];
    for (let at = 0; at < progress.length; at += 4) {
      const old = this.requests.get(progress[at]);
      if (old) this.setRequest(progress[at], [...old.slice(0, 7), progress[at + 1], progress[at + 2], progress[at + 3]], undo);
    }
    frame.undo = undo;
  }

  applyKey(key, undo) {
    this.wall = key.wall;
    this.blockSize = key.block_size;
    this.blockBytes = key.bytes_per_block;
    const codes = [];
    for (let at = 0; at < key.blocks.length; at += 2) for (let count = key.blocks[at + 1]; count > 0; count--) codes.push(key.blocks[at]);
    undo.allBlocks = this.blocks;
    this.blocks = Float64Array.from([UNSEEN, ...codes]);
    const known = new Set(key.requests.map((one) => one[0]));
    for (const index of this.requests.keys()) if (!known.has(index)) this.setRequest(index, null, undo);
    for (const one of key.requests) this.setRequest(one[0], one, undo);
  }

  undo(frame) {
    const undo = frame.undo;
    if (undo.blocks) this.swapBlocks(undo.blocks);
    if (undo.allBlocks) this.blocks = undo.allBlocks;
    for (const [index, request] of undo.requests) {
      if (request === null) this.requests.delete(index);
      else this.requests.set(index, request);
    }
    this.queue = undo.queue;
    this.memory = undo.memory;
    frame.undo = null;
  }

  // Writes block, code, block, code, … and returns what was there.
  swapBlocks(changes) {
    const old = [];
    for (let at = 0; at < changes.length; at += 2) {
      old.push(changes[at], this.blocks[changes[at]]);
      this.blocks[changes[at]] = changes[at + 1];
    }
    return old;
  }

  setRequest(index, request, undo) {
    if (!undo.requests.has(index)) undo.requests.set(index, this.requests.get(index) ?? null);
    if (request === null) this.requests.delete(index);
    else this.requests.set(index, request);
  }

  learnNames(frame) {
    for (const list of [frame.key?.names, frame.key?.requests, frame.requests]) {
      for (const one of list ?? []) this.names.set(one[0], one[1]);
    }
    for (const index of this.names.keys()) {
      if (this.names.size <= KEPT_NAMES) break;
      this.names.delete(index);
    }
  }

  // Steps up to the position, the last `count` of them.
  stepsBefore(count) {
    const found = [];
    for (let at = this.position; at >= 0 && found.length < count; at--) found.unshift(...this.frames[at].steps);
    return found.slice(-count);
  }

  // Steps of the last seconds before `now`.
  stepsWithin(seconds, now) {
    const found = [];
    for (let at = this.position; at >= 0 && this.frames[at].time >= now - seconds; at--) {
      for (const step of this.frames[at].steps) if (step[STEP.time] > now - seconds) found.push(step);
    }
    return found;
  }

  // Requests that ended shortly before the position, the last first.
  endedBefore(count) {
    const found = [];
    for (let at = this.position; at >= 0 && found.length < count; at--) found.push(...(this.frames[at].ended ?? []).toReversed());
    return found.slice(0, count);
  }
}
