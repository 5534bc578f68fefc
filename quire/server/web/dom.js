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

// Colours of the style sheet as a canvas takes them, for light or dark: {"--free": "rgb(…)", …}.
export function colours(names) {
  const probe = document.body.appendChild(make("span", { hidden: true }));
  const found = {};
  for (const name of names) {
    probe.style.color = `var(${name})`;
    found[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  return found;
}

export function legend(target, entries) {
  target.replaceChildren(...entries.map(([kind, text]) => make("span", {}, make("i", { className: kind }), text)));
}

// "3.21 ms", "154 ms", "1.87 s"
export function duration(seconds) {
  return seconds < 0.9995 ? `${(1000 * seconds).toPrecision(3)} ms` : `${seconds.toPrecision(3)} s`;
}

export const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

export const newId = () => [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
