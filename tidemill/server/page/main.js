// The frame around the views: tabs, the list of conversations, theme, model, key.

import { call, key, keyIsKept, setKey } from "./api.js";
import * as chat from "./chat.js";
import { $, h, icon, toast } from "./dom.js";
import * as live from "./live.js";
import { numSet, showSettings } from "./settings.js";
import * as store from "./store.js";

const MODEL = "tidemill.model";
const THEME = "tidemill.theme";
const THEMES = ["auto", "light", "dark"];

// ---- theme

function setTheme(theme) {
  localStorage.setItem(THEME, theme);
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
  live.recolour();
}

function setUpTheme() {
  const theme = () => (THEMES.includes(localStorage.getItem(THEME)) ? localStorage.getItem(THEME) : "auto");
  $("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", live.recolour);
  setTheme(theme());
}

// ---- tabs

const TABS = ["chat", "engine"];

function showTab(name, focus = false) {
  for (const tab of TABS) {
    const chosen = tab === name;
    $(tab).hidden = !chosen;
    $(`tab-${tab}`).setAttribute("aria-selected", chosen);
    $(`tab-${tab}`).tabIndex = chosen ? 0 : -1;
    if (chosen && focus) $(`tab-${tab}`).focus();
  }
  history.replaceState(null, "", name === "chat" ? location.pathname : `#${name}`);
  live.setVisible(name === "engine");
}

function setUpTabs() {
  TABS.forEach((tab, i) => {
    $(`tab-${tab}`).addEventListener("click", () => showTab(tab));
    $(`tab-${tab}`).addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (by) showTab(TABS[(i + by + TABS.length) % TABS.length], true);
    });
  });
}

// ---- conversations

function drawList() {
  const current = chat.currentConversation();
  $("conversations").replaceChildren(...store.conversations().map((one) => row(one, one.id === current.id)));
  $("settings-open").querySelector("b").textContent = numSet(current.settings) || "";
}

function row(conversation, isCurrent) {
  const title = conversation.title || "Untitled";
  const go = h("button", { class: "go", "aria-current": isCurrent ? "true" : null, onclick: () => choose(conversation.id) }, title);
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
      drawList();
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

function choose(id) {
  const conversation = store.load(id);
  if (conversation) openConversation(conversation);
}

function openConversation(conversation) {
  chat.open(conversation);
  drawList();
  showTab("chat");
  setMenu(false);
  if (matchMedia("(hover: hover)").matches) $("text").focus(); // elsewhere a keyboard would cover what there is to read
}

function forget(id) {
  const gone = latestOf(id);
  chat.stop(id);
  store.remove(id);
  if (chat.currentConversation().id === id) openConversation(store.conversations()[0] ?? store.create());
  drawList();
  toast("Conversation deleted.", "Undo", () => {
    store.save(gone);
    drawList();
  });
}

function setMenu(isOpen) {
  document.body.classList.toggle("menu-open", isOpen);
  $("veil").hidden = !isOpen;
  $("menu").setAttribute("aria-expanded", isOpen);
}

function setUpConversations() {
  $("new").addEventListener("click", () => openConversation(store.create()));
  $("menu").addEventListener("click", () => setMenu(!document.body.classList.contains("menu-open")));
  $("veil").addEventListener("click", () => setMenu(false));
  addEventListener("keydown", (event) => event.key === "Escape" && setMenu(false));
  addEventListener("storage", (event) => {
    if (!store.isOurs(event.key)) return;
    const current = chat.currentConversation();
    const changed = !chat.isResponding(current.id) && event.key?.endsWith(current.id) && store.load(current.id);
    if (changed) chat.open(changed);
    drawList();
  });
}

// ---- settings

function setUpSettings() {
  const fill = () => {
    const conversation = chat.currentConversation();
    showSettings(conversation.settings, () => {
      store.keepSettings(conversation.settings);
      if (conversation.messages.length) store.save(conversation);
      drawList();
    });
  };
  $("settings-open").addEventListener("click", () => {
    fill();
    $("settings").showModal();
  });
  $("settings-reset").addEventListener("click", () => {
    chat.currentConversation().settings = {};
    store.keepSettings({});
    fill();
    drawList();
  });
}

// ---- key and model

function askForKey(why) {
  if ($("key-dialog").open) return;
  $("key-why").textContent = why;
  $("key").value = key();
  $("key-keep").checked = keyIsKept();
  $("key-dialog").showModal();
}

function setUpKey() {
  $("key-open").addEventListener("click", () => askForKey("Sent with every call to this server, and nowhere else."));
  $("key-forget").addEventListener("click", () => {
    $("key").value = "";
    setKey("");
  });
  $("key-dialog").querySelector("form").addEventListener("submit", () => {
    setKey($("key").value.trim(), $("key-keep").checked);
    loadModels();
    live.retry();
  });
}

async function loadModels() {
  try {
    const { data } = await (await call("/v1/models")).json();
    $("model").replaceChildren(...data.map(({ id }) => h("option", { value: id }, id)));
    const kept = localStorage.getItem(MODEL);
    if (data.some(({ id }) => id === kept)) $("model").value = kept;
    if (data.length > 1) live.retry();
  } catch (error) {
    if (error.status === 401) askForKey(error.message);
    else toast(error.message, "Try again", loadModels);
  }
}

setUpTheme();
setUpTabs();
setUpConversations();
setUpSettings();
setUpKey();
chat.setUp({ changed: drawList, keyNeeded: askForKey });
live.setUp({ keyNeeded: askForKey });
$("model").addEventListener("change", () => {
  localStorage.setItem(MODEL, $("model").value);
  live.retry();
});
const view = TABS.find((tab) => location.hash === `#${tab}`) ?? "chat";
openConversation(store.conversations()[0] ?? store.create());
showTab(view);
loadModels();
