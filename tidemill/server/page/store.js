// Conversations, kept in this browser: one entry each, so that two tabs do not overwrite each other's.

const PREFIX = "tidemill.chat.";
const SETTINGS = "tidemill.settings";

const read = (name) => {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null; // not ours, or cut off
  }
};

export function conversations() {
  const names = Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
  const found = names.map(read).filter((one) => one && Array.isArray(one.messages));
  return found.sort((a, b) => b.changed - a.changed);
}

export const load = (id) => read(PREFIX + id);

export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function create() {
  return { id: newId(), title: "", changed: Date.now(), settings: read(SETTINGS) ?? {}, messages: [] };
}

/** False: the browser has no room left. */
export function save(conversation) {
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    return true;
  } catch {
    return false;
  }
}

export const remove = (id) => localStorage.removeItem(PREFIX + id);

/** What the next conversation begins with. */
export const keepSettings = (settings) => localStorage.setItem(SETTINGS, JSON.stringify(settings));

export const isOurs = (name) => name === null || name.startsWith(PREFIX);

const AROUND = 34; // characters of a text beside what was found

/** Conversations that contain a text, in any case: each with the first message that does (-1: its title only) and the words around it. */
export function search(query) {
  const wanted = query.toLowerCase();
  const found = [];
  for (const conversation of conversations()) {
    const textOf = (message) => [message.content, ...(message.files ?? []).map(({ name, text }) => `${name}\n${text}`)].join("\n");
    const index = conversation.messages.findIndex((message) => textOf(message).toLowerCase().includes(wanted));
    if (index >= 0) found.push({ conversation, index, ...excerpt(textOf(conversation.messages[index]), wanted) });
    else if ((conversation.title ?? "").toLowerCase().includes(wanted)) found.push({ conversation, index });
  }
  return found;
}

function excerpt(text, wanted) {
  const start = text.toLowerCase().indexOf(wanted);
  const end = start + wanted.length;
  const line = (part) => part.replace(/\s+/g, " ");
  const before = line(text.slice(Math.max(start - AROUND, 0), start));
  return { before: start > AROUND ? `…${before}` : before, match: line(text.slice(start, end)), after: line(text.slice(end, end + 2 * AROUND)) };
}
