// Conversations as files: JSON to move them to another browser, Markdown to read. What is imported is not trusted.

import { wholeText } from "./files.js";
import { h } from "./dom.js";
import { cleanSettings } from "./settings.js";
import * as store from "./store.js";

const FORMAT = "tidemill.conversations";
const VERSION = 1;
const MAX_BYTES = 20 * 1024 * 1024; // a browser keeps about 5 MB
const FIGURES = ["first_ms", "total_ms", "rate", "tokens", "prompt", "cached"];

export const asJson = (conversations) => `${JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 1)}\n`;

export function asMarkdown(conversation) {
  const parts = [`# ${conversation.title || "Untitled"}`];
  if (conversation.settings.system) parts.push(`**System**\n\n${conversation.settings.system}`);
  for (const message of conversation.messages) {
    parts.push(`**${message.role === "user" ? "You" : "Model"}**\n\n${wholeText(message)}`);
  }
  return `${parts.join("\n\n")}\n`;
}

export function download(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = h("a", { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** A title as the name of a file. */
export const fileName = (title) => (title.normalize("NFKC").replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 60) || "conversation");

/** Imports a file and returns what to say about it. Throws an error with a message for the user. */
export async function importFile(file) {
  if (file.size > MAX_BYTES) throw new Error("This file is larger than a browser can keep.");
  const found = read(await file.text());
  let num = 0;
  for (const conversation of found) {
    const held = store.load(conversation.id);
    if (held && JSON.stringify(clean(held).messages) === JSON.stringify(conversation.messages)) continue; // it is here already
    if (held) conversation.id = store.newId();
    if (!store.save(conversation)) throw new Error(`This browser has no room left. ${num} of ${found.length} were imported.`);
    num++;
  }
  return num === found.length ? `${num} imported.` : `${num} imported, ${found.length - num} were here already.`;
}

function read(text) {
  let whole;
  try {
    whole = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON.");
  }
  if (whole?.format !== FORMAT || !Array.isArray(whole.conversations)) throw new Error("This file was not exported by this page.");
  if (whole.version !== VERSION) throw new Error("This file was exported by another version of this page.");
  return whole.conversations.map(clean).filter((one) => one.messages.length);
}

const textOf = (value, most = Infinity) => (typeof value === "string" ? value.slice(0, most) : "");
const listOf = (value) => (Array.isArray(value) ? value.filter((one) => one && typeof one === "object") : []);

/** A conversation of known fields of the right types only. */
function clean(given) {
  const one = given && typeof given === "object" ? given : {};
  return {
    id: /^[0-9a-f]{16}$/.test(one.id) ? one.id : store.newId(),
    title: textOf(one.title, 120),
    changed: Number.isFinite(one.changed) ? one.changed : Date.now(),
    settings: cleanSettings(one.settings),
    messages: listOf(one.messages).filter(({ role }) => role === "user" || role === "assistant").map(cleanMessage),
  };
}

function cleanMessage({ role, content, reasoning, files, stats, error }) {
  const message = { role, content: textOf(content) };
  const kept = listOf(files).map(({ name, text }) => ({ name: textOf(name, 120), text: textOf(text) }));
  if (role === "user") return kept.length ? { ...message, files: kept } : message;
  const figures = FIGURES.filter((name) => Number.isFinite(stats?.[name])).map((name) => [name, stats[name]]);
  message.stats = { ...Object.fromEntries(figures), finish: textOf(stats?.finish, 20) };
  if (textOf(reasoning)) message.reasoning = reasoning;
  if (textOf(error)) message.error = textOf(error, 500);
  return message;
}
