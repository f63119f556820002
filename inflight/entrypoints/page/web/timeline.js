// `TimelineView`: what the engine and each rank did when, as a drawing that can be zoomed, moved and stopped.

import { button, fill, h } from "./dom.js";
import { laneName } from "./live.js";

const LANE = 34; // pixels
const LEFT = 64; // for the names of lanes
const AXIS = 18;
const LATE = 10e6; // microseconds: spans come in the order of their ends, but those of ranks come later than the engine's
const SECONDS = { first: 1, least: 0.005, most: 30 };
// phase -> colour, in a light and in a dark page
const COLOURS = {
  plan: ["#1f5fbf", "#7db0ff"], mask: ["#8a2f9e", "#d6a0ff"], wait: ["#d5d9e0", "#343943"], commit: ["#1d7a3a", "#7fd39a"],
  idle: ["#eef0f3", "#23272f"], prepare: ["#b86a00", "#f0b47a"], receive: ["#7a6a00", "#d8c96a"], forward: ["#1f5fbf", "#7db0ff"],
  sample: ["#8a2f9e", "#d6a0ff"], drain: ["#1d7a3a", "#7fd39a"], send: ["#7a6a00", "#d8c96a"],
};

export class TimelineView {
  constructor(replica) {
    this._replica = replica;
    this._seconds = SECONDS.first;
    this._end = null; // microseconds at the right edge while it is stopped; null: the newest
    this._canvas = h("canvas", { tabindex: 0, role: "img", onkeydown: (event) => this._key(event), onclick: (event) => this._pick(event),
      onwheel: (event) => { event.preventDefault(); this._zoom(event.deltaY > 0 ? 1.25 : 0.8); } });
    this._pause = button("Pause", "Stop or follow the timeline (Space)", () => this._toggle());
    this._said = h("span", { class: "faint", role: "status" });
    this._legend = h("div", { class: "legend" });
    this.element = h("section", { "aria-label": "Timeline" }, h("div", { class: "row" }, h("h3", {}, "Timeline"), h("span", { class: "space" }),
      this._pause, button("−", "Show more time (-)", () => this._zoom(2)), button("+", "Show less time (+)", () => this._zoom(0.5)),
      button("‹", "Earlier (left)", () => this._move(-0.25)), button("›", "Later (right)", () => this._move(0.25))),
    this._canvas, this._legend, this._said);
  }

  _key(event) {
    const acts = { " ": () => this._toggle(), "+": () => this._zoom(0.5), "-": () => this._zoom(2), ArrowLeft: () => this._move(-0.25), ArrowRight: () => this._move(0.25) };
    if (!(event.key in acts)) return;
    event.preventDefault();
    acts[event.key]();
  }

  _toggle() {
    this._end = this._end === null ? this._replica.known : null;
    this._pause.textContent = this._end === null ? "Pause" : "Follow";
    this.draw();
  }

  _zoom(factor) {
    this._seconds = Math.min(SECONDS.most, Math.max(SECONDS.least, this._seconds * factor));
    this.draw();
  }

  _move(share) {
    if (this._end === null) this._toggle();
    this._end = Math.min(this._replica.known, this._end + share * this._seconds * 1e6);
    this.draw();
  }

  _pick(event) {
    const box = this._canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const found = this._drawn?.findLast(({ left, right, top }) => x >= left - 2 && x <= right + 2 && y >= top && y < top + LANE);
    if (found === undefined) return;
    const [lane, phase, step, , duration] = found.span;
    this._said.textContent = `${laneName(lane)}: ${phase} of step ${step}, ${(duration / 1000).toFixed(2)} ms`;
  }

  draw() {
    const spans = this._replica.spans;
    const lanes = [...new Set([0, ...spans.slice(-2000).map(([lane]) => lane)])].sort((a, b) => a - b);
    const width = Math.max(200, this.element.clientWidth);
    const height = lanes.length * LANE + AXIS;
    const scale = devicePixelRatio || 1;
    if (this._canvas.width !== width * scale || this._canvas.height !== height * scale) {
      Object.assign(this._canvas, { width: width * scale, height: height * scale });
      this._canvas.style.setProperty("height", `${height}px`);
    }
    const context = this._canvas.getContext("2d");
    const style = getComputedStyle(this._canvas);
    const { theme } = document.documentElement.dataset;
    const isDark = theme === "dark" || (theme === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "12px system-ui";
    const end = this._end ?? this._replica.known;
    const begin = end - this._seconds * 1e6;
    const place = (at) => LEFT + ((at - begin) / (end - begin)) * (width - LEFT);
    this._drawn = [];
    const phases = new Set();
    const text = style.color;
    context.fillStyle = text;
    lanes.forEach((lane, i) => context.fillText(laneName(lane), 2, i * LANE + LANE / 2 + 4));
    for (let i = spans.length - 1; i >= 0; i--) {
      const span = spans[i];
      const [lane, phase, , at, duration] = span;
      if (at > end || at + duration < begin) {
        if (at + duration < begin - LATE) break;
        continue;
      }
      phases.add(phase);
      const left = Math.max(LEFT, place(at));
      const right = Math.max(left + 1, place(at + duration));
      const top = lanes.indexOf(lane) * LANE;
      context.fillStyle = (COLOURS[phase.split(" ")[0]] ?? ["#777", "#aaa"])[isDark ? 1 : 0];
      context.fillRect(left, top + 3, right - left, LANE - 6);
      this._drawn.push({ span, left, right, top });
    }
    context.fillStyle = text;
    for (let i = 0; i <= 4; i++) {
      const label = `${(((i - 4) / 4) * this._seconds * 1000).toFixed(this._seconds < 0.1 ? 1 : 0)} ms`;
      context.textAlign = i === 4 ? "right" : "left";
      context.fillText(label, LEFT + (i / 4) * (width - LEFT), height - 4);
    }
    context.textAlign = "left";
    this._canvas.setAttribute("aria-label", `${lanes.length} lanes, ${this._drawn.length} phases in the last ${this._seconds} seconds`);
    const names = [...phases].sort();
    if (names.join() !== this._shownNames) {
      this._shownNames = names.join();
      fill(this._legend, names.map((name) => h("span", {}, h("i", { style: { background: (COLOURS[name.split(" ")[0]] ?? ["#777", "#aaa"])[isDark ? 1 : 0] } }), name)));
    }
  }
}
