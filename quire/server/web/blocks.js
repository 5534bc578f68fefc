// Markdown's blocks as nodes: paragraphs, headings, lists, quotes, tables, code, maths. Nothing is ever read as HTML.

import { CodeBlock } from "/page/code_block.js";
import { make } from "/page/dom.js";
import { renderInline } from "/page/inline.js";
import { renderMaths } from "/page/maths.js";

const DEEPEST = 8;  // quotes in lists in quotes, …; deeper ones stay text
const MOST_COLUMNS = 40;

export const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
export const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:\s+|$)/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*))?$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const DELIMITERS = /^[\s|:-]+$/;
const MATHS = /^\s*(\$\$|\\\[)/;

const isBlank = (line) => line.trim() === "";
const indentOf = (line) => line.length - line.trimStart().length;
const beginsBlock = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line) || MATHS.test(line);

export function isClosingFence(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && text === fence[0].repeat(text.length);
}

export function renderBlocks(lines, depth = 0) {
  const nodes = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    if (isBlank(line)) at++;
    else if (depth >= DEEPEST) {
      nodes.push(paragraph(lines.slice(at).join("\n")));
      break;
    } else at = renderBlock(lines, at, depth, nodes);
  }
  return nodes;
}

// Renders the block that begins at a line; returns the line after it.
function renderBlock(lines, at, depth, nodes) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence !== null) return renderFence(lines, at, fence, nodes);
  if (MATHS.test(line)) {
    const end = renderMathsBlock(lines, at, nodes);
    if (end !== null) return end;
  }
  const heading = HEADING.exec(line);
  if (heading !== null) {
    const text = (heading[2] ?? "").replace(/\s#+\s*$/, "").trim();
    nodes.push(make(`h${Math.min(6, heading[1].length + 2)}`, { dir: "auto" }, ...renderInline(text)));
    return at + 1;
  }
  if (RULE.test(line)) {
    nodes.push(make("hr"));
    return at + 1;
  }
  if (QUOTE.test(line)) {
    let end = at;
    while (end < lines.length && QUOTE.test(lines[end])) end++;
    const inside = lines.slice(at, end).map((one) => one.replace(QUOTE, ""));
    nodes.push(make("blockquote", { dir: "auto" }, ...renderBlocks(inside, depth + 1)));
    return end;
  }
  if (ITEM.test(line)) return renderList(lines, at, depth, nodes);
  if (line.includes("|") && lines[at + 1]?.includes("-") && DELIMITERS.test(lines[at + 1])) return renderTable(lines, at, nodes);
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end]) && !beginsBlock(lines[end])) end++;
  nodes.push(paragraph(lines.slice(at, end).join("\n")));
  return end;
}

function paragraph(text) {
  return make("p", { dir: "auto" }, ...renderInline(text.trim()));
}

function renderFence(lines, at, fence, nodes) {
  const code = new CodeBlock(fence[2]);
  const indent = indentOf(lines[at]);
  let end = at + 1;
  while (end < lines.length && !isClosingFence(lines[end], fence[1])) {
    code.addLine(lines[end].slice(Math.min(indent, indentOf(lines[end]))));
    end++;
  }
  nodes.push(code.element);
  return end + 1;
}

// $$ … $$ or \[ … \], on one line or several; null if it is never closed.
function renderMathsBlock(lines, at, nodes) {
  const mark = lines[at].trim().startsWith("$$") ? "$$" : "\\]";
  const first = lines[at].trim().slice(2);
  const collected = [];
  for (let end = at; end < lines.length && end - at < 200; end++) {
    const text = end === at ? first : lines[end];
    const close = text.indexOf(mark);
    if (close < 0) collected.push(text);
    else {
      if (text.slice(close + 2).trim().replace(/[.,;]/, "") !== "") return null;
      nodes.push(make("div", { className: "maths" }, renderMaths([...collected, text.slice(0, close)].join("\n"), true)));
      return end + 1;
    }
  }
  return null;
}

function renderList(lines, at, depth, nodes) {
  const first = ITEM.exec(lines[at])[2];
  const isOrdered = /\d/.test(first);
  const kind = first.at(-1);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const marker = ITEM.exec(lines[end]);
    if (marker === null || marker[2].at(-1) !== kind || RULE.test(lines[end])) break;
    const inside = [lines[end].slice(marker[0].length)];
    const width = Math.min(marker[0].length, indentOf(lines[end]) + marker[2].length + 4);
    end++;
    while (end < lines.length && belongs(lines, end)) {
      inside.push(lines[end].slice(Math.min(width, indentOf(lines[end]))));
      end++;
    }
    while (end < lines.length && isBlank(lines[end])) end++;
    items.push(renderItem(inside, depth));
  }
  const list = make(isOrdered ? "ol" : "ul", { dir: "auto" }, ...items);
  if (isOrdered && parseInt(first) !== 1) list.start = parseInt(first);
  nodes.push(list);
  return end;
}

// Whether a line is still of the item above it. Models indent by two as often as by the marker's width.
function belongs(lines, at) {
  const line = lines[at];
  if (isBlank(line)) {
    let next = at;
    while (next < lines.length && isBlank(lines[next])) next++;
    return next < lines.length && indentOf(lines[next]) >= 2;
  }
  return indentOf(line) >= 2 || (!isBlank(lines[at - 1]) && !beginsBlock(line));
}

function renderItem(lines, depth) {
  const task = /^\[([ xX])\]\s/.exec(lines[0]);
  if (task !== null) lines[0] = lines[0].slice(task[0].length);
  let nodes = renderBlocks(lines, depth + 1);
  if (nodes[0]?.tagName === "P") nodes = [...nodes[0].childNodes, ...nodes.slice(1)];  // a tight list
  const box = task === null ? [] : [make("input", { type: "checkbox", checked: task[1] !== " ", disabled: true }), " "];
  return make("li", { dir: "auto" }, ...box, ...nodes);
}

function renderTable(lines, at, nodes) {
  const head = cellsOf(lines[at]);
  const sides = cellsOf(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "centre" : "number") : ""));
  const row = (tag, cells) => make("tr", {}, ...head.map((_, place) => make(tag, { dir: "auto", className: sides[place] ?? "" }, ...renderInline(cells[place] ?? ""))));
  const body = [];
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && !isBlank(lines[end])) body.push(row("td", cellsOf(lines[end++])));
  const table = make("table", {}, make("thead", {}, row("th", head)), make("tbody", {}, ...body));
  nodes.push(make("div", { className: "table", tabIndex: 0, role: "region", "aria-label": "Table" }, table));
  return end;
}

function cellsOf(line) {
  const inside = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return inside.split(/(?<!\\)\|/).slice(0, MOST_COLUMNS).map((cell) => cell.replaceAll("\\|", "|").trim());
}
