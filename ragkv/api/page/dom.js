/** Elements from data. Text becomes text nodes, never markup: nothing in this page parses HTML. */

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "use", "rect", "path"]);

/** @param {string} id @returns {any} */
export const $ = (id) => document.getElementById(id);

/**
 * An element. `on...` are listeners, `true` and `false` switch attributes, the rest are attributes.
 * @param {string} tag
 * @param {Record<string, any>} [attributes]
 * @param {...(Node|string|number|null|undefined|false)} children
 * @returns {any}
 */
export function el(tag, attributes = {}, ...children) {
  const node = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, String(value));
  }
  node.append(
    ...children
      .filter((child) => child != null && child !== false)
      .map((child) => (child instanceof Node ? child : String(child))),
  );
  return node;
}

/** Small screens, where reports and settings are folded until they are wanted. */
export const small = matchMedia("(max-width: 760px)");

/** @param {string} name of a symbol in index.html */
export const icon = (name) => el("svg", { class: "i", "aria-hidden": "true" }, el("use", { href: `#i-${name}` }));

/** Say something to those who listen instead of look. @param {string} text */
export function say(text) {
  $("said").textContent = text;
}

/**
 * Characters as the server counts them: code points, where JavaScript's strings count UTF-16 units.
 * @param {string} text @param {number} start @param {number} [end]
 */
export const slice = (text, start, end) => Array.from(text).slice(start, end).join("");
