// "Why this long": the engine's own account of a request, as a bar that is 100 % of its time, and the reasons.

import { call } from "./api.js";
import { count, h, seconds } from "./dom.js";

const NAMES = {
  queued: "Waited in the queue",
  preempted: "Set aside: pages taken away",
  prefill: "Read the prompt",
  decode: "Wrote the answer",
  "between steps": "Between steps",
};

/** Kept with the message, since the server remembers the latest thousand only. */
export async function explanationOf(message) {
  if (!message.explanation || message.explanation.status === "under way") {
    const reply = await call(`/v1/requests/${encodeURIComponent(message.request)}/explain`);
    [message.explanation] = (await reply.json()).data;
  }
  return message.explanation;
}

export function explanationView(told, seenMs) {
  const bar = h("div", { class: "bar", role: "img", "aria-label": told.spans.map(inWords).join(", ") });
  for (const span of told.spans) {
    const part = h("span", { class: kind(span), title: inWords(span) });
    part.style.width = `${span.percent}%`;
    bar.append(part);
  }
  const rows = told.spans.map((span) =>
    h(
      "li",
      {},
      h("i", { class: kind(span) }),
      h("b", {}, NAMES[span.span] ?? span.span),
      h("span", { class: "figure" }, `${seconds(span.ms)} · ${span.percent.toFixed(1)} %`),
      h("p", {}, span.because),
    ),
  );
  const fresh = told.prompt_tokens - told.cached_tokens;
  const facts = [
    `${seconds(told.total_ms)} in the engine`,
    told.first_token_ms !== null && `first token after ${seconds(told.first_token_ms)}`,
    `${count(told.prompt_tokens, "prompt token")}, ${told.cached_tokens} found in the cache and ${fresh} computed`,
    seenMs > told.total_ms && `${seconds(seenMs - told.total_ms)} more on the way to this page and back`,
  ];
  return h("div", { class: "why" }, bar, h("ul", {}, ...rows), h("p", { class: "soft" }, facts.filter(Boolean).join(" · ")));
}

const kind = (span) => `span-${span.span.replace(" ", "-")}`;
const inWords = (span) => `${NAMES[span.span] ?? span.span}: ${span.percent.toFixed(1)} %`;
