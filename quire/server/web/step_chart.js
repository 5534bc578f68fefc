// Steps as columns: what each computed above, how long it took below.

import { byId, colours, duration, legend, plural } from "/page/dom.js";
import { STEP } from "/page/timeline.js";

const PITCH = 6;
const PARTS = [[STEP.prompt, "--prompt"], [STEP.decodes, "--decode"], [STEP.accepted, "--accepted"], [STEP.refused, "--refused"]];
const LEFT = 44;
const COLOURS = ["--prompt", "--decode", "--accepted", "--refused", "--quiet", "--bad", "--line", "--text"];

export class StepChart {
  constructor(canvas, onPick) {
    this.canvas = canvas;
    this.steps = [];
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    this.colours = null;
    this.dark.addEventListener("change", () => (this.colours = null));
    legend(byId("steps-legend"), [["prompt", "prompt tokens"], ["decode", "decodes"], ["accepted", "draft tokens accepted"], ["refused", "refused"], ["time", "time, below"]]);
    canvas.addEventListener("click", (event) => {
      const at = Math.floor((event.offsetX - LEFT) / PITCH) - this.offset;
      if (at >= 0 && at < this.steps.length) onPick(at);
    });
  }

  get room() {
    return Math.max(1, Math.floor((this.canvas.clientWidth - LEFT) / PITCH));
  }

  draw(steps, chosen) {
    this.steps = steps;
    const { canvas } = this;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    if (width < 1) return;
    this.offset = this.room - steps.length;
    canvas.width = width * devicePixelRatio;
    canvas.height = height * devicePixelRatio;
    const context = canvas.getContext("2d");
    context.scale(devicePixelRatio, devicePixelRatio);
    this.colours ??= colours(COLOURS);
    const colour = (name) => this.colours[name];
    context.font = "11px system-ui, sans-serif";
    const upper = Math.round(height * 0.62);
    const lower = height - upper - 12;
    // Square roots: a chunk of a prompt has hundreds of tokens, and decodes should still be seen.
    const most = Math.max(4, ...steps.map((step) => PARTS.reduce((sum, [part]) => sum + step[part] / step[STEP.steps], 0)));
    const slowest = Math.max(1e-3, ...steps.map((step) => step[STEP.seconds] / step[STEP.steps]));
    const high = (tokens) => (Math.sqrt(tokens) / Math.sqrt(most)) * (upper - 14);
    this.drawAxis(context, colour, [[upper - high(most), `${Math.round(most)} tok`], [upper - high(most / 4), `${Math.round(most / 4)}`],
      [upper + 14, duration(slowest)]], width);
    steps.forEach((step, at) => {
      const x = LEFT + (at + this.offset) * PITCH;
      const count = step[STEP.steps];
      let below = 0;
      for (const [part, name] of PARTS) {
        const above = below + step[part] / count;
        context.fillStyle = colour(name);
        context.fillRect(x, upper - high(above), PITCH - 1, high(above) - high(below));
        below = above;
      }
      const long = (step[STEP.seconds] / count / slowest) * lower;
      context.fillStyle = step[STEP.failed] ? colour("--bad") : colour("--quiet");
      context.fillRect(x, height - long, PITCH - 1, Math.max(1, long));
      if (step[STEP.preempted]) {
        context.fillStyle = colour("--bad");
        context.fillRect(x, upper + 2, PITCH - 1, 3);
      }
      if (at === chosen) {
        context.strokeStyle = colour("--text");
        context.strokeRect(x - 0.5, 0.5, PITCH, height - 1);
      }
    });
    canvas.setAttribute("aria-label", `The last ${plural(steps.length, "column")} of steps; up to ${Math.round(most)} tokens and ${duration(slowest)} each`);
  }

  drawAxis(context, colour, marks, width) {
    for (const [y, text] of marks) {
      context.strokeStyle = colour("--line");
      context.beginPath();
      context.moveTo(LEFT, Math.round(y) + 0.5);
      context.lineTo(width, Math.round(y) + 0.5);
      context.stroke();
      context.fillStyle = colour("--quiet");
      context.textAlign = "right";
      context.fillText(text, LEFT - 4, y + 4, LEFT - 4);
    }
  }
}

export function describeStep(step) {
  const count = step[STEP.steps];
  const what = count === 1 ? `Step ${step[STEP.id]}` : `Steps ${step[STEP.id] - count + 1} to ${step[STEP.id]}`;
  const parts = [
    `${duration(step[STEP.seconds])}${count === 1 ? "" : " in all"}`,
    ...(step[STEP.planned] && count === 1 ? [`planned for ${duration(step[STEP.planned])}`] : []),
    `${plural(step[STEP.prompt], "prompt token")}`,
    `${plural(step[STEP.decodes], "decode")}`,
  ];
  const drafts = step[STEP.accepted] + step[STEP.refused];
  if (drafts) parts.push(`${step[STEP.accepted]} of ${drafts} draft tokens accepted`);
  if (step[STEP.late]) parts.push(count === 1 ? "a target gave way" : `targets gave way in ${step[STEP.late]}`);
  if (step[STEP.preempted]) parts.push(`${step[STEP.preempted]} preempted`);
  if (step[STEP.failed]) parts.push("failed");
  return `${what}: ${parts.join(", ")}; ${step[STEP.running]} running, ${step[STEP.waiting]} waiting, ${step[STEP.free]} blocks free`;
}
