// `Live`: what /v1/engine/live has told: a snapshot, then deltas. Only this file knows the form of its events.

import { events, send } from "./api.js";

const MAX_SPANS = 60000; // kept for each replica, for the timeline and the file with the trace
const RETRY_SECONDS = 2;
const IDLE = 5e6; // microseconds without a span after which a lane does nothing

/** One replica. Spans are [lane, phase, step, begin, duration], in microseconds; lane 0 is the engine, 1 + r rank r. */
class Replica {
  state = "";
  faults = {};
  step = -1;
  ranks = 0;
  requests = new Map(); // id -> columns
  blocks = new Uint8Array(0);
  spans = [];
  newest = 0; // the end of the last span
  ends = new Map(); // lane -> the end of its last span

  /** Up to when all lanes are known that do something: ranks are asked for theirs after the engine. */
  get known() {
    return Math.min(this.newest, ...[...this.ends.values()].filter((end) => end > this.newest - IDLE));
  }

  take(news) {
    for (const name of ["state", "faults", "step", "ranks"]) if (name in news) this[name] = news[name];
    if (news.num_blocks !== undefined) this.blocks = new Uint8Array(news.num_blocks);
    for (const id of news.gone ?? []) this.requests.delete(id);
    for (const [id, columns] of Object.entries(news.requests ?? {})) this.requests.set(id, columns);
    for (const [first, digits] of news.blocks ?? []) {
      for (let i = 0; i < digits.length; i++) this.blocks[first + i] = digits.charCodeAt(i) - 48;
    }
    for (const span of news.spans ?? []) {
      this.spans.push(span);
      const end = span[3] + span[4];
      this.newest = Math.max(this.newest, end);
      this.ends.set(span[0], Math.max(this.ends.get(span[0]) ?? 0, end));
    }
    if (this.spans.length > MAX_SPANS) this.spans.splice(0, this.spans.length - MAX_SPANS);
  }
}

export class Live {
  columns = [];
  states = [];
  blockStates = [];
  replicas = new Map(); // number -> Replica
  problem = ""; // why there is no news; "" while there is

  /**
   * @param {() => string} path of the feed
   * @param {() => void} onNews called after each event
   */
  constructor(path, onNews) {
    this._path = path;
    this._onNews = onNews;
    this._abort = null;
  }

  get isWatching() {
    return this._abort !== null;
  }

  /** Read until `stop`. A lost connection is tried again. */
  async start() {
    if (this._abort !== null) return;
    const abort = (this._abort = new AbortController());
    while (!abort.signal.aborted) {
      try {
        const response = await send(this._path(), { signal: abort.signal });
        for await (const data of events(response)) this._take(JSON.parse(data));
        this.problem = "The server has ended the feed.";
      } catch (error) {
        if (error.name === "AbortError") return;
        this.problem = error.message;
        if (error.status === 401) {
          this.stop();
          this._onNews();
          return;
        }
      }
      this._onNews();
      await new Promise((resolve) => setTimeout(resolve, RETRY_SECONDS * 1000));
    }
  }

  /** Nobody watches any more: the server makes no more events. */
  stop() {
    this._abort?.abort();
    this._abort = null;
  }

  _take(event) {
    if (event.error) throw new Error(event.error.message);
    if (event.type === "snapshot") {
      this.columns = event.columns;
      this.states = event.states;
      this.blockStates = event.block_states;
      this.replicas.clear();
    }
    for (const news of event.engines) {
      if (!this.replicas.has(news.engine)) this.replicas.set(news.engine, new Replica());
      this.replicas.get(news.engine).take(news);
    }
    this.problem = "";
    this._onNews();
  }
}

/** The spans of all replicas in Chrome's trace format, which Perfetto and chrome://tracing show. */
export function chromeTrace(replicas) {
  const entries = [];
  for (const [number, replica] of replicas) {
    const lanes = new Set(replica.spans.map(([lane]) => lane));
    for (const lane of lanes) {
      const pid = number * 1000 + lane;
      const name = `${replicas.size > 1 ? `replica ${number} ` : ""}${laneName(lane)}`;
      entries.push({ name: "process_name", ph: "M", pid, args: { name } }, { name: "process_sort_index", ph: "M", pid, args: { sort_index: pid } });
    }
    const begin = replica.spans.reduce((least, span) => Math.min(least, span[3]), Infinity);
    for (const [lane, phase, step, at, duration] of replica.spans) {
      entries.push({ name: `${phase} ${step}`, cat: phase, ph: "X", pid: number * 1000 + lane, tid: phase, ts: at - begin, dur: duration, args: { step } });
    }
  }
  return JSON.stringify({ displayTimeUnit: "ms", traceEvents: entries });
}

export function laneName(lane) {
  return lane === 0 ? "engine" : `rank ${lane - 1}`;
}
