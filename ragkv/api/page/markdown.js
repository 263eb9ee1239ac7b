/**
 * A safe part of Markdown as elements: headings, lists, bold, italics, code. Everything else, links and HTML among it,
 * stays the text that it is. Nodes other than text, such as markers, keep their places.
 */

import { el } from "./dom.js";

const FIRST_MARK = 0xe000; // private characters stand for the nodes while the text is read
const ITEM = /^\s*(?:[-*+]|(\d{1,3})[.)])\s+(.*)$/;
const INLINE = /(`[^`\n]+`|\*\*[^\s*](?:[^\n*]*[^\s*])?\*\*|\*[^\s*](?:[^\n*]*[^\s*])?\*)/;

/** @param {Node[]} nodes @returns {Node[]} */
export function rendered(nodes) {
  /** @type {Node[]} */
  const held = [];
  const text = nodes
    .map((node) =>
      node instanceof Text
        ? node.data.replace(/[\ue000-\uf8ff]/g, "\ufffd")
        : String.fromCharCode(FIRST_MARK + held.push(node) - 1),
    )
    .join("");
  /** @type {any[]} */
  const blocks = [];
  /** @type {string[]|null} lines of a block of code */
  let code = null;
  /** @type {string[]} */
  let lines = [];
  const end = () => {
    if (lines.length) blocks.push(el("p", {}, ...inline(lines.join("\n"), held)));
    lines = [];
  };
  const endCode = () => blocks.push(el("pre", {}, el("code", {}, ...placed((code ?? []).join("\n"), held))));
  for (const line of text.split("\n")) {
    const item = ITEM.exec(line);
    const heading = /^#{1,6}\s+(.*)$/.exec(line);
    if (/^\s*```/.test(line)) {
      end();
      if (code) endCode();
      code = code ? null : [];
    } else if (code) code.push(line);
    else if (heading) {
      end();
      blocks.push(el("p", { class: "head" }, ...inline(heading[1], held)));
    } else if (item) {
      end();
      const kind = item[1] ? "OL" : "UL";
      if (blocks.at(-1)?.tagName !== kind) blocks.push(el(kind.toLowerCase(), item[1] ? { start: item[1] } : {}));
      blocks.at(-1).append(el("li", {}, ...inline(item[2], held)));
    } else if (line.trim()) lines.push(line);
    else end();
  }
  end();
  if (code) endCode();
  return blocks;
}

/** @param {string} text @param {Node[]} held @returns {Node[]} */
function inline(text, held) {
  return text.split(INLINE).flatMap((piece, at) => {
    if (at % 2 === 0) return placed(piece, held);
    if (piece.startsWith("`")) return [el("code", {}, ...placed(piece.slice(1, -1), held))];
    const strong = piece.startsWith("**");
    return [el(strong ? "strong" : "em", {}, ...placed(strong ? piece.slice(2, -2) : piece.slice(1, -1), held))];
  });
}

/** Text, and the nodes at their places. @param {string} text @param {Node[]} held @returns {Node[]} */
function placed(text, held) {
  return text
    .split(/([\ue000-\uf8ff])/)
    .filter(Boolean)
    .map((piece) => held[piece.charCodeAt(0) - FIRST_MARK] ?? document.createTextNode(piece));
}
