// `h`: the only way in which the page makes elements. A string becomes a text node, never markup.

const SVG = "http://www.w3.org/2000/svg";

/**
 * Make an element.
 * @param {string} tag of HTML; "svg:" before it for SVG. Always a literal of this page's own code.
 * @param {object} props "on…": a listener; "class", "dataset", "style" (an object of CSS properties); a boolean: an attribute
 *   that is there or not; else an attribute. null and undefined are left out.
 * @param {...(Node|string|number|Array|null)} children
 */
export function h(tag, props = {}, ...children) {
  const element = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else if (name === "style") for (const [key, given] of Object.entries(value)) element.style.setProperty(key, given);
    else if (name === "value" || name === "checked" || name === "indeterminate") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...nodes(children));
  return element;
}

function nodes(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
}

/** Put `children` in the place of all that `element` has. */
export function fill(element, ...children) {
  element.replaceChildren(...nodes(children));
  return element;
}

/** A button with a word or a symbol. `label` is what a screen reader says, and the tip. */
export function button(text, label, onclick, props = {}) {
  return h("button", { type: "button", "aria-label": label, title: label, onclick, ...props }, text);
}

/** Ask in a dialog. Resolves to the texts of the fields by name, or to null if it was cancelled. */
export function ask(title, fields, { ok = "OK", about = "" } = {}) {
  return new Promise((resolve) => {
    const inputs = fields.map((field) =>
      h(field.isSecret ? "textarea" : "input", { name: field.name, class: field.isSecret ? "secret" : null, rows: field.isSecret ? 1 : null,
        value: field.value ?? "", autocomplete: "off", spellcheck: "false", id: `ask-${field.name}` }));
    const done = (result) => { dialog.close(); dialog.remove(); resolve(result); };
    const accept = () => done(Object.fromEntries(inputs.map((input) => [input.name, input.value])));
    // no submit: the page's policy allows no form to be sent anywhere
    const form = h("div", { class: "ask", onkeydown: (event) => {
      if (event.key === "Enter" && event.target.tagName !== "BUTTON") { event.preventDefault(); accept(); }
    } },
      h("h2", { id: "ask-title" }, title), about && h("p", {}, about),
      fields.map((field, i) => h("label", { for: `ask-${field.name}` }, field.label, inputs[i])),
      h("div", { class: "row end" }, button("Cancel", "Cancel", () => done(null)),
        button(ok, ok, accept, { class: "primary" })));
    const dialog = h("dialog", { "aria-labelledby": "ask-title", oncancel: (event) => { event.preventDefault(); done(null); } }, form);
    document.body.append(dialog);
    dialog.showModal();
    (inputs[0] ?? dialog.querySelector("button.primary")).focus();
  });
}

/** Say something for some seconds at the edge of the page; a screen reader says it, too. */
export function notify(text) {
  const place = document.getElementById("notices");
  const notice = h("div", { class: "notice" }, text);
  place.append(notice);
  setTimeout(() => notice.remove(), 6000);
}

/** Give the user a file. */
export function save(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
