// "Why this long": where a request's time went, all that its client waited: a bar that is 100 % of it, and the reasons.

import { call } from "./api.js";
import { count, h, seconds } from "./dom.js";

const NAMES = {
  reading: "Reading the request",
  parsing: "Parsing",
  template: "Chat template",
  tokenizing: "Tokenizing",
  grammar: "Checking the grammar",
  "to the engine": "To the engine",
  queued: "Queued",
  preempted: "Preempted",
  loading: "Loading pages",
  prefill: "Prefill",
  decode: "Decode",
  "between steps": "Between steps",
  "from the engine": "From the engine",
  formatting: "Formatting",
  writing: "Writing",
  "other parts": "Other prompts and samples",
  "server loop": "Server loop",
};

/** Kept with the message, since the server keeps the latest thousand only. */
export async function explanationOf(message) {
  if (!message.explanation || message.explanation.status === "under way") {
    const reply = await call(`v1/requests/${encodeURIComponent(message.request)}/explain`);
    [message.explanation] = (await reply.json()).data;
  }
  return message.explanation;
}

export function explanationView(story, seenMs) {
  const bar = h("div", { class: "bar", role: "img", "aria-label": story.spans.map(inWords).join(", ") });
  for (const span of story.spans) {
    const part = h("span", { class: kind(span), title: inWords(span) });
    part.style.width = `${span.percent}%`;
    bar.append(part);
  }
  const rows = story.spans.map((span) =>
    h(
      "li",
      {},
      h("i", { class: kind(span) }),
      h("b", {}, NAMES[span.span] ?? span.span),
      h("span", { class: "figure" }, `${seconds(span.ms)} · ${span.percent.toFixed(1)} %`),
      h("p", {}, !span.parts ? span.because : span.span === "between steps" ? partsOf(span) : `${span.because}: ${partsOf(span)}`),
    ),
  );
  const fresh = story.prompt_tokens - story.cached_tokens;
  const facts = [
    `${seconds(story.total_ms)} in the server, ${seconds(story.engine_ms)} of it in the engine`,
    story.first_token_ms !== null && `first token after ${seconds(story.first_token_ms)}`,
    `${count(story.prompt_tokens, "prompt token")}, ${story.cached_tokens} cached and ${fresh} computed`,
    seenMs > story.total_ms && `${seconds(seenMs - story.total_ms)} more for the network and this page`,
  ];
  return h("div", { class: "why" }, bar, h("ul", {}, ...rows), h("p", { class: "soft" }, facts.filter(Boolean).join(" · ")));
}

const partsOf = (span) => span.parts.map(({ part, ms }) => `${part} ${seconds(ms)}`).join(", ");
const ENGINE = new Set(["queued", "preempted", "loading", "prefill", "decode", "between steps"]);
const kind = (span) => (ENGINE.has(span.span) ? `span-${span.span.replace(" ", "-")}` : `span-server span-${span.span.replaceAll(" ", "-")}`);
const inWords = (span) => `${NAMES[span.span] ?? span.span}: ${span.percent.toFixed(1)} %`;
