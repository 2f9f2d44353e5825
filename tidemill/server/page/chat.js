// The current conversation: messages, and responses as they stream in. Several conversations may have a response under way.

import { call, eventsOf, Trouble, troubleIn } from "./api.js";
import { $, announce, count, h, toast } from "./dom.js";
import * as files from "./files.js";
import { MessageView } from "./message.js";
import { parameters } from "./settings.js";
import * as store from "./store.js";

const DRAW_EVERY_MS = 40;
const MAX_FIELD_PX = 220;
const SAVE_EVERY_MS = 1000;
const STARTERS = ["What is a tide mill?", "Explain a prefix cache in three sentences.", "Write a haiku about the sea at night."];

const responding = new Map(); // conversation id to what stops its response
let current = null;
let views = []; // of the current conversation's messages
let onChange = () => {};
let onKeyNeeded = () => {};

export function setUp({ changed, keyNeeded }) {
  onChange = changed;
  onKeyNeeded = keyNeeded;
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  $("text").addEventListener("input", grow);
  $("stop").addEventListener("click", () => stop());
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop();
  });
  addEventListener("pagehide", () => responding.forEach(({ save }) => save()));
  files.setUp();
  const starter = (words) => h("button", { class: "starter", onclick: () => ask(words) }, words);
  $("starters").replaceChildren(...STARTERS.map(starter));
}

export const isResponding = (id) => responding.has(id);
export const currentConversation = () => current;

/** `index`: of the message to show; otherwise the end is shown. */
export function open(conversation, index = -1) {
  current = responding.get(conversation.id)?.conversation ?? conversation; // the one that grows, if it does
  drawAll();
  if (index < 0) $("scroll").scrollTop = $("scroll").scrollHeight;
  else views[index]?.reveal();
}

export const stop = (id = current.id) => responding.get(id)?.controller.abort();

// ---- asking

function send() {
  const text = $("text").value.trim();
  if ((!text && !files.hasAttached()) || isResponding(current.id)) return;
  $("text").value = "";
  grow();
  ask(text, files.takeAttached());
}

function ask(text, attached = []) {
  current.messages.push({ role: "user", content: text, ...(attached.length ? { files: attached } : {}) });
  current.title ||= (text || attached[0].name).replace(/\s+/g, " ").slice(0, 60);
  respond(current);
}

/** Asks the question of a message once more, perhaps in other words. What came after its answer goes. */
function askAgain(conversation, index, text) {
  const before = [...conversation.messages];
  const asked = before.slice(0, index + 1).findLastIndex((message) => message.role === "user");
  conversation.messages = before.slice(0, asked + 1);
  if (text !== undefined) conversation.messages[asked] = { ...before[asked], content: text };
  const finished = respond(conversation);
  if (before.length <= asked + 2) return;
  toast("Later messages were removed.", "Undo", async () => {
    stop(conversation.id);
    await finished;
    restore(conversation, before);
  });
}

/** Removes a question with its answer. */
function removeExchange(conversation, index) {
  const before = [...conversation.messages];
  const asked = before.slice(0, index + 1).findLastIndex((message) => message.role === "user");
  const next = before.findIndex((message, i) => i > Math.max(asked, index) && message.role === "user");
  const end = next < 0 ? before.length : next;
  restore(conversation, [...before.slice(0, Math.max(asked, 0)), ...before.slice(end)]);
  toast("Question and answer deleted.", "Undo", () => restore(conversation, before));
}

function restore(conversation, messages) {
  conversation.messages = messages;
  store.save(conversation);
  onChange();
  if (conversation === current) drawAll();
}

function requestBody(conversation) {
  const { system } = conversation.settings;
  const said = conversation.messages.filter((message) => message.role === "user" || message.content);
  const messages = said.map((message) => ({ role: message.role, content: files.wholeText(message) }));
  if (system) messages.unshift({ role: "system", content: system });
  const how = { stream: true, stream_options: { include_usage: true }, timings: true };
  return { model: $("model").value, messages, ...how, ...parameters(conversation.settings) };
}

async function respond(conversation) {
  const controller = new AbortController();
  const body = requestBody(conversation);
  const message = { role: "assistant", content: "", stats: {} };
  conversation.messages.push(message);
  conversation.changed = Date.now();
  const save = () => store.save(conversation) || toast("This browser has no room left for conversations. Delete some.");
  responding.set(conversation.id, { conversation, controller, save });
  save();
  onChange();
  drawAll();
  $("scroll").scrollTop = $("scroll").scrollHeight;
  announce("The model is responding.");
  const drawing = setInterval(() => conversation === current && drawLast(), DRAW_EVERY_MS);
  const saving = setInterval(save, SAVE_EVERY_MS);
  try {
    await receive(message, body, controller.signal);
    announce(`The response is complete, ${count(message.stats.tokens, "token")}.`);
  } catch (error) {
    if (error.name === "AbortError") message.stats.finish = "stopped";
    else message.error = error instanceof Trouble ? error.message : "The connection was lost before the response was complete.";
    if (!(error instanceof Trouble) && error.name !== "AbortError") console.warn(error.message);
    announce(message.error ?? "The response was stopped.");
    if (error.status === 401) onKeyNeeded(error.message);
  } finally {
    clearInterval(drawing);
    clearInterval(saving);
    responding.delete(conversation.id);
    if (store.load(conversation.id)) save(); // unless it was deleted meanwhile
    onChange();
    if (conversation === current) drawAll();
  }
}

/** Receives a response into the message, with its figures. */
async function receive(message, body, signal) {
  const begun = performance.now();
  const { stats } = message;
  const reply = await call("v1/chat/completions", { method: "POST", body, signal });
  let isWhole = false;
  for await (const [, data] of eventsOf(reply)) {
    if (data === "[DONE]") {
      isWhole = true;
      break;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw troubleIn(chunk.error);
    message.request = chunk.id;
    const [choice] = chunk.choices;
    const words = choice?.delta.content ?? "";
    const thoughts = choice?.delta.reasoning_content ?? choice?.delta.reasoning ?? "";
    if (words || thoughts) {
      const now = performance.now() - begun;
      stats.first_ms ??= now;
      stats.tokens = (stats.tokens ?? 0) + 1;
      stats.total_ms = now;
      if (stats.tokens > 1) stats.rate = (1000 * (stats.tokens - 1)) / (now - stats.first_ms);
      if (words && message.reasoning && !message.content) stats.thinking_ms = now;
      message.content += words;
      if (thoughts) message.reasoning = (message.reasoning ?? "") + thoughts;
    }
    if (choice?.finish_reason) stats.finish = choice.finish_reason;
    if (chunk.timings) stats.rate = chunk.timings.tokens_per_second || stats.rate;
    if (chunk.usage) {
      stats.tokens = chunk.usage.completion_tokens;
      stats.prompt = chunk.usage.prompt_tokens;
      stats.cached = chunk.usage.prompt_tokens_details.cached_tokens;
    }
  }
  if (!isWhole) throw new Trouble("The connection was lost before the response was complete.");
}

// ---- showing

function drawAll() {
  const conversation = current;
  const busy = isResponding(conversation.id);
  const actions = {
    askAgain: (index, text) => askAgain(conversation, index, text),
    remove: (index) => removeExchange(conversation, index),
    redraw: drawAll,
    explained: () => isResponding(conversation.id) || store.save(conversation),
    keyNeeded: (words) => onKeyNeeded(words),
  };
  const num = conversation.messages.length;
  views = conversation.messages.map((message, index) => new MessageView(message, { index, isLast: index === num - 1, busy, actions }));
  $("log").replaceChildren(...views.map((view) => view.element));
  $("empty").hidden = num > 0;
  $("log").setAttribute("aria-busy", busy);
  $("stop").hidden = !busy;
  $("send").hidden = busy;
}

/** The response under way. A reader who has scrolled up stays there. */
function drawLast() {
  const box = $("scroll");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
  views.at(-1).draw();
  if (atEnd) box.scrollTop = box.scrollHeight;
}

/** As high as its text, up to a point. */
export function grow() {
  const field = $("text");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, MAX_FIELD_PX)}px`;
  field.style.overflowY = field.scrollHeight > MAX_FIELD_PX ? "auto" : "hidden";
}
