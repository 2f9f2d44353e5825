// Calls to the server of this page, with the API key. Errors become messages for the user.

const KEY = "tidemill.key";
const ROOT = new URL("..", import.meta.url); // the server may be behind a proxy, under a path

export const key = () => sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "";

/** Until this tab is closed, or (`keep`) until it is forgotten. Empty: forgotten now. */
export function setKey(value, keep) {
  sessionStorage.removeItem(KEY);
  localStorage.removeItem(KEY);
  if (value) (keep ? localStorage : sessionStorage).setItem(KEY, value);
}

export const keyIsKept = () => localStorage.getItem(KEY) !== null;

/** An error with a message for the user. */
export class Trouble extends Error {
  constructor(words, status = 0) {
    super(words);
    this.status = status;
  }
}

/** `path` is relative to the page, which may be served under a prefix. `anonymous`: without the key. */
export async function call(path, { method = "GET", body, signal, anonymous = false } = {}) {
  const headers = {};
  if (key() && !anonymous) headers.Authorization = `Bearer ${key()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let reply;
  try {
    reply = await fetch(new URL(path, ROOT), { method, headers, signal, body: body && JSON.stringify(body), cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Trouble("The server cannot be reached. Is it still running?");
  }
  if (!reply.ok) throw await troubleOf(reply);
  return reply;
}

async function troubleOf(reply) {
  let said = "";
  try {
    said = (await reply.json()).error.message;
  } catch {
    said = `The server responded with status ${reply.status}.`;
  }
  return new Trouble(inPlainWords(reply.status, said, reply.headers.get("retry-after")), reply.status);
}

function inPlainWords(status, said, after) {
  switch (status) {
    case 401:
      return key() ? "The server does not accept this API key." : "This server needs an API key.";
    case 408:
      return `That took too long. ${said}`;
    case 429:
      return `The server is busy. ${said}${after ? ` Try again in ${after} s.` : ""}`;
    case 503:
      return `The engine is not available at the moment. ${said}`;
    default:
      return said;
  }
}

/** An error that comes in the middle of a stream. */
export const troubleIn = (error) => new Trouble(inPlainWords(error.type === "engine_unavailable" ? 503 : 0, error.message));

/** The events of a stream as [name, data]. Read by fetch rather than EventSource, which cannot send a key. */
export async function* eventsOf(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const events = (held + value).split("\n\n");
      held = events.pop();
      for (const event of events) {
        let name = "message";
        let data = "";
        for (const line of event.split("\n")) {
          if (line.startsWith("data: ")) data += line.slice(6);
          else if (line.startsWith("event: ")) name = line.slice(7);
        }
        if (data) yield [name, data]; // else a comment, which keeps the connection alive
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
