// The form of parameters: read into fields of a request, kept as the texts that were typed.

import { byId, make } from "/page/dom.js";

let parameters = [];  // what the server says it takes: {name, help, default}, and of a number its limits
let texts = [];  // the names of all fields that are typed into
const NUM_ALTERNATIVES = 5;
const KEPT = "quire-settings";  // in localStorage

export class SettingsError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

const form = () => byId("settings");
const field = (name) => form().elements.namedItem(name);

export function buildSettings(described) {
  parameters = described;
  texts = ["system", "schema", "tools", "tool_choice", ...parameters.map((one) => one.name)];
  byId("parameters").replaceChildren(...parameters.map((one) => {
    const label = one.name[0].toUpperCase() + one.name.slice(1).replaceAll("_", " ");
    return make("label", { title: one.help }, `${label} `, make("input", inputOf(one)));
  }));
  typeSettings(keptSettings());
  form().addEventListener("input", keepSettings);
  byId("reset-settings").addEventListener("click", () => {
    typeSettings({});
    showSettingsError(null);
    keepSettings();
  });
}

// As they were when the page was left, in this browser.
function keptSettings() {
  try {
    return JSON.parse(localStorage.getItem(KEPT)) ?? {};
  } catch {
    return {};
  }
}

function keepSettings() {
  try {
    localStorage.setItem(KEPT, JSON.stringify(typedSettings()));
  } catch {
    // a browser that keeps nothing
  }
}

function isNumber(one) {
  return one.minimum !== undefined || one.exclusiveMinimum !== undefined;
}

// Out of range is the server's to refuse, which knows why; the limits here are for the arrows beside the number.
function inputOf(one) {
  const shown = { name: one.name, placeholder: one.default === null || one.default.length === 0 ? "" : String(one.default) };
  if (!isNumber(one)) return { ...shown, type: "text", spellcheck: false };
  const max = one.maximum === undefined ? "" : Math.min(one.maximum, Number.MAX_SAFE_INTEGER);
  return { ...shown, type: "number", min: one.minimum ?? one.exclusiveMinimum, max, step: one.integer ? "1" : "any" };
}

// As typed, for a link: only what was filled in.
export function typedSettings() {
  const typed = {};
  for (const name of texts) if (field(name).value.trim() !== "") typed[name] = field(name).value;
  if (field("logprobs").checked) typed.logprobs = true;
  return typed;
}

export function typeSettings(typed) {
  for (const name of texts) field(name).value = typeof typed[name] === "string" ? typed[name] : "";
  field("logprobs").checked = typed.logprobs === true;
}

export function drawSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0];
}

// Fields of a chat completion for settings as typed; raises SettingsError with the field that is wrong.
export function requestFields(typed) {
  const fields = {};
  for (const one of parameters) {
    const { name } = one;
    if (typed[name] === undefined || name === "seed") continue;
    const value = isNumber(one) ? Number(typed[name]) : typed[name];
    if (isNumber(one) && !Number.isFinite(value)) throw new SettingsError(name, `${name.replaceAll("_", " ")} is not a number`);
    fields[name] = value;
  }
  if (typed.logprobs) Object.assign(fields, { logprobs: true, top_logprobs: NUM_ALTERNATIVES });
  if (typed.schema !== undefined) {
    const schema = parse("schema", "the JSON schema", typed.schema);
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (typed.tools !== undefined) {
    fields.tools = parse("tools", "the list of tools", typed.tools);
    if (!Array.isArray(fields.tools)) throw new SettingsError("tools", "the tools are not a JSON list");
    if (typed.tool_choice !== undefined) fields.tool_choice = typed.tool_choice;
  }
  return fields;
}

export function seedOf(typed) {
  if (typed.seed === undefined) return drawSeed();
  const seed = Number(typed.seed);
  if (!Number.isSafeInteger(seed)) throw new SettingsError("seed", "the seed is not a whole number");
  return seed;
}

// Below the field that is wrong, which may be far from the end of the form.
export function showSettingsError(error) {
  const place = byId("settings-error");
  for (const name of texts) field(name).removeAttribute("aria-invalid");
  if (error !== null && field(error.field)) {
    byId("settings-panel").open = true;
    field(error.field).closest("label").after(place);
    field(error.field).setAttribute("aria-invalid", "true");
    field(error.field).focus();
  }
  place.textContent = error === null ? "" : error.message;
  if (error !== null) place.scrollIntoView({ block: "nearest" });
}

function parse(name, what, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SettingsError(name, `${what} is not JSON: ${error.message}`);
  }
}
