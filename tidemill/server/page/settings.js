// Parameters of a conversation. An empty field is not sent, so that the default applies; it shows what that default is.

import { $, h } from "./dom.js";

const FIELDS = [
  { name: "system", label: "System prompt", kind: "text", hint: "What the model is told before the conversation, such as “Answer in one sentence.”" },
  { name: "temperature", label: "Temperature", min: 0, max: 100, hint: "How freely words are chosen. 0 always takes the likeliest; more is more varied." },
  { name: "max_tokens", label: "Max tokens", min: 1, hint: "The longest response. A token is about ¾ of an English word." },
  { name: "seed", label: "Seed", hint: "With the same number, the same conversation gives the same response." },
  { name: "top_p", label: "Top p", min: 0, max: 1, hint: "Only the likeliest tokens, up to this probability in total. 1: all." },
  { name: "top_k", label: "Top k", min: 0, hint: "Only so many of the likeliest tokens. 0: all." },
  { name: "min_p", label: "Min p", min: 0, max: 1, hint: "Leaves out tokens with less than this share of the likeliest one’s probability. 0: none." },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0, max: 100, hint: "Above 1, tokens that have been used become less likely. 1: off." },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, hint: "Above 0, a token that has been used becomes less likely. 0: off." },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, hint: "The same, for each time that it has been used. 0: off." },
  { name: "stop", label: "Stop at", kind: "lines", hint: "Texts that end a response, one per line." },
];

const NEUTRAL = { temperature: 1, top_p: 1, top_k: 0, min_p: 0, repetition_penalty: 1, presence_penalty: 0, frequency_penalty: 0 };

let defaults = NEUTRAL;
let isOfModel = false;
let contextLen;

/** What applies where a field is empty: the chosen model's entry of /v1/models. */
export function setDefaults(model) {
  const given = Object.entries(model?.sampling_defaults ?? {}).filter(([, value]) => typeof value === "number");
  isOfModel = given.length > 0;
  contextLen = model?.max_model_len;
  defaults = { ...NEUTRAL, ...Object.fromEntries(given) };
}

/** Fields that write to `settings` on input, then call `changed`. */
export function showSettings(settings, changed) {
  $("defaults-say").textContent = isOfModel
    ? "Empty fields use the defaults of this model, shown in grey."
    : "Empty fields use the server’s defaults, shown in grey.";
  $("fields").replaceChildren(...FIELDS.map((field) => fieldView(field, settings, changed)));
}

function defaultOf({ name, kind }) {
  if (kind) return "none";
  if (name === "seed") return "random";
  const value = defaults[name];
  return value === undefined ? (contextLen ? `up to ${contextLen}` : "") : String(Number(value.toFixed(4)));
}

function fieldView(field, settings, changed) {
  const id = `setting-${field.name}`;
  const long = field.kind !== undefined;
  const shared = { id, value: settings[field.name] ?? "", placeholder: defaultOf(field), "aria-describedby": `${id}-hint`, oninput };
  const { min, max } = field;
  const input = long
    ? h("textarea", { ...shared, rows: 2 })
    : h("input", { ...shared, type: "number", inputMode: "decimal", step: "any", min, max });
  const usual = h("b", { class: "usual" }, ` Default: ${defaultOf(field)}.`);
  function oninput() {
    const value = input.value.trim() === "" ? undefined : long ? input.value : Number(input.value);
    if (value === undefined) delete settings[field.name];
    else settings[field.name] = value;
    usual.hidden = long || value === undefined;
    changed();
  }
  usual.hidden = long || settings[field.name] === undefined;
  const hint = h("small", { id: `${id}-hint` }, field.hint, usual);
  return h("div", { class: long ? "field long" : "field" }, h("label", { htmlFor: id }, field.label), input, hint);
}

/** The part of a request that settings make. */
export function parameters(settings) {
  const { system, stop, ...numbers } = settings;
  const stops = (stop ?? "").split("\n").filter(Boolean);
  return stops.length ? { ...numbers, stop: stops } : numbers;
}

export const numSet = (settings) => FIELDS.filter((field) => settings[field.name] !== undefined).length;

/** Settings of known names and types only. */
export function cleanSettings(given) {
  const isRight = ({ name, kind }) => (kind ? typeof given?.[name] === "string" : Number.isFinite(given?.[name]));
  return Object.fromEntries(FIELDS.filter(isRight).map(({ name }) => [name, given[name]]));
}
