// "Why this long": where a request's time went, from the engine's events: a bar that is 100 % of it, and the reasons.

import { call } from "./api.js";
import { count, h, seconds } from "./dom.js";

const NAMES = {
  queued: "Queued",
  preempted: "Preempted",
  loading: "Loading pages",
  prefill: "Prefill",
  decode: "Decode",
  "between steps": "Between steps",
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
      h("p", {}, span.because),
    ),
  );
  const fresh = story.prompt_tokens - story.cached_tokens;
  const facts = [
    `${seconds(story.total_ms)} in the engine`,
    story.first_token_ms !== null && `first token after ${seconds(story.first_token_ms)}`,
    `${count(story.prompt_tokens, "prompt token")}, ${story.cached_tokens} cached and ${fresh} computed`,
    seenMs > story.total_ms && `${seconds(seenMs - story.total_ms)} more for network and server`,
  ];
  return h("div", { class: "why" }, bar, h("ul", {}, ...rows), h("p", { class: "soft" }, facts.filter(Boolean).join(" · ")));
}

const kind = (span) => `span-${span.span.replace(" ", "-")}`;
const inWords = (span) => `${NAMES[span.span] ?? span.span}: ${span.percent.toFixed(1)} %`;
