// `MarkdownView`: shows a text that grows as Markdown. marked divides the text into tokens; this file makes elements of them.
// Text enters as text nodes only, addresses of links are checked, and HTML in the text is shown as it is written.

import { codeBlock, updateCode } from "./code.js";
import { h } from "./dom.js";
import { mathNode } from "./math.js";
import { Marked } from "./vendor/marked.js";

const math = (level, patterns) => ({
  name: `${level}Math`,
  level,
  start(source) {
    const found = patterns.map((pattern) => source.indexOf(pattern.open)).filter((index) => index >= 0);
    return found.length ? Math.min(...found) : undefined;
  },
  tokenizer(source) {
    for (const { expression, display } of patterns) {
      const match = expression.exec(source);
      if (match) return { type: `${level}Math`, raw: match[0], text: match[1].trim(), display };
    }
    return undefined;
  },
});

const reader = new Marked({
  gfm: true,
  breaks: false,
  extensions: undefined,
}).use({
  extensions: [
    math("block", [
      { open: "$$", expression: /^\$\$([^]+?)\$\$[ \t]*(?:\n|$)/, display: true },
      { open: "\\[", expression: /^\\\[([^]+?)\\\][ \t]*(?:\n|$)/, display: true },
    ]),
    math("inline", [
      { open: "$$", expression: /^\$\$([^$]+?)\$\$/, display: true },
      { open: "$", expression: /^\$(?!\s)((?:\\[^]|[^\\$\n])+?)(?<!\s)\$(?!\d)/, display: false },
      { open: "\\(", expression: /^\\\(([^]+?)\\\)/, display: false },
      { open: "\\[", expression: /^\\\[([^]+?)\\\]/, display: true },
    ]),
  ],
});

const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", hellip: "…", mdash: "—", ndash: "–" };

/** The text with character references of HTML replaced, as Markdown says. */
function plain(text) {
  return text.replace(/&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|([a-z]{2,8}));/g, (all, decimal, hex, name) => {
    if (name) return NAMED[name] ?? all;
    const code = decimal ? Number(decimal) : Number.parseInt(hex, 16);
    return code > 0 && code <= 0x10ffff && (code < 0xd800 || code > 0xdfff) ? String.fromCodePoint(code) : all;
  });
}

/** The address of a link, or null if a click on it could run something or open a file. */
export function safeAddress(text) {
  let address;
  try {
    address = new URL(text);
  } catch {
    return null;
  }
  return ["http:", "https:", "mailto:"].includes(address.protocol) ? address.href : null;
}

function link(token, children) {
  const address = safeAddress(token.href ?? "");
  if (address === null) return [...children, ` (${token.href})`];
  return [h("a", { href: address, target: "_blank", rel: "noopener noreferrer", title: address }, children)];
}

function inline(tokens) {
  return (tokens ?? []).flatMap((token) => {
    switch (token.type) {
      case "strong": return [h("strong", {}, inline(token.tokens))];
      case "em": return [h("em", {}, inline(token.tokens))];
      case "del": return [h("del", {}, inline(token.tokens))];
      case "codespan": return [h("code", {}, token.text)];
      case "br": return [h("br")];
      case "link": return link(token, inline(token.tokens));
      // an image would tell its host what was asked, so it is a link
      case "image": return link(token, [`🖼 ${plain(token.text) || "image"}`]);
      case "inlineMath": return [mathNode(token.text, token.display)];
      case "html": return [token.raw];
      case "escape": return [token.text];
      case "text": return token.tokens ? inline(token.tokens) : [plain(token.text)];
      default: return [token.raw];
    }
  });
}

function cells(tag, row, align) {
  return row.map((cell, i) => h(tag, { class: align[i] ? `align-${align[i]}` : null }, inline(cell.tokens)));
}

/** The node of a block. `isOpen`: more of it may come. */
function block(token, isOpen) {
  switch (token.type) {
    case "heading": return h(`h${Math.min(6, token.depth + 1)}`, {}, inline(token.tokens));
    case "paragraph": return h("p", {}, inline(token.tokens));
    case "text": return h("span", {}, token.tokens ? inline(token.tokens) : plain(token.text));
    case "code": return codeBlock(token.text, token.lang ?? "", isOpen);
    case "blockquote": return h("blockquote", {}, token.tokens.map((each) => block(each, false)));
    case "list": return list(token);
    case "table":
      return h("div", { class: "table", tabindex: 0, role: "region", "aria-label": "table" }, h("table", {},
        h("thead", {}, h("tr", {}, cells("th", token.header, token.align))),
        h("tbody", {}, token.rows.map((row) => h("tr", {}, cells("td", row, token.align))))));
    case "hr": return h("hr");
    case "blockMath": return h("p", {}, mathNode(token.text, true));
    case "space": case "def": return document.createTextNode("");
    default: return h("p", {}, token.raw);
  }
}

function list(token) {
  const element = token.ordered ? h("ol", { start: token.start === 1 ? null : token.start }) : h("ul");
  element.append(...token.items.map(item));
  return element;
}

function item(token) {
  const box = token.task
    ? h("input", { type: "checkbox", checked: token.checked, disabled: true, "aria-label": token.checked ? "done" : "open" })
    : null;
  const inner = (token.tokens ?? []).filter((each) => each.type !== "checkbox").map((each) => block(each, false));
  return h("li", {}, box, inner);
}

/** Change the node of `before` so that it shows `after`, if only an end was added. Returns whether that was possible. */
function extend(node, before, after, isOpen) {
  if (before.type !== after.type) return false;
  if (after.type === "code") return updateCode(node, before, after, isOpen);
  if (after.type !== "list" || before.ordered !== after.ordered || before.start !== after.start || before.loose !== after.loose) return false;
  const same = before.items.findIndex((each, i) => each.raw !== after.items[i]?.raw);
  const kept = same < 0 ? before.items.length : same;
  while (node.childNodes.length > kept) node.lastChild.remove();
  node.append(...after.items.slice(kept).map(item));
  return true;
}

/** Shows a text in `element`. Blocks that have ended are never made again, so a long answer costs as much as a short one. */
export class MarkdownView {
  constructor(element) {
    this._element = element;
    this._numDone = 0; // characters whose blocks have ended
    this._open = []; // [token, node] of the blocks after them
    this._text = "";
  }

  update(text, isDone = false) {
    text = text.replaceAll("\r\n", "\n").replaceAll("\r", "\n");
    if (!text.startsWith(this._text)) {
      this._element.replaceChildren();
      this._numDone = 0;
      this._open = [];
    }
    this._text = text;
    const tokens = reader.lexer(text.slice(this._numDone));
    const kept = [];
    tokens.forEach((token, i) => {
      const isOpen = !isDone && i === tokens.length - 1;
      const [before, node] = this._open[i] ?? [];
      if (before === undefined) {
        const made = block(token, isOpen);
        this._element.append(made);
        kept.push([token, made]);
      } else if ((before.raw === token.raw && before.type === token.type && before.isOpen === isOpen) || extend(node, before, token, isOpen)) {
        kept.push([token, node]);
      } else {
        const made = block(token, isOpen);
        node.replaceWith(made);
        kept.push([token, made]);
      }
      token.isOpen = isOpen;
    });
    for (const [, node] of this._open.slice(tokens.length)) node.remove();
    this._open = kept;
    // the last two may still change: a line below a paragraph makes it a heading, an item goes on after an empty line
    while (this._open.length > 2) this._numDone += this._open.shift()[0].raw.length;
  }
}
