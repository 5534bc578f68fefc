// Elements without markup: text stays text, whatever is in it.

export const byId = (id) => document.getElementById(id);

// make("p", {className: "quiet", onclick: f, "aria-label": "x"}, "text", element, …)
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element && !name.startsWith("aria-")) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function legend(target, entries) {
  target.replaceChildren(...entries.map(([kind, text]) => make("span", {}, make("i", { className: kind }), text)));
}

export const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
