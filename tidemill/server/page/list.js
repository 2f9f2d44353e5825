// The list of conversations: opening, renaming, deleting, searching, and moving them to and from files.

import * as chat from "./chat.js";
import { $, h, icon, toast } from "./dom.js";
import { numSet } from "./settings.js";
import * as store from "./store.js";
import { asJson, asMarkdown, download, fileName, importFile } from "./transfer.js";

const SEARCH_AFTER_MS = 120;
let showChat = () => {};

export function setUp({ opened }) {
  showChat = opened;
  $("new").addEventListener("click", () => open(store.create()));
  addEventListener("storage", (event) => {
    if (!store.isOurs(event.key)) return;
    const current = chat.currentConversation();
    const changed = !chat.isResponding(current.id) && event.key?.endsWith(current.id) && store.load(current.id);
    if (changed) chat.open(changed);
    draw();
  });
  setUpSearch();
  setUpTransfer();
}

export function open(conversation, index) {
  showChat(); // before it is drawn, so that it has a place to scroll in
  chat.open(conversation, index);
  draw();
  if (matchMedia("(hover: hover)").matches && index === undefined) $("text").focus(); // elsewhere a keyboard would cover what there is to read
}

export function draw() {
  const current = chat.currentConversation();
  const query = $("search").value.trim();
  const found = query ? store.search(query) : store.conversations().map((conversation) => ({ conversation }));
  $("conversations").replaceChildren(...found.map((one) => row(one, one.conversation.id === current.id)));
  $("search-says").textContent = query && !found.length ? "Nothing found." : "";
  $("settings-open").querySelector("b").textContent = numSet(current.settings) || "";
}

function row({ conversation, index, before, match, after }, isCurrent) {
  const title = conversation.title || "Untitled";
  const words = match && h("small", {}, before, h("mark", {}, match), after);
  const go = h("button", { class: "go", "aria-current": isCurrent ? "true" : null, onclick: () => choose(conversation.id, index) }, h("span", {}, title), words);
  const rename = h("button", { class: "icon", "aria-label": `Rename ${title}`, onclick: () => startRename() }, icon("rename"));
  const remove = h("button", { class: "icon", "aria-label": `Delete ${title}`, onclick: () => forget(conversation.id) }, icon("remove"));
  const item = h("li", { class: chat.isResponding(conversation.id) ? "responding" : "" }, go, rename, remove);
  function startRename() {
    const field = h("input", { value: title, maxLength: 120, "aria-label": "Title" });
    const done = () => {
      const latest = latestOf(conversation.id);
      if (latest && field.value.trim()) {
        latest.title = field.value.trim();
        store.save(latest);
      }
      draw();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") field.blur();
      if (event.key === "Escape") field.value = "";
      if (event.key === "Escape") field.blur();
    });
    field.addEventListener("blur", done, { once: true });
    item.replaceChildren(field);
    field.select();
  }
  return item;
}

const latestOf = (id) => (chat.currentConversation()?.id === id ? chat.currentConversation() : store.load(id));

function choose(id, index) {
  const conversation = store.load(id);
  if (conversation) open(conversation, index);
}

function forget(id) {
  const gone = latestOf(id);
  chat.stop(id);
  store.remove(id);
  if (chat.currentConversation().id === id) open(store.conversations()[0] ?? store.create());
  draw();
  toast("Conversation deleted.", "Undo", () => {
    store.save(gone);
    draw();
  });
}

// ---- search

function setUpSearch() {
  let timer;
  $("search").addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(draw, SEARCH_AFTER_MS);
  });
  $("search").addEventListener("keydown", (event) => {
    if (event.key === "Enter") {
      event.preventDefault();
      draw();
      $("conversations").querySelector(".go")?.click();
    } else if (event.key === "Escape") {
      $("search").value = "";
      draw();
    }
  });
}

// ---- files

function setUpTransfer() {
  const current = () => chat.currentConversation();
  const day = () => new Date().toISOString().slice(0, 10);
  const ways = {
    "export-markdown": () => download(`${fileName(current().title)}.md`, asMarkdown(current()), "text/markdown"),
    "export-json": () => download(`${fileName(current().title)}.json`, asJson([current()]), "application/json"),
    "export-all": () => download(`conversations-${day()}.json`, asJson(store.conversations()), "application/json"),
  };
  for (const [id, act] of Object.entries(ways)) $(id).addEventListener("click", act);
  $("export-open").addEventListener("click", () => {
    const isEmpty = !current().messages.length;
    $("export-markdown").disabled = $("export-json").disabled = isEmpty;
    $("export-all").disabled = !store.conversations().length;
    $("export-dialog").showModal();
  });
  $("import").addEventListener("click", () => $("import-file").click());
  $("import-file").addEventListener("change", async () => {
    const [file] = $("import-file").files;
    $("import-file").value = "";
    if (!file) return;
    try {
      toast(await importFile(file));
    } catch (error) {
      toast(error.message);
    }
    draw();
  });
}
