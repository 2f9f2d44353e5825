// The current conversation: messages, and responses as they stream in. Several conversations may have a response under way.

import { call, eventsOf, Trouble, troubleIn } from "./api.js";
import { $, announce, copyText, count, h, seconds, toast } from "./dom.js";
import { explanationOf, explanationView } from "./explain.js";
import { show } from "./markdown.js";
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
  const starter = (words) => h("button", { class: "starter", onclick: () => ask(words) }, words);
  $("starters").replaceChildren(...STARTERS.map(starter));
}

export const isResponding = (id) => responding.has(id);
export const currentConversation = () => current;

export function open(conversation) {
  current = responding.get(conversation.id)?.conversation ?? conversation; // the one that grows, if it does
  drawAll();
  $("scroll").scrollTop = $("scroll").scrollHeight;
}

export const stop = (id = current.id) => responding.get(id)?.controller.abort();

// ---- asking

function send() {
  const text = $("text").value.trim();
  if (!text || isResponding(current.id)) return;
  $("text").value = "";
  grow();
  ask(text);
}

function ask(text) {
  current.messages.push({ role: "user", content: text });
  current.title ||= text.replace(/\s+/g, " ").slice(0, 60);
  respond(current);
}

function askAgain(conversation, text) {
  const last = conversation.messages.findLastIndex((message) => message.role === "user");
  conversation.messages.length = last + 1;
  if (text !== undefined) conversation.messages[last] = { role: "user", content: text };
  respond(conversation);
}

function requestBody(conversation) {
  const { system } = conversation.settings;
  const said = conversation.messages.filter((message) => message.role === "user" || message.content);
  const messages = said.map(({ role, content }) => ({ role, content }));
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
  const reply = await call("/v1/chat/completions", { method: "POST", body, signal });
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
    const thoughts = choice?.delta.reasoning_content ?? "";
    if (words || thoughts) {
      const now = performance.now() - begun;
      stats.first_ms ??= now;
      stats.tokens = (stats.tokens ?? 0) + 1;
      stats.total_ms = now;
      if (stats.tokens > 1) stats.rate = (1000 * (stats.tokens - 1)) / (now - stats.first_ms);
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
  const shown = current.messages.map((message, i) => new MessageView(message, i));
  views = shown;
  $("log").replaceChildren(...shown.map((view) => view.element));
  $("empty").hidden = shown.length > 0;
  const busy = isResponding(current.id);
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

class MessageView {
  constructor(message, index) {
    this.message = message;
    this.isLast = index === current.messages.length - 1;
    this.isGrowing = this.isLast && message.role === "assistant" && isResponding(current.id);
    this.body = h("div", { class: "words" });
    this.foot = h("footer");
    const who = message.role === "user" ? "You" : "Model";
    this.element = h("article", { class: message.role, "aria-label": who }, this.body, this.foot);
    if (message.role === "user") this.drawUser(index);
    else this.draw();
  }

  drawUser(index) {
    this.body.textContent = this.message.content;
    const isLastAsked = index === current.messages.findLastIndex((message) => message.role === "user");
    if (isLastAsked && !isResponding(current.id)) {
      this.foot.append(h("button", { class: "quiet edit", onclick: () => this.edit() }, "Edit"));
    }
  }

  edit() {
    const conversation = current;
    const field = h("textarea", { value: this.message.content, rows: 3, "aria-label": "Edit your message" });
    const done = () => field.value.trim() && askAgain(conversation, field.value.trim());
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") drawAll();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        done();
      }
    });
    const buttons = [h("button", { class: "quiet", onclick: drawAll }, "Cancel"), h("button", { onclick: done }, "Send")];
    this.element.replaceChildren(field, h("footer", {}, ...buttons));
    this.element.classList.add("editing");
    field.focus();
  }

  draw() {
    const { message } = this;
    if (message.reasoning) this.drawThoughts();
    show(this.body, message.content);
    this.element.classList.toggle("growing", this.isGrowing);
    if (this.isGrowing) {
      this.foot.textContent = message.stats.rate ? `${message.stats.rate.toFixed(1)} tokens/s` : "waiting for the first token";
    } else {
      this.foot.replaceChildren(...this.footing());
    }
  }

  drawThoughts() {
    if (!this.thoughts) {
      this.thoughts = h("div", { class: "thoughts" });
      this.body.before(h("details", { open: this.isGrowing && !this.message.content }, h("summary", {}, "Thoughts"), this.thoughts));
    }
    show(this.thoughts, this.message.reasoning);
  }

  footing() {
    const { message } = this;
    const conversation = current;
    const again = (label) => h("button", { class: "quiet again", onclick: () => askAgain(conversation) }, label);
    const made = [];
    if (message.error) made.push(h("p", { class: "trouble", role: "alert" }, message.error, this.isLast && again("Try again")));
    const copy = h("button", { class: "quiet", onclick: () => copyText(message.content, copy) }, "Copy");
    const why = h("button", { class: "quiet why-open", "aria-expanded": "false", onclick: () => this.explain(why) }, "Why this long?");
    made.push(h("span", { class: "stats" }, statsLine(message.stats ?? {})), message.content && copy);
    if (this.isLast && !message.error) made.push(again("Again"));
    if (message.request) made.push(why);
    return made.filter(Boolean);
  }

  async explain(button) {
    if (this.explanation) {
      this.explanation.remove();
      this.explanation = null;
      button.setAttribute("aria-expanded", "false");
      return;
    }
    const conversation = current;
    try {
      const story = await explanationOf(this.message);
      this.explanation = explanationView(story, this.message.stats.total_ms);
      if (!isResponding(conversation.id)) store.save(conversation);
    } catch (error) {
      const words = error.status === 404 ? "The server has no record of this request any more." : error.message;
      this.explanation = h("div", { class: "why" }, h("p", { class: "soft" }, words));
      if (error.status === 401) onKeyNeeded(words);
    }
    this.element.append(this.explanation);
    button.setAttribute("aria-expanded", "true");
    this.explanation.scrollIntoView({ block: "nearest" });
  }
}

const ENDS = { length: "reached the token limit", stopped: "stopped", tool_calls: "called a tool" };

function statsLine(stats) {
  const parts = [
    stats.first_ms !== undefined && `first token ${seconds(stats.first_ms)}`,
    stats.rate && `${stats.rate.toFixed(1)} tokens/s`,
    stats.tokens && `${stats.prompt === undefined ? "about " : ""}${count(stats.tokens, "token")}`,
    stats.cached > 0 && `${stats.cached} of ${stats.prompt} prompt tokens cached`,
    ENDS[stats.finish],
  ];
  return parts.filter(Boolean).join(" · ");
}

/** As high as its text, up to a point. */
export function grow() {
  const field = $("text");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, MAX_FIELD_PX)}px`;
  field.style.overflowY = field.scrollHeight > MAX_FIELD_PX ? "auto" : "hidden";
}
