// Starts the page: asks for the models, shows whether the server is ready, and chooses the view that the address names.

import { getJson, send, ServerError } from "./api.js";
import { ChatView } from "./chat.js";
import { fill, h, notify } from "./dom.js";
import { EngineView } from "./engine.js";
import { Store } from "./store.js";

const READY_SECONDS = 5;
const THEMES = { auto: "◐", light: "☀", dark: "☾" };

/** What the views share. */
const shared = {
  store: new Store(() => notify("This browser keeps no conversations. Export those that you need.")),
  models: [],
  /** The card of the chosen model, or null before the server has said which it has. */
  get model() {
    return this.models.find((model) => model.id === picker.value) ?? null;
  },
  /** A path about an engine: that of the chosen model, if the server has several. */
  ofModel(path) {
    return this.models.length > 1 ? `${path}?model=${encodeURIComponent(picker.value)}` : path;
  },
};
const picker = document.getElementById("model");
const state = document.getElementById("state");
const view = document.getElementById("view");
const VIEWS = { chat: () => new ChatView(shared), engine: () => new EngineView(shared) };
const made = {};

function show() {
  const name = location.hash.slice(1) in VIEWS ? location.hash.slice(1) : "chat";
  made[name] ??= VIEWS[name]();
  for (const [other, each] of Object.entries(made)) if (other !== name) each.hide?.();
  fill(view, made[name].element);
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  made[name].shown?.();
}

/** A server with several models says whether each is loaded. */
function labelOf(model) {
  const state = model.status?.failed ? "failed" : model.status?.value ?? "loaded";
  return state === "loaded" ? model.id : `${model.id} (${state})`;
}

/** Ask for the models. The options of the picker stay as they are while their names do, so that an open list stays open. */
async function loadModels() {
  const { data } = await getJson("v1/models");
  const isSame = data.length === shared.models.length && data.every((model, i) => model.id === shared.models[i].id);
  shared.models = data;
  if (isSame) {
    data.forEach((model, i) => {
      if (picker.options[i].textContent !== labelOf(model)) picker.options[i].textContent = labelOf(model);
    });
    return;
  }
  const kept = localStorage.getItem("inflight-model");
  fill(picker, data.map((model) => h("option", { value: model.id }, labelOf(model))));
  picker.value = data.some((model) => model.id === kept) ? kept : data[0]?.id ?? "";
  picker.dispatchEvent(new Event("change"));
}

/** Whether the server takes requests, asked again and again: after a new start the models may be others. */
async function watchState() {
  let wasReady = false;
  for (;;) {
    let text = "ready";
    try {
      await send("ready", { asksKey: false });
      if (!wasReady || shared.models.some((model) => model.status !== undefined)) {
        wasReady = true;
        await loadModels();
      }
    } catch (error) {
      if (!(error instanceof ServerError)) throw error;
      if (error.status !== 401) wasReady = false;
      text = error.status === 0 ? "does not answer" : error.message;
    }
    if (state.textContent !== text) state.textContent = text;
    state.dataset.ready = text === "ready";
    await new Promise((resolve) => setTimeout(resolve, READY_SECONDS * 1000));
  }
}

function showTheme() {
  document.getElementById("theme").textContent = THEMES[document.documentElement.dataset.theme];
}

document.getElementById("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length];
  document.documentElement.dataset.theme = next;
  localStorage.setItem("inflight-theme", next);
  showTheme();
  dispatchEvent(new Event("themechange"));
});
picker.addEventListener("change", () => {
  localStorage.setItem("inflight-model", picker.value);
  for (const each of Object.values(made)) each.modelChanged?.();
});
showTheme();
await shared.store.open();
addEventListener("hashchange", show);
show();
watchState();
