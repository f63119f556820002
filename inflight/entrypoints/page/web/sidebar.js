// `Sidebar`: the list of conversations, with search, export and import.

import { exported, imported } from "./conversation.js";
import { ask, button, fill, h, notify, save } from "./dom.js";

export class Sidebar {
  /** @param {object} actions {open(id), create(), removed(id)} */
  constructor(store, actions) {
    this._store = store;
    this._actions = actions;
    this._list = h("ul", { class: "list", "aria-label": "Conversations" });
    this.search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search conversations", oninput: () => this.update(this._current) });
    const picker = h("input", { type: "file", accept: ".json,application/json", hidden: true, tabindex: -1, "aria-hidden": "true",
      onchange: (event) => { this._import(event.target.files[0]); event.target.value = ""; } });
    this.element = h("aside", { class: "sidebar", "aria-label": "Conversations" },
      h("div", { class: "row" }, button("New chat", "New chat (Alt+N)", () => actions.create(), { class: "primary wide-button" })),
      this.search, this._list,
      h("div", { class: "row" }, button("Export", "Export all conversations", () => this._export()), button("Import", "Import conversations", () => picker.click()), picker));
  }

  /** Show the conversations that fit the search. `current`: the id of the open one. */
  update(current) {
    this._current = current;
    fill(this._list, this._store.found(this.search.value).map((conversation) => h("li", { class: conversation.id === current ? "current" : null },
      h("button", { type: "button", class: "title", "aria-current": conversation.id === current ? "true" : null,
        onclick: () => this._actions.open(conversation.id) }, conversation.title || "Untitled"),
      button("✎", `Rename ${conversation.title}`, () => this._rename(conversation)),
      button("×", `Delete ${conversation.title}`, () => this._remove(conversation)))));
  }

  async _rename(conversation) {
    const given = await ask("Rename the conversation", [{ name: "title", label: "Name", value: conversation.title }]);
    if (given === null) return;
    conversation.title = given.title;
    await this._store.put(conversation);
    this.update(this._current);
  }

  async _remove(conversation) {
    if ((await ask("Delete the conversation?", [], { ok: "Delete", about: conversation.title })) === null) return;
    await this._store.remove(conversation.id);
    this._actions.removed(conversation.id);
  }

  _export() {
    save("inflight-conversations.json", "application/json", exported([...this._store.conversations.values()]));
  }

  async _import(file) {
    if (file === undefined) return;
    try {
      const conversations = imported(await file.text());
      for (const conversation of conversations) await this._store.put(conversation);
      notify(`${conversations.length} conversations were imported.`);
      this.update(this._current);
    } catch (error) {
      notify(`${file.name} cannot be imported: ${error.message}`);
    }
  }
}
