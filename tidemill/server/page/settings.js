// What a conversation asks of the model. A field left empty is not sent, so that the server's default holds.

import { $, h } from "./dom.js";

const FIELDS = [
  { name: "system", label: "System prompt", kind: "text", hint: "Told to the model before the conversation." },
  { name: "temperature", label: "Temperature", min: 0, max: 100, step: 0.1, hint: "0: always the likeliest token" },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1, hint: "Length of an answer" },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.05, hint: "Likeliest tokens up to this sum" },
  { name: "top_k", label: "Top k", min: 0, step: 1, hint: "So many likeliest tokens; 0: all" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, hint: "Relative to the likeliest" },
  { name: "seed", label: "Seed", step: 1, hint: "The same seed, the same answer" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0, max: 100, step: 0.05, hint: "1: none" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, hint: "Once for each token seen" },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, hint: "For each time it was seen" },
  { name: "stop", label: "Stop at", kind: "lines", hint: "Texts that end an answer, one a line" },
];

/** Fields for `settings`, which change as one types; `changed` is told. */
export function showSettings(settings, changed) {
  $("fields").replaceChildren(...FIELDS.map((field) => fieldView(field, settings, changed)));
}

function fieldView(field, settings, changed) {
  const id = `setting-${field.name}`;
  const long = field.kind !== undefined;
  const shared = { id, value: settings[field.name] ?? "", "aria-describedby": `${id}-hint`, oninput };
  const { min, max } = field;
  const input = long
    ? h("textarea", { ...shared, rows: field.kind === "text" ? 3 : 2 })
    : h("input", { ...shared, type: "number", inputMode: "decimal", step: "any", min, max, placeholder: "default" });
  function oninput() {
    const value = input.value.trim() === "" ? undefined : long ? input.value : Number(input.value);
    if (value === undefined) delete settings[field.name];
    else settings[field.name] = value;
    changed();
  }
  const hint = h("small", { id: `${id}-hint` }, field.hint);
  return h("div", { class: long ? "field long" : "field" }, h("label", { htmlFor: id }, field.label), input, hint);
}

/** The part of a request that settings make. */
export function parameters(settings) {
  const { system, stop, ...numbers } = settings;
  const stops = (stop ?? "").split("\n").filter(Boolean);
  return stops.length ? { ...numbers, stop: stops } : numbers;
}

export const numSet = (settings) => FIELDS.filter((field) => settings[field.name] !== undefined).length;
