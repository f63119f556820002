// `EngineView`: what the engine does now. Nothing is asked of the server while this view is not shown.

import { getJson, send } from "./api.js";
import { button, fill, h, notify, save } from "./dom.js";
import { chromeTrace, Live } from "./live.js";
import { TimelineView } from "./timeline.js";

const MAX_ROWS = 200; // of requests that are shown
const CELL = 8; // pixels of a block, or fewer if there are many
const MAX_CELLS = 20000;

export class EngineView {
  /** @param shared see main.js */
  constructor(shared) {
    this._shared = shared;
    this._problem = h("p", { class: "problem", role: "alert", hidden: true });
    this._places = h("div", {});
    for (const name of ["resize", "themechange"]) addEventListener(name, () => this.element.isConnected && this._draw());
    this._live = new Live(() => shared.ofModel("v1/engine/live"), () => this._draw());
    this._replicas = new Map();
    this.element = h("div", { class: "engine" }, h("div", { class: "row" }, h("h2", {}, "Engine"), h("span", { class: "space" }),
      button("Save trace", "Save trace: the timelines as a file for Perfetto", () => save("inflight-trace.json", "application/json", chromeTrace(this._live.replicas)))),
    this._problem, this._places);
  }

  shown() {
    this._live.start();
  }

  hide() {
    this._live.stop();
  }

  /** Another model was chosen: a server with several has an engine for each. */
  modelChanged() {
    if (this._shared.models.length < 2) return;
    const isWatching = this._live.isWatching;
    this._live.stop();
    this._live.replicas.clear();
    this._replicas.clear();
    fill(this._places);
    if (isWatching) this._live.start();
  }

  _draw() {
    if (this._isDue) return;
    this._isDue = true;
    requestAnimationFrame(() => {
      this._isDue = false;
      this._problem.hidden = !this._live.problem;
      if (this._problem.textContent !== this._live.problem) this._problem.textContent = this._live.problem;
      for (const [number, replica] of this._live.replicas) {
        let view = this._replicas.get(number);
        if (view?.replica !== replica) {
          const made = new ReplicaView(number, replica, this._live, this._shared);
          if (view) view.element.replaceWith(made.element);
          else this._places.append(made.element);
          this._replicas.set(number, (view = made));
        }
        view.draw();
      }
    });
  }
}

class ReplicaView {
  constructor(number, replica, live, shared) {
    this.replica = replica;
    this._shared = shared;
    this._live = live;
    this._state = h("p", { class: "figures", role: "status" });
    this._cause = h("p", { class: "problem" });
    this._rows = new Map();
    this._body = h("tbody");
    this._count = h("span", { class: "faint" });
    this._canvas = h("canvas", { role: "img" });
    this._legend = h("div", { class: "legend" });
    this._timeline = new TimelineView(replica);
    this.element = h("section", { class: "replica", "aria-label": `Replica ${number}` }, h("h3", {}, `Replica ${number}`), this._state, this._cause,
      h("section", { "aria-label": "Requests" }, h("div", { class: "row" }, h("h3", {}, "Requests"), this._count),
        h("div", { class: "table", tabindex: 0, role: "region", "aria-label": "requests" }, h("table", {}, h("thead", {}, h("tr", {},
          ["Request", "State", "Prompt", "Cached", "Computed", "Emitted", "Drafts", "Blocks", ""].map((name) => h("th", { scope: "col", "aria-label": name || "End" }, name)))),
        this._body))),
      h("section", { "aria-label": "KV blocks" }, h("h3", {}, "KV blocks"), this._canvas, this._legend), this._timeline.element);
  }

  draw() {
    this._drawState();
    this._drawRequests();
    this._drawBlocks();
    this._timeline.draw();
  }

  _drawState() {
    const { state, faults, ranks, step, requests } = this.replica;
    const recoveries = Object.entries(faults.num_recoveries ?? {}).filter(([, count]) => count).map(([cause, count]) => `${cause} ${count}`);
    const parts = [state === "connected" ? faults.state : state, `${ranks} ${ranks === 1 ? "rank" : "ranks"}`, `step ${step}`, `epoch ${faults.epoch ?? 0}`,
      recoveries.length ? `recoveries: ${recoveries.join(", ")}` : "no recoveries"];
    if (faults.num_resumed_requests) parts.push(`${faults.num_resumed_requests} requests went on`);
    if (faults.spare_workers) parts.push(`${faults.spare_workers} spares`);
    setText(this._state, parts.join(" · "));
    this.element.classList.toggle("unwell", parts[0] !== "healthy");
    setText(this._count, `${requests.size}${requests.size > MAX_ROWS ? `, the first ${MAX_ROWS} are shown` : ""}`);
    const told = JSON.stringify([faults.epoch, faults.num_recoveries]);
    if (recoveries.length && told !== this._told) {
      this._told = told;
      getJson(this._shared.ofModel("fault_tolerance/status")).then((status) => setText(this._cause, `${status.last_cause} (${status.last_recovery_seconds.toFixed(1)} s)`), (error) => setText(this._cause, error.message));
    }
  }

  _drawRequests() {
    const shown = [...this.replica.requests].slice(0, MAX_ROWS);
    for (const [id, row] of this._rows) {
      if (!this.replica.requests.has(id)) {
        row.remove();
        this._rows.delete(id);
      }
    }
    for (const [id, columns] of shown) {
      let row = this._rows.get(id);
      if (row === undefined) {
        row = h("tr", {}, h("td", { class: "id", title: id }, shortId(id)), columns.map(() => h("td")),
          h("td", {}, button("End", `End ${shortId(id)}`, () => end(this._shared.ofModel("v1/engine/abort"), id))));
        this._rows.set(id, row);
        this._body.append(row);
      }
      columns.forEach((value, i) => setText(row.cells[i + 1], i === 0 ? this._live.states[value] : String(value)));
    }
  }

  _drawBlocks() {
    const { blocks } = this.replica;
    const names = this._live.blockStates;
    const counts = names.map(() => 0);
    for (let i = 1; i < blocks.length; i++) counts[blocks[i]] += 1; // the first is the dummy block
    const look = `${this.element.clientWidth} ${document.documentElement.dataset.theme}`;
    const words = names.map((name, i) => `${counts[i]} ${name}`);
    if (words.join() === this._shownWords && this._shownLook === look && this._same(blocks)) return;
    this._shownWords = words.join();
    this._shownLook = look;
    this._shown = blocks.slice();
    fill(this._legend, words.map((word, i) => h("span", {}, h("i", { class: `block-${names[i]}` }), word)));
    this._canvas.setAttribute("aria-label", `KV blocks: ${words.join(", ")}`);
    const colours = [...this._legend.querySelectorAll("i")].map((each) => getComputedStyle(each).backgroundColor);
    const width = Math.max(200, this.element.clientWidth);
    const group = Math.ceil(blocks.length / MAX_CELLS); // blocks of one cell, which shows the one that is used most
    const numCells = Math.ceil((blocks.length - 1) / group);
    const cell = Math.max(2, Math.min(CELL, Math.floor(Math.sqrt((width * 220) / Math.max(1, numCells)))));
    const perRow = Math.floor(width / cell);
    const height = Math.max(cell, Math.ceil(numCells / perRow) * cell);
    Object.assign(this._canvas, { width, height });
    const context = this._canvas.getContext("2d");
    for (let i = 0; i < numCells; i++) {
      let state = 0;
      for (let j = 1 + i * group; j < Math.min(blocks.length, 1 + (i + 1) * group); j++) state = Math.max(state, blocks[j]);
      context.fillStyle = colours[state];
      context.fillRect((i % perRow) * cell, Math.floor(i / perRow) * cell, cell > 3 ? cell - 1 : cell, cell > 3 ? cell - 1 : cell);
    }
  }

  _same(blocks) {
    return this._shown?.length === blocks.length && blocks.every((state, i) => state === this._shown[i]);
  }
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function shortId(id) {
  return id.length > 34 ? `${id.slice(0, 12)}…${id.slice(-20)}` : id;
}

async function end(path, id) {
  try {
    await send(path, { method: "POST", body: { request_id: id } });
  } catch (error) {
    notify(`The request was not ended: ${error.message}`);
  }
}
