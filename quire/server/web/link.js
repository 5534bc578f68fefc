// An answer as a link: the conversation, the parameters and the seed, and a digest of the tokens that came of them.

const PREFIX = "#answer=";

export function linkTo(answer) {
  const bytes = new TextEncoder().encode(JSON.stringify(answer));
  let binary = "";
  for (const byte of bytes) binary += String.fromCharCode(byte);
  const text = btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
  return `${location.origin}${location.pathname}${PREFIX}${text}`;
}

// What a link's fragment says; null if it is none of these.
export function readLink(fragment) {
  if (!fragment.startsWith(PREFIX)) return null;
  try {
    const binary = atob(fragment.slice(PREFIX.length).replaceAll("-", "+").replaceAll("_", "/"));
    const found = JSON.parse(new TextDecoder().decode(Uint8Array.from(binary, (one) => one.charCodeAt(0))));
    return Array.isArray(found.turns) && typeof found.settings === "object" ? found : null;
  } catch {
    return null;
  }
}

// 64 bits of whatever was drawn: token ids, and logprobs where they were asked for. A comparison, not a signature.
export function digest(tokenIds, logprobs) {
  const text = JSON.stringify([tokenIds, logprobs]);
  let first = 0x9e3779b9;
  let second = 0x85ebca6b;
  for (let index = 0; index < text.length; index++) {
    const code = text.charCodeAt(index);
    first = Math.imul(first ^ code, 0x01000193);
    second = Math.imul(second ^ code, 0x5bd1e995) ^ (second >>> 15);
  }
  const hex = (number) => (number >>> 0).toString(16).padStart(8, "0");
  return hex(first) + hex(second);
}
