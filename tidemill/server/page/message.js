// A message of the conversation: its words, and what can be done with it.

import { copyText, count, h, seconds } from "./dom.js";
import { explanationOf, explanationView } from "./explain.js";
import { fileViews } from "./files.js";
import { show } from "./markdown.js";

const LINE = 90; // characters, about
const FOLDED_LINES = { user: 14, assistant: 60 };

const unfolded = new WeakSet(); // messages that were opened by the reader

export class MessageView {
  /** `index`: in the conversation. `busy`: a response is under way, so nothing can be changed. */
  constructor(message, { index, isLast, busy, actions }) {
    Object.assign(this, { message, index, isLast, busy, actions });
    this.isGrowing = isLast && busy && message.role === "assistant";
    this.body = h("div", { class: "words" });
    this.foot = h("footer");
    const who = message.role === "user" ? "You" : "Model";
    this.element = h("article", { class: message.role, "aria-label": who }, fileViews(message), this.body, this.foot);
    if (message.role === "user") this.drawUser();
    else this.draw();
    if (this.isLong() && !unfolded.has(message)) this.fold();
  }

  drawUser() {
    this.body.textContent = this.message.content;
    this.body.hidden = !this.message.content;
    this.foot.append(...this.userActions());
  }

  userActions() {
    if (this.busy) return [this.copyButton()];
    const edit = h("button", { class: "quiet edit", onclick: () => this.edit() }, "Edit");
    const isUnanswered = this.isLast;
    return [this.copyButton(), edit, ...(isUnanswered ? [this.againButton("Retry")] : []), this.removeButton()];
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

  /** Folded, also while they come: the summary says that there are some. */
  drawThoughts() {
    if (!this.thoughts) {
      this.thoughts = h("div", { class: "thoughts" });
      this.summary = h("summary");
      this.body.before(h("details", { class: "reasoning" }, this.summary, this.thoughts));
    }
    const { reasoning, content, stats } = this.message;
    const took = stats?.thinking_ms ? ` for ${seconds(stats.thinking_ms)}` : "";
    const words = this.isGrowing && !content ? `Thinking… ${count(reasoning.split(/\s+/).length, "word")}` : `Thought${took}`;
    if (this.summary.textContent !== words) this.summary.textContent = words;
    show(this.thoughts, reasoning);
  }

  footing() {
    const { message } = this;
    const made = [];
    if (message.error) made.push(h("p", { class: "trouble", role: "alert" }, message.error, this.isLast && this.againButton("Try again")));
    const why = h("button", { class: "quiet why-open", "aria-expanded": "false", onclick: () => this.explain(why) }, "Why this long?");
    made.push(h("span", { class: "stats" }, statsLine(message.stats ?? {})), message.content && this.copyButton());
    if (!this.busy && !(message.error && this.isLast)) made.push(this.againButton("Retry"));
    if (!this.busy) made.push(this.removeButton());
    if (message.request) made.push(why);
    return made.filter(Boolean);
  }

  copyButton() {
    const copy = h("button", { class: "quiet copy", onclick: () => copyText(this.message.content, copy) }, "Copy");
    return copy;
  }

  againButton(label) {
    return h("button", { class: "quiet again", onclick: () => this.actions.askAgain(this.index) }, label);
  }

  removeButton() {
    const title = "Delete the question and its answer";
    return h("button", { class: "quiet remove", title, onclick: () => this.actions.remove(this.index) }, "Delete");
  }

  edit() {
    const field = h("textarea", { value: this.message.content, rows: 3, "aria-label": "Edit your message" });
    const done = () => field.value.trim() && this.actions.askAgain(this.index, field.value.trim());
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.actions.redraw();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        done();
      }
    });
    const cancel = h("button", { class: "quiet", onclick: this.actions.redraw }, "Cancel");
    this.element.replaceChildren(field, h("footer", {}, cancel, h("button", { onclick: done }, "Send")));
    this.element.classList.add("editing");
    field.focus();
  }

  // ---- folding

  /** The last message is being read, so a response is folded only when others follow it. */
  isLong() {
    const { role, content } = this.message;
    if (role === "assistant" && this.isLast) return false;
    const numLines = content.split("\n").reduce((sum, line) => sum + Math.max(Math.ceil(line.length / LINE), 1), 0);
    return numLines > FOLDED_LINES[role];
  }

  fold() {
    this.element.classList.add("folded");
    this.more = h("button", { class: "quiet more", "aria-expanded": "false", onclick: () => this.unfold() }, "Show more");
    this.body.after(this.more);
    this.body.addEventListener("focusin", () => this.unfold(), { once: true }); // a link that is reached by keyboard
  }

  unfold() {
    if (!this.more) return;
    unfolded.add(this.message);
    this.element.classList.remove("folded");
    this.more.remove();
    this.more = null;
  }

  /** Shows a message that was searched for. */
  reveal() {
    this.unfold();
    this.element.scrollIntoView({ block: "start" });
    this.element.classList.add("found");
  }

  // ---- why this long

  async explain(button) {
    if (this.explanation) {
      this.explanation.remove();
      this.explanation = null;
      button.setAttribute("aria-expanded", "false");
      return;
    }
    try {
      const story = await explanationOf(this.message);
      this.explanation = explanationView(story, this.message.stats.total_ms);
      this.actions.explained();
    } catch (error) {
      const words = error.status === 404 ? "The server has no record of this request any more." : error.message;
      this.explanation = h("div", { class: "why" }, h("p", { class: "soft" }, words));
      if (error.status === 401) this.actions.keyNeeded(words);
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
    Object.hasOwn(ENDS, stats.finish ?? "") && ENDS[stats.finish],
  ];
  return parts.filter(Boolean).join(" · ");
}
