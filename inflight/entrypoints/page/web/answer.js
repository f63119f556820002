// `Answer`: one request to /v1/chat/completions. It writes what comes into a node of the conversation, and measures.

import { events, send, ServerError } from "./api.js";

export class Answer {
  /**
   * @param {object} node the answer's message; changed as chunks come
   * @param {object} body of the request, without the fields of streams
   * @param {() => void} onChange called after each chunk
   */
  constructor(node, body, onChange) {
    this._node = node;
    this._body = { ...body, stream: true, timings_per_token: true, return_progress: true,
      stream_options: { include_usage: true, continuous_usage_stats: true } };
    this._onChange = onChange;
    this._abort = new AbortController();
    this.progress = null; // {total, cache, processed} of the prompt, until the first token
  }

  stop() {
    this._abort.abort();
  }

  /** Returns when the answer has ended, in whichever way. Errors are written into the node. */
  async run() {
    const node = this._node;
    this._begin = performance.now();
    node.error = "";
    try {
      const response = await send("v1/chat/completions", { method: "POST", body: this._body, signal: this._abort.signal });
      let isWhole = false;
      for await (const data of events(response)) {
        if (data === "[DONE]") {
          isWhole = true;
          break;
        }
        this._take(JSON.parse(data));
        this._onChange();
      }
      if (!isWhole) throw new ServerError(0, "The server ended the answer before its end.");
    } catch (error) {
      if (error.name === "AbortError") node.finish = "stopped";
      else {
        node.finish = "error";
        node.error = error instanceof ServerError ? error.message : `The answer could not be read: ${error.message}`;
      }
    }
    node.seconds = (performance.now() - this._begin) / 1000;
    this._onChange();
  }

  _take(chunk) {
    const node = this._node;
    if (chunk.error) throw new ServerError(500, chunk.error.message ?? "The request has failed.");
    if (chunk.prompt_progress) this.progress = chunk.prompt_progress;
    if (chunk.usage) this._count(chunk.usage);
    if (chunk.timings) node.stats = { ...node.stats, ...shortened(chunk.timings) };
    const [choice] = chunk.choices ?? [];
    if (choice === undefined) return;
    if (choice.finish_reason) node.finish = choice.finish_reason;
    const delta = choice.delta ?? {};
    node.content += delta.content ?? "";
    node.reasoning = (node.reasoning ?? "") + (delta.reasoning_content ?? delta.reasoning ?? "");
    for (const call of delta.tool_calls ?? []) this._takeCall(call);
  }

  _takeCall(delta) {
    const calls = (this._node.calls ??= []);
    const call = (calls[delta.index] ??= { id: "", name: "", arguments: "" });
    call.id = delta.id ?? call.id;
    call.name = delta.function?.name ?? call.name;
    call.arguments += delta.function?.arguments ?? "";
  }

  /** What the page can measure by itself, from the counts that each chunk has. */
  _count(usage) {
    const now = performance.now();
    const tokens = usage.completion_tokens ?? 0;
    if (tokens > 0 && this._first === undefined) {
      this._first = { now, tokens };
      this.progress = null;
    }
    const seconds = this._first === undefined ? 0 : (now - this._first.now) / 1000;
    this._node.stats = {
      ...this._node.stats, prompt: usage.prompt_tokens, cached: usage.prompt_tokens_details?.cached_tokens ?? 0, tokens,
      first: this._first === undefined ? null : (this._first.now - this._begin) / 1000,
      rate: seconds > 0.05 ? (tokens - this._first.tokens) / seconds : (this._node.stats?.rate ?? null),
    };
  }
}

function shortened(timings) {
  const found = {};
  if (timings.predicted_n > 1) found.rate = timings.predicted_per_second;
  if (timings.prompt_n > 0 && timings.prompt_ms > 0) found.promptRate = timings.prompt_per_second;
  if (timings.draft_n > 0) found.drafts = `${timings.draft_n_accepted}/${timings.draft_n}`;
  return found;
}
