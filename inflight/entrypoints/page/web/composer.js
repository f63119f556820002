// `Composer`: where a message is typed, with its files.

import { button, fill, h, notify } from "./dom.js";

const MAX_TEXT = 2 * 2 ** 20; // bytes of a text file
const MAX_IMAGE = 8 * 2 ** 20;

export class Composer {
  /** @param {object} actions {send(text, files), stop(), options(), takesImages()} */
  constructor(actions) {
    this._actions = actions;
    this._files = [];
    this._shownFiles = h("div", { class: "files" });
    this.area = h("textarea", { rows: 1, placeholder: "Message", "aria-label": "Message", oninput: () => this._grow(),
      onkeydown: (event) => this._key(event), onpaste: (event) => this._paste(event) });
    this._picker = h("input", { type: "file", multiple: true, hidden: true, "aria-hidden": "true", tabindex: -1,
      onchange: (event) => { this.add([...event.target.files]); event.target.value = ""; } });
    this._send = button("Send", "Send (Enter)", () => this._submit(), { class: "primary send" });
    this._stop = button("Stop", "Stop the answer (Escape)", () => actions.stop(), { class: "primary stop", hidden: true });
    this.options = button("Options", "Options of requests", () => actions.options(), {});
    this.element = h("div", { class: "composer", ondragover: (event) => event.preventDefault(), ondrop: (event) => {
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    } }, this._shownFiles, this.area, h("div", { class: "row" }, button("Attach", "Attach text files or images", () => this._picker.click()),
      this.options, this._picker, h("span", { class: "space" }), this._stop, this._send));
  }

  set isRunning(running) {
    this._stop.hidden = !running;
    this._send.hidden = running;
    this._running = running;
  }

  _key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this._submit();
  }

  _paste(event) {
    const files = [...event.clipboardData.files];
    if (files.length) {
      event.preventDefault();
      this.add(files);
    }
  }

  _grow() {
    this.area.style.setProperty("height", "auto");
    this.area.style.setProperty("height", `${Math.min(this.area.scrollHeight + 2, innerHeight * 0.4)}px`);
  }

  _submit() {
    const text = this.area.value;
    if (this._running || (!text.trim() && !this._files.length)) return;
    if (!this._actions.send(text, this._files)) return;
    this.area.value = "";
    this._files = [];
    this._showFiles();
    this._grow();
  }

  /** Take text files, and images if the model takes them. What cannot be taken is said. */
  async add(files) {
    for (const file of files) {
      if (file.type.startsWith("image/") && file.type !== "image/svg+xml") await this._addImage(file);
      else await this._addText(file);
    }
    this._showFiles();
  }

  async _addImage(file) {
    if (!this._actions.takesImages()) notify(`${file.name}: this model takes no images.`);
    else if (file.size > MAX_IMAGE) notify(`${file.name} has ${file.size} bytes; an image may have ${MAX_IMAGE}.`);
    else this._files.push({ name: file.name, type: file.type, url: await asDataUrl(file) });
  }

  async _addText(file) {
    if (file.size > MAX_TEXT) {
      notify(`${file.name} has ${file.size} bytes; a text may have ${MAX_TEXT}.`);
      return;
    }
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (text.includes("\0")) throw new TypeError("it has zero bytes");
      this._files.push({ name: file.name, type: file.type || "text/plain", text });
    } catch {
      notify(`${file.name} is no text in UTF-8 and no image.`);
    }
  }

  _showFiles() {
    fill(this._shownFiles, this._files.map((file) => h("span", { class: "chip" }, file.name,
      button("×", `Remove ${file.name}`, () => { this._files = this._files.filter((each) => each !== file); this._showFiles(); }))));
  }
}

function asDataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
