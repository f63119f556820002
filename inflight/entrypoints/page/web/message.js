// `MessageView`: one message of a conversation, with what can be done with it.

import { copy } from "./code.js";
import { branchesAt } from "./conversation.js";
import { button, fill, h } from "./dom.js";
import { MarkdownView } from "./markdown.js";

const ROLES = { user: "You", assistant: "Model", tool: "Result" };
const ENDS = {
  stop: "", tool_calls: "", length: "reached the most tokens", stopped: "stopped", error: "", content_filter: "filtered",
};

export class MessageView {
  /**
   * @param {object} actions {edit(node, text), regenerate(node), remove(node), resume(node), result(node, call, text), branch(node, step)}
   */
  constructor(conversation, node, actions) {
    this.node = node;
    this._actions = actions;
    this._body = h("div", { class: "text" });
    this._markdown = new MarkdownView(this._body);
    this._thoughts = h("pre", {});
    this._summary = h("summary", {}, "Reasoning");
    this._reasoning = h("details", { class: "reasoning", hidden: true }, this._summary, this._thoughts);
    this._calls = h("div", { class: "calls" });
    this._problem = h("div", { class: "problem", role: "alert", hidden: true });
    this._figures = h("span", { class: "figures" });
    this._tools = h("div", { class: "row actions" });
    const role = ROLES[node.role] ?? node.role;
    this.element = h("article", { class: `message ${node.role}`, "aria-label": `${role}: message`, tabindex: -1, dataset: { id: node.id } },
      h("div", { class: "who" }, node.role === "tool" ? `${role} of ${node.name}` : role), files(node),
      node.role === "assistant" && this._reasoning, this._body, this._calls, this._problem, this._tools);
    this._branches = () => branchesAt(conversation, node);
    this.update(false);
  }

  /** Show what the node has now. `isRunning`: more comes. */
  update(isRunning, progress = null) {
    const { node } = this;
    if (node.role === "assistant") this._markdown.update(node.content, !isRunning);
    else if (this._body.textContent !== node.content) this._body.textContent = node.content;
    this._showReasoning(isRunning);
    this._showCalls(isRunning);
    this._problem.hidden = !node.error;
    if (this._problem.textContent !== (node.error ?? "")) this._problem.textContent = node.error ?? "";
    this.element.classList.toggle("running", isRunning);
    this._figures.textContent = isRunning || node.stats ? figures(node, isRunning, progress) : "";
    if (this._wasRunning !== isRunning) {
      this._wasRunning = isRunning;
      this._showActions(isRunning);
    }
  }

  _showReasoning(isRunning) {
    const text = this.node.reasoning ?? "";
    this._reasoning.hidden = !text;
    const shown = this._thoughts.textContent.length;
    if (text.length > shown) this._thoughts.append(text.slice(shown));
    const words = isRunning && !this.node.content ? "Reasoning …" : "Reasoning";
    if (this._summary.textContent !== words) this._summary.textContent = words;
  }

  _showCalls(isRunning) {
    const calls = this.node.calls ?? [];
    while (this._calls.childNodes.length < calls.length) {
      const call = calls[this._calls.childNodes.length];
      this._calls.append(h("div", { class: "call" }, h("strong", {}, call.name), h("pre", { tabindex: 0, role: "region", "aria-label": "arguments" }, "")));
    }
    calls.forEach((call, i) => {
      const row = this._calls.childNodes[i];
      const place = row.querySelector("pre");
      if (place.textContent !== call.arguments) place.textContent = call.arguments;
      if (!isRunning && !row.querySelector("button")) {
        row.append(button("Give the result", `Give the result of ${call.name}`, () => this._actions.result(this.node, call)));
      }
    });
  }

  _showActions(isRunning) {
    if (isRunning) {
      fill(this._tools, this._figures);
      return;
    }
    const { node } = this;
    const { index, count } = this._branches();
    const act = this._actions;
    const canGoOn = node.role === "assistant" && node.content && !node.calls?.length && ["length", "stopped", "error"].includes(node.finish);
    fill(this._tools,
      count > 1 && [button("‹", "Earlier branch", () => act.branch(node, -1)), h("span", { class: "branch" }, `${index + 1} / ${count}`),
        button("›", "Later branch", () => act.branch(node, 1))],
      button("Copy", "Copy this message", () => copy(node.content)),
      node.role === "assistant"
        ? button("Again", "Answer again, as another branch", () => act.regenerate(node))
        : button("Edit", "Edit, as another branch", () => this._edit()),
      canGoOn && button("Go on", "Continue this answer", () => act.resume(node)),
      button("Delete", "Delete this message and all behind it", () => act.remove(node)), this._figures);
  }

  _edit() {
    const area = h("textarea", { rows: Math.min(12, this.node.content.split("\n").length + 1), "aria-label": "Edit the message", value: this.node.content,
      onkeydown: (event) => {
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
        if (event.key === "Escape") { event.stopPropagation(); cancel(); }
      } });
    const cancel = () => { this._body.textContent = this.node.content; this._showActions(false); };
    const send = () => this._actions.edit(this.node, area.value);
    fill(this._body, area, h("div", { class: "row" }, button("Send", "Send as another branch", send, { class: "primary" }), button("Cancel", "Keep the message as it is", cancel)));
    area.focus();
  }
}

function files(node) {
  if (!node.files.length) return null;
  return h("div", { class: "files" }, node.files.map((file) => file.url === undefined
    ? h("details", { class: "file" }, h("summary", {}, file.name), h("pre", { tabindex: 0, role: "region", "aria-label": file.name }, file.text))
    : h("img", { src: file.url, alt: file.name })));
}

function rounded(number) {
  return number >= 100 ? number.toFixed(0) : number.toFixed(1);
}

function figures(node, isRunning, progress) {
  const stats = node.stats ?? {};
  if (isRunning && progress?.total) return `prompt ${progress.processed} of ${progress.total} tokens (${Math.floor((100 * progress.processed) / progress.total)} %)`;
  if (isRunning && !stats.tokens) return "waits for the first token …";
  const parts = [];
  if (stats.tokens) parts.push(`${stats.tokens} tokens`);
  if (stats.rate) parts.push(`${rounded(stats.rate)} tokens/s`);
  if (stats.first) parts.push(`first after ${stats.first.toFixed(2)} s`);
  if (stats.prompt) parts.push(`prompt ${stats.prompt}${stats.cached ? `, ${stats.cached} cached` : ""}${stats.promptRate ? `, ${rounded(stats.promptRate)}/s` : ""}`);
  if (stats.drafts) parts.push(`drafts ${stats.drafts}`);
  if (!isRunning && ENDS[node.finish]) parts.push(ENDS[node.finish]);
  return parts.join(" · ");
}
