// `ChatView`: a conversation with the model.

import { Answer } from "./answer.js";
import { Composer } from "./composer.js";
import { addNode, branchesAt, messagesOf, newConversation, removeNode, shownPath } from "./conversation.js";
import { ask, button, fill, h, notify } from "./dom.js";
import { MessageView } from "./message.js";
import { Options } from "./options.js";
import { Sidebar } from "./sidebar.js";

const KEEP_SECONDS = 1; // between two writes of an answer that grows
const NEAR_END = 80; // pixels: the view follows an answer only if its end is in sight

export class ChatView {
  constructor(shared) {
    this._shared = shared;
    this._options = new Options();
    this._answer = null;
    this._views = new Map();
    this._messages = h("div", { class: "messages", role: "log", "aria-label": "Messages", tabindex: 0 });
    this._composer = new Composer({
      send: (text, files) => this._send(text, files), stop: () => this._answer?.stop(),
      options: () => this._options.show(this._conversation, () => this._keep()), takesImages: () => this._takesImages(),
    });
    this._sidebar = new Sidebar(shared.store, {
      open: (id) => this._open(shared.store.conversations.get(id)), create: () => this._create(), removed: (id) => this._removed(id),
    });
    this._toList = button("☰", "Conversations", () => this.element.classList.toggle("with-list"), { class: "to-list" });
    this.element = h("div", { class: "chat" }, this._sidebar.element,
      h("section", { class: "conversation", "aria-label": "Conversation" }, this._toList, this._messages, this._composer.element));
    document.addEventListener("keydown", (event) => this._key(event));
    addEventListener("beforeunload", () => this._answer !== null && this._shared.store.put(this._conversation));
    const [newest] = shared.store.found("");
    this._open(newest ?? newConversation());
  }

  shown() {
    this._composer.area.focus();
  }

  _key(event) {
    if (!this.element.isConnected || document.querySelector("dialog[open]")) return;
    if (event.key === "Escape" && this._answer !== null) this._answer.stop();
    else if (event.altKey && event.key.toLowerCase() === "n") { event.preventDefault(); this._create(); }
    else if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
      event.preventDefault();
      this.element.classList.add("with-list");
      this._sidebar.search.focus();
    }
  }

  _takesImages() {
    return this._shared.model?.input_modalities?.includes("image") ?? false;
  }

  _create() {
    this._open(newConversation());
    this._composer.area.focus();
  }

  _removed(id) {
    if (id === this._conversation.id) this._open(newConversation());
    else this._sidebar.update(this._conversation.id);
  }

  _open(conversation) {
    this._answer?.stop();
    this._conversation = conversation;
    this.element.classList.remove("with-list");
    this._views.clear();
    this._showAll();
    this._sidebar.update(conversation.id);
    this._messages.scrollTop = this._messages.scrollHeight;
  }

  async _keep() {
    if (Object.keys(this._conversation.nodes).length) await this._shared.store.put(this._conversation);
    this._sidebar.update(this._conversation.id);
  }

  // -- messages ----------------------------------------------------------------------------------------------------

  _showAll() {
    const path = shownPath(this._conversation);
    for (const node of path) if (!this._views.has(node.id)) this._views.set(node.id, new MessageView(this._conversation, node, this._actions()));
    const shown = path.map((node) => this._views.get(node.id).element);
    fill(this._messages, shown.length ? shown : h("p", { class: "empty" }, "Ask something. Enter sends, Shift+Enter begins a new line."));
  }

  /** Make the views of all messages again, because branches or what can be done with them has changed. */
  _renew() {
    this._views.clear();
    this._showAll();
  }

  _actions() {
    const unlessBusy = (act) => (...given) => (this._answer === null ? act(...given) : notify("Wait for the answer, or stop it."));
    return {
      edit: unlessBusy((node, text) => this._ask(addNode(this._conversation, node.parent, { role: node.role, files: node.files, callId: node.callId, name: node.name, content: text }))),
      regenerate: unlessBusy((node) => this._ask(this._conversation.nodes[node.parent] ?? null)),
      resume: unlessBusy((node) => this._resume(node)),
      remove: unlessBusy((node) => { removeNode(this._conversation, node); this._renew(); this._keep(); }),
      branch: unlessBusy((node, step) => { branchesAt(this._conversation, node).choose(step); this._renew(); this._keep(); }),
      result: unlessBusy((node, call) => this._giveResult(node, call)),
    };
  }

  _send(text, files) {
    const last = shownPath(this._conversation).at(-1);
    const node = addNode(this._conversation, last?.id, { content: text, files });
    return this._ask(node);
  }

  async _giveResult(node, call) {
    const given = await ask(`Result of ${call.name}`, [{ name: "result", label: call.arguments.slice(0, 200) }], { ok: "Give" });
    if (given === null) return;
    let last = node;
    for (const each of shownPath(this._conversation)) if (each.role === "tool") last = each.parent === last.id ? each : last;
    const result = addNode(this._conversation, last.id, { role: "tool", content: given.result, callId: call.id, name: call.name });
    const results = shownPath(this._conversation).filter((each) => each.role === "tool").map((each) => each.callId);
    if (node.calls.every((each) => results.includes(each.id))) this._ask(result);
    else { this._renew(); this._keep(); }
  }

  // -- answers -----------------------------------------------------------------------------------------------------

  /** Let the model answer `last`, as another branch if there is an answer. Returns whether the request was sent. */
  _ask(last) {
    let fields;
    try {
      fields = this._options.fields();
    } catch (error) {
      notify(error.message);
      this._renew();
      return true;
    }
    const messages = messagesOf(this._conversation, last ?? undefined);
    const node = addNode(this._conversation, last?.id, { role: "assistant", reasoning: "" });
    this._renew();
    this._run(node, { ...fields, model: this._shared.model?.id, messages });
    return true;
  }

  _resume(node) {
    const messages = messagesOf(this._conversation, node);
    this._run(node, { ...this._options.fields(), model: this._shared.model?.id, messages, continue_final_message: true, add_generation_prompt: false });
  }

  async _run(node, body) {
    const conversation = this._conversation;
    const view = this._views.get(node.id);
    let isDrawn = true;
    let cost = 0;
    let kept = performance.now();
    const draw = () => {
      const begin = performance.now();
      const isAtEnd = this._messages.scrollHeight - this._messages.scrollTop - this._messages.clientHeight < NEAR_END;
      view.update(this._answer === answer, answer.progress);
      if (isAtEnd) this._messages.scrollTop = this._messages.scrollHeight;
      cost = performance.now() - begin;
      isDrawn = true;
    };
    const answer = new Answer(node, body, () => {
      if (!isDrawn) return;
      isDrawn = false;
      // drawing may take a quarter of the time, so that the page answers its user whatever the answer's length
      setTimeout(() => requestAnimationFrame(draw), 3 * cost);
      if (performance.now() - kept > KEEP_SECONDS * 1000) {
        kept = performance.now();
        this._shared.store.put(conversation);
      }
    });
    this._answer = answer;
    this._composer.isRunning = true;
    view.update(true);
    this._messages.scrollTop = this._messages.scrollHeight;
    await answer.run();
    if (this._answer === answer) {
      this._answer = null;
      this._composer.isRunning = false;
    }
    conversation.updated = Date.now();
    await this._shared.store.put(conversation);
    if (this._conversation !== conversation) return;
    draw();
    this._sidebar.update(conversation.id);
  }
}
