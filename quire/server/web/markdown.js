// Markdown as it streams in. Blocks that are complete are rendered once and never touched again; only the open one, whose
// size is bounded, is made anew. So the work is linear in the length of the text, whatever the text is.

import { FENCE, ITEM, isClosingFence, renderBlocks } from "/page/blocks.js";
import { CodeBlock } from "/page/code_block.js";
import { make } from "/page/dom.js";

const LONGEST_OPEN = 4096;  // characters of a block that is made anew; a longer one is cut

export class MarkdownStream {
  constructor(element) {
    this.element = element;
    this.open = make("div", { className: "open-block" });
    element.append(this.open);
    this.pending = "";  // text of the open block
    this.scanned = 0;  // how much of it are lines that have been looked at
    this.inner = null;  // the fence that is open inside a list
    this.wasBlank = false;
    this.isCut = false;  // the open block goes on where the one before was cut
    this.fence = null;  // the code that is open: {mark, block}
  }

  push(text) {
    this.pending += text;
    for (;;) {
      const end = this.pending.indexOf("\n", this.scanned);
      if (end < 0) break;
      if (this.fence !== null) this.takeCode(end);
      else this.takeLine(end);
    }
    while (this.pending.length > LONGEST_OPEN) this.cut();
    this.show();
  }

  // No more text comes.
  end() {
    if (this.fence !== null) {
      if (this.pending && !isClosingFence(this.pending, this.fence.mark)) this.fence.block.addPiece(this.pending);
      this.pending = "";
      this.closeCode();
    } else this.settle(this.pending.length);
    this.open.remove();
  }

  takeCode(end) {
    const line = this.pending.slice(0, end);
    this.pending = this.pending.slice(end + 1);
    if (!isClosingFence(line, this.fence.mark)) this.fence.block.addLine(line);
    else this.closeCode();
  }

  closeCode() {
    this.fence.block.setTail("");
    this.fence = null;
  }

  // Decides with each complete line whether the block before it is complete.
  takeLine(end) {
    const begin = this.scanned;
    const line = this.pending.slice(begin, end);
    this.scanned = end + 1;
    if (this.scanned > LONGEST_OPEN) {
      if (begin > 0) {
        this.settle(begin, true);
        return;
      }
      return this.cut();
    }
    if (this.inner !== null) {
      if (isClosingFence(line, this.inner)) this.inner = null;
      return;
    }
    const isBlank = line.trim() === "";
    const inList = ITEM.test(this.pending);
    const goesOn = inList && (/^ {2,}/.test(line) || (ITEM.test(line) && begin < LONGEST_OPEN / 2));
    if (!isBlank && begin > 0 && this.wasBlank && !goesOn) return this.settle(begin);
    this.wasBlank = isBlank;
    const fence = FENCE.exec(line.trimStart());
    if (fence === null) return;
    if (inList && /^ {2,}/.test(line)) this.inner = fence[1];
    else {
      this.settle(begin);
      this.pending = this.pending.slice(line.length + 1);
      this.scanned = 0;
      this.fence = { mark: fence[1], block: new CodeBlock(fence[2]) };
      this.open.before(this.fence.block.element);
    }
  }

  // Renders the first `length` characters for good.
  settle(length, isCut = false) {
    const text = this.pending.slice(0, length);
    this.pending = this.pending.slice(length);
    this.scanned = 0;
    this.inner = null;
    this.wasBlank = false;
    this.open.before(...this.render(text));
    this.isCut = isCut;
  }

  // A block that is too long: at its last line or word, or anywhere, but not within a character.
  cut() {
    let at = this.pending.lastIndexOf("\n", LONGEST_OPEN) + 1 || this.pending.lastIndexOf(" ", LONGEST_OPEN) + 1 || LONGEST_OPEN;
    if (/[\uD800-\uDBFF]/.test(this.pending[at - 1])) at -= 1;
    if (this.fence !== null) {
      this.fence.block.addPiece(this.pending.slice(0, at));
      this.pending = this.pending.slice(at);
    } else this.settle(at, true);
  }

  render(text) {
    const nodes = renderBlocks(text.split("\n"));
    if (this.isCut) nodes[0]?.classList.add("goes-on");
    return nodes;
  }

  show() {
    if (this.fence !== null) {
      this.open.replaceChildren();
      const isClosing = this.fence.mark.startsWith(this.pending.trim());  // as far as it has come
      this.fence.block.setTail(isClosing ? "" : this.pending);
    } else this.open.replaceChildren(...this.render(this.pending));
  }
}

// The nodes of a text that is complete.
export function renderMarkdown(text) {
  const element = make("div");
  const stream = new MarkdownStream(element);
  stream.push(text);
  stream.end();
  return [...element.childNodes];
}
