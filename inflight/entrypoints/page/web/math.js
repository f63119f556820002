// Formulas: Temml makes MathML of TeX. Its tree is copied element by element, and only what `TAGS` and `ATTRIBUTES` name.

const MATHML = "http://www.w3.org/1998/Math/MathML";
const TAGS = new Set(("math mrow mi mn mo ms mtext mspace mfrac msqrt mroot mstyle merror mpadded mphantom msub msup msubsup munder " +
  "mover munderover mmultiscripts mprescripts none mtable mtr mtd menclose semantics").split(" "));
const ATTRIBUTES = new Set(("display displaystyle scriptlevel mathvariant stretchy symmetric largeop movablelimits lspace rspace " +
  "minsize maxsize fence separator form accent accentunder linethickness width height depth voffset columnalign rowspacing " +
  "columnspacing columnlines rowlines rowspan columnspan notation side").split(" "));
const STYLES = new Set(("color background-color font-weight font-style font-size text-align padding padding-left padding-right " +
  "padding-top padding-bottom border-top border-bottom border-left border-right width height vertical-align margin-left margin-right")
  .split(" "));
const MAX_LENGTH = 5000; // characters of one formula
const OPTIONS = { throwOnError: true, trust: false, strict: false, maxExpand: 200, maxSize: [20, 10], annotate: false };

function dashed(name) {
  return name.replace(/[A-Z]/g, (letter) => `-${letter.toLowerCase()}`);
}

function copied(node) {
  if (node.text !== undefined && node.children === undefined) return document.createTextNode(node.text);
  const children = (node.children ?? []).map(copied);
  if (!TAGS.has(node.type)) {
    const fragment = document.createDocumentFragment();
    fragment.append(...children);
    return fragment;
  }
  const element = document.createElementNS(MATHML, node.type);
  const styles = Object.entries(node.style ?? {}).map(([name, value]) => [dashed(name), value]);
  for (const [name, value] of Object.entries(node.attributes ?? {})) {
    if (ATTRIBUTES.has(name)) element.setAttribute(name, value);
    // the page's policy allows no style in an attribute, so its parts are set one by one
    else if (name === "style") styles.push(...String(value).split(";").map((part) => part.split(":").map((text) => text.trim())));
  }
  for (const [name, value] of styles) if (STYLES.has(name)) element.style.setProperty(name, value);
  element.append(...children);
  return element;
}

/** The node of a formula; the formula itself if it cannot be read. */
export function mathNode(formula, isDisplay) {
  const asWritten = () => {
    const code = document.createElement("code");
    code.textContent = formula;
    return code;
  };
  if (formula.length > MAX_LENGTH) return asWritten();
  try {
    return copied(globalThis.temml.__renderToMathMLTree(formula, { ...OPTIONS, displayMode: isDisplay }));
  } catch {
    return asWritten();
  }
}
