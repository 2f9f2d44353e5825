// Parameters of a conversation. An empty field is not sent, so that the server's default applies.

import { $, h } from "./dom.js";

const FIELDS = [
  { name: "system", label: "System prompt", kind: "text", hint: "Instructions before the conversation" },
  { name: "temperature", label: "Temperature", min: 0, max: 100, step: 0.1, hint: "0: always the likeliest token" },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1, hint: "Maximum length of a response" },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.05, hint: "Sample from the likeliest tokens up to this probability" },
  { name: "top_k", label: "Top k", min: 0, step: 1, hint: "Sample from the k likeliest tokens; 0: all" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, hint: "Least probability, relative to the likeliest token" },
  { name: "seed", label: "Seed", step: 1, hint: "The same seed gives the same response" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0, max: 100, step: 0.05, hint: "1: none" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, hint: "Once for each token seen" },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, hint: "For each time it was seen" },
  { name: "stop", label: "Stop at", kind: "lines", hint: "Strings that end a response, one per line" },
];

/** Fields that write to `settings` on input, then call `changed`. */
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
