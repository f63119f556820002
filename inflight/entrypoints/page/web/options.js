// `Options`: the dialog with the fields of a request: how tokens are drawn, the form of the answer, tools. Kept in the browser.

import { button, fill, h } from "./dom.js";

const KEPT = "inflight-options";
// field of the API: what it is called here, what it does, and the bounds of a number
const NUMBERS = {
  temperature: ["Temperature", "0 always takes the most probable token", 0, 100, "any"],
  top_p: ["Top p", "keeps the most probable tokens with this share together", 0, 1, "any"],
  top_k: ["Top k", "keeps this number of the most probable tokens", -1, null, 1],
  min_p: ["Min p", "drops tokens below this share of the best one", 0, 1, "any"],
  repetition_penalty: ["Repetition penalty", "above 1: fewer repeats, also of the prompt", 0, null, "any"],
  presence_penalty: ["Presence penalty", "for each token that was used", -2, 2, "any"],
  frequency_penalty: ["Frequency penalty", "for each use of a token", -2, 2, "any"],
  seed: ["Seed", "the same draws each time", null, null, 1],
  max_completion_tokens: ["Most tokens", "of an answer", 1, null, 1],
  min_tokens: ["Fewest tokens", "of an answer", 0, null, 1],
  thinking_token_budget: ["Tokens of thought", "the most for reasoning", -1, null, 1],
};
const EFFORTS = ["none", "minimal", "low", "medium", "high"];
const TEXTS = {
  stop: ["Stop strings", "One a line. The answer ends before them."],
  schema: ["JSON schema of the answer", "An object. The answer then is JSON that fits."],
  tools: ["Tools", "A JSON list of {\"type\": \"function\", \"function\": {…}}. You give the results of calls."],
  more: ["Further fields", "A JSON object, sent with each request: {\"logit_bias\": {\"7\": -5}}."],
};

export class Options {
  constructor() {
    try {
      this.values = JSON.parse(localStorage.getItem(KEPT)) ?? {};
    } catch {
      this.values = {};
    }
  }

  /**
   * The fields of a request.
   * @throws {Error} a text is no JSON of the right kind
   */
  fields() {
    const found = {};
    for (const name of Object.keys(NUMBERS)) if (this.values[name] !== undefined && this.values[name] !== "") found[name] = Number(this.values[name]);
    if (this.values.reasoning_effort) found.reasoning_effort = this.values.reasoning_effort;
    const stop = (this.values.stop ?? "").split("\n").filter(Boolean);
    if (stop.length) found.stop = stop;
    const schema = this._json("schema", (value) => typeof value === "object" && value !== null && !Array.isArray(value));
    if (schema) found.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
    const tools = this._json("tools", Array.isArray);
    if (tools?.length) found.tools = tools;
    return { ...found, ...this._json("more", (value) => typeof value === "object" && value !== null && !Array.isArray(value)) };
  }

  _json(name, fits) {
    const text = (this.values[name] ?? "").trim();
    if (!text) return undefined;
    let value;
    try {
      value = JSON.parse(text);
    } catch (error) {
      throw new Error(`${TEXTS[name][0]}: ${error.message}`);
    }
    if (!fits(value)) throw new Error(`${TEXTS[name][0]}: give ${name === "tools" ? "a list" : "an object"}.`);
    return value;
  }

  get count() {
    return Object.values(this.values).filter((value) => value !== undefined && value !== "").length;
  }

  /** Show the dialog. `conversation` has the system prompt; `onClose` is called with what was typed kept. */
  show(conversation, onClose) {
    const problem = h("p", { class: "problem", role: "alert" });
    const keep = (name, value) => {
      this.values[name] = value;
      localStorage.setItem(KEPT, JSON.stringify(this.values));
    };
    const number = ([name, [label, about, min, max, step]]) => h("label", { class: "field", title: about },
      h("span", {}, label), h("input", { type: "number", min, max, step, value: this.values[name] ?? "", placeholder: "model's own",
        "aria-label": label, "aria-description": about, oninput: (event) => keep(name, event.target.value) }));
    const text = ([name, [label, about]]) => h("label", { class: "field tall" }, h("span", {}, label), h("small", {}, about),
      h("textarea", { rows: 3, spellcheck: "false", "aria-label": label, value: this.values[name] ?? "",
        oninput: (event) => keep(name, event.target.value) }));
    const effort = h("select", { "aria-label": "Reasoning effort", onchange: (event) => keep("reasoning_effort", event.target.value) },
      h("option", { value: "" }, "model's own"), EFFORTS.map((each) => h("option", { value: each }, each)));
    effort.value = this.values.reasoning_effort ?? "";
    const system = h("textarea", { rows: 3, "aria-label": "System prompt", value: conversation.system,
      oninput: (event) => { conversation.system = event.target.value; } });
    const close = () => {
      try {
        this.fields();
      } catch (error) {
        problem.textContent = error.message;
        return;
      }
      dialog.close();
      dialog.remove();
      onClose();
    };
    const reset = () => {
      this.values = {};
      localStorage.removeItem(KEPT);
      dialog.remove();
      this.show(conversation, onClose);
    };
    const dialog = h("dialog", { class: "options", "aria-labelledby": "options-title", oncancel: (event) => { event.preventDefault(); close(); } });
    fill(dialog, h("h2", { id: "options-title" }, "Options"),
      h("label", { class: "field tall" }, h("span", {}, "System prompt"), h("small", {}, "Of this conversation."), system),
      h("div", { class: "numbers" }, Object.entries(NUMBERS).map(number),
        h("label", { class: "field" }, h("span", {}, "Reasoning effort"), effort)),
      Object.entries(TEXTS).map(text), problem,
      h("div", { class: "row end" }, button("Reset", "Leave all fields to the model", reset), button("Close", "Close the options", close, { class: "primary" })));
    document.body.append(dialog);
    dialog.showModal();
    system.focus();
  }
}
