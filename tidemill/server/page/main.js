// The frame around the views: tabs, theme, settings, model, key.

import { call, key, keyIsKept, setKey } from "./api.js";
import * as chat from "./chat.js";
import { $, h, toast } from "./dom.js";
import * as list from "./list.js";
import * as live from "./live.js";
import { setDefaults, showSettings } from "./settings.js";
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
  history.replaceState(null, "", name === "chat" ? location.pathname + location.search : `#${name}`);
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

// ---- conversations, on a small screen

function setMenu(isOpen) {
  document.body.classList.toggle("menu-open", isOpen);
  $("veil").hidden = !isOpen;
  $("menu").setAttribute("aria-expanded", isOpen);
}

function setUpMenu() {
  $("menu").addEventListener("click", () => setMenu(!document.body.classList.contains("menu-open")));
  $("veil").addEventListener("click", () => setMenu(false));
  addEventListener("keydown", (event) => event.key === "Escape" && setMenu(false));
}

function showChat() {
  showTab("chat");
  setMenu(false);
}

// ---- settings

function setUpSettings() {
  const fill = () => {
    const conversation = chat.currentConversation();
    showSettings(conversation.settings, () => {
      store.keepSettings(conversation.settings);
      if (conversation.messages.length) store.save(conversation);
      list.draw();
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
    list.draw();
  });
}

// ---- key and model

function askForKey(why) {
  $("key-open").hidden = false;
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

let models = [];

/** Asked without the key first: a server that answers needs none, and then there is no place to enter one. */
async function fetchModels() {
  try {
    return await call("v1/models", { anonymous: true });
  } catch (error) {
    if (error.status !== 401 || !key()) throw error;
    $("key-open").hidden = false;
    return call("v1/models");
  }
}

async function loadModels() {
  try {
    models = (await (await fetchModels()).json()).data;
    $("model").replaceChildren(...models.map(({ id }) => h("option", { value: id }, id)));
    const kept = localStorage.getItem(MODEL);
    if (models.some(({ id }) => id === kept)) $("model").value = kept;
    chooseModel();
    if (models.length > 1) live.retry();
  } catch (error) {
    if (error.status === 401) askForKey(error.message);
    else toast(error.message, "Try again", loadModels);
  }
}

const chooseModel = () => setDefaults(models.find(({ id }) => id === $("model").value));

setUpTheme();
setUpTabs();
setUpMenu();
list.setUp({ opened: showChat });
setUpSettings();
setUpKey();
chat.setUp({ changed: list.draw, keyNeeded: askForKey });
live.setUp({ keyNeeded: askForKey });
$("model").addEventListener("change", () => {
  localStorage.setItem(MODEL, $("model").value);
  live.retry();
  chooseModel();
});
const view = TABS.find((tab) => location.hash === `#${tab}`) ?? "chat";
list.open(store.conversations()[0] ?? store.create());
showTab(view);
loadModels();
