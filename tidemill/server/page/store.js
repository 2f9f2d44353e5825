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

export function create() {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  const id = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "", changed: Date.now(), settings: read(SETTINGS) ?? {}, messages: [] };
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
