// Blocks of code: their colours (highlight.js), and a button that copies them.

import { button, h, notify } from "./dom.js";
import bash from "./vendor/highlight/bash.js";
import c from "./vendor/highlight/c.js";
import highlighter from "./vendor/highlight/core.js";
import cpp from "./vendor/highlight/cpp.js";
import diff from "./vendor/highlight/diff.js";
import go from "./vendor/highlight/go.js";
import ini from "./vendor/highlight/ini.js";
import java from "./vendor/highlight/java.js";
import javascript from "./vendor/highlight/javascript.js";
import json from "./vendor/highlight/json.js";
import markdown from "./vendor/highlight/markdown.js";
import python from "./vendor/highlight/python.js";
import rust from "./vendor/highlight/rust.js";
import sql from "./vendor/highlight/sql.js";
import xml from "./vendor/highlight/xml.js";
import yaml from "./vendor/highlight/yaml.js";

const LANGUAGES = { bash, c, cpp, diff, go, ini, java, javascript, json, markdown, python, rust, sql, xml, yaml };
for (const [name, language] of Object.entries(LANGUAGES)) highlighter.registerLanguage(name, language);
highlighter.registerAliases(["ts", "tsx", "typescript"], { languageName: "javascript" });

const MAX_COLOURED = 20000; // characters; colouring more would hold the page up

/** Nodes of highlight.js's own tree: texts, and spans with a class. No markup is made or read. */
function coloured(node) {
  if (typeof node === "string") return node;
  const children = node.children.map(coloured);
  if (!node.scope || node.scope.startsWith("language:")) return children;
  const classes = node.scope.split(".").map((part, i) => (i ? `${part}${"_".repeat(i)}` : `hljs-${part}`));
  return h("span", { class: classes.join(" ") }, children);
}

function colour(place, text, language) {
  const name = language.trim().split(/\s/, 1)[0].toLowerCase();
  if (text.length > MAX_COLOURED || !highlighter.getLanguage(name)) return;
  const result = highlighter.highlight(text, { language: name, ignoreIllegals: true });
  place.replaceChildren(...[coloured(result._emitter.rootNode)].flat(Infinity));
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    notify("Copied.");
  } catch {
    notify("The browser does not allow this page to copy. Select the text instead.");
  }
}

/** `isOpen`: more lines may come, so colours come later. */
export function codeBlock(text, language, isOpen) {
  const place = h("code", {}, text);
  const block = h("div", { class: "code" },
    h("div", { class: "code-head" }, h("span", {}, language.slice(0, 40) || "text"),
      button("Copy", "Copy this code", () => copy(place.textContent))),
    h("pre", { tabindex: 0, role: "region", "aria-label": "code" }, place));
  if (!isOpen) colour(place, text, language);
  return block;
}

/** Add what has come to a block, if it is only more lines. Returns whether it was. */
export function updateCode(block, before, after, isOpen) {
  const place = block.querySelector("pre > code");
  const isLonger = before.isOpen && (before.lang ?? "") === (after.lang ?? "") && after.text.startsWith(before.text);
  if (!isLonger || place.textContent !== before.text) return false;
  place.append(after.text.slice(before.text.length));
  if (!isOpen) colour(place, after.text, after.lang ?? "");
  return true;
}
