/** The sources of an answer: chips under it, markers in it, and the source text with the cited spans marked. */

import { open } from "./drawer.js";
import { el, slice } from "./dom.js";
import { base } from "./words.js";

/** @typedef {import("./types.js").Source} Source @typedef {import("./types.js").Citation} Citation */

/** @param {Source} source */
export const title = (source) => source.title || base(source.source || source.document_id);

/** The title and, of a document with pages, the page. @param {Source} source */
export const place = (source) => (source.page ? `${title(source)}, page ${source.page}` : title(source));

/**
 * @param {Source[]} sources @param {Citation[]} citations @param {(number: number, from: HTMLElement) => void} show
 */
export function chips(sources, citations, show) {
  const cited = new Set(citations.map(({ number }) => number));
  // the best first, whatever their order in the prompt
  const ranked = [...sources].sort((a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity) || a.number - b.number);
  return el(
    "ul",
    { class: "chips", "aria-label": "Sources" },
    ...ranked.map((source) => {
      const isCited = cited.has(source.number);
      const button = el(
        "button",
        {
          type: "button",
          class: isCited ? "chip cited" : "chip",
          "data-number": source.number,
          "aria-label": `Source ${source.number}, ${place(source)}${isCited ? ", cited" : ""}`,
          onclick: () => show(source.number, button),
        },
        el("span", { class: "num" }, source.number),
        el("span", { class: "name" }, place(source)),
      );
      return el("li", {}, button);
    }),
  );
}

/**
 * An answer's text with its markers: where the model wrote [n], otherwise behind the cited words, otherwise at the end.
 * @param {string} answer
 * @param {Citation[]} citations
 * @param {Source[]} sources
 * @param {(number: number, from: HTMLElement, at?: Citation) => void} show
 * @returns {Node[]}
 */
export function marked(answer, citations, sources, show) {
  const marker = (
    /** @type {number} */ number,
    /** @type {Citation} */ citation = citations.filter((one) => one.number === number)[0],
  ) => {
    const button = el(
      "button",
      {
        type: "button",
        class: "cite",
        "aria-label": `Source ${number}`,
        onclick: () => show(number, button, citation),
      },
      `[${number}]`,
    );
    return button;
  };
  const known = new Set(sources.map(({ number }) => number));
  const written = new Set([...answer.matchAll(/\[(\d+)\]/g)].map((match) => Number(match[1])));
  const length = Array.from(answer).length;
  const placed = citations
    .filter(({ number }) => !written.has(number))
    .map((citation) => ({ at: Math.min(citation.answer_end ?? length, length), citation }));
  placed.sort((a, b) => a.at - b.at || a.citation.number - b.citation.number);
  /** @type {Node[]} */
  const nodes = [];
  const put = (/** @type {string} */ text) => {
    for (const piece of text.split(/(\[\d+\])/)) {
      const number = Number(piece.slice(1, -1));
      if (/^\[\d+\]$/.test(piece) && known.has(number)) nodes.push(marker(number));
      else if (piece) nodes.push(document.createTextNode(piece));
    }
  };
  let from = length - Array.from(answer.trimStart()).length;
  const seen = new Set();
  for (const { at, citation } of placed) {
    put(slice(answer, from, at));
    from = at;
    if (!seen.has(`${at} ${citation.number}`)) nodes.push(marker(citation.number, citation));
    seen.add(`${at} ${citation.number}`);
  }
  put(slice(answer, from));
  return nodes;
}

/**
 * Open a source next to the answer, at the cited span.
 * @param {Source[]} sources
 * @param {Citation[]} citations
 * @param {number} number
 * @param {HTMLElement} from
 * @param {Citation} [at] the one to scroll to
 */
export function show(sources, citations, number, from, at) {
  const source = sources.find((one) => one.number === number);
  if (!source) return;
  const own = citations.filter((one) => one.number === number).sort((a, b) => a.start - b.start);
  const text = el("div", { class: "source-text" }, ...highlighted(source.text, own, at));
  const turn = (/** @type {number} */ step) => {
    const other = sources[(sources.indexOf(source) + step + sources.length) % sources.length];
    show(sources, citations, other.number, from);
  };
  const span = Number.isFinite(source.start) ? `characters ${source.start}–${source.end} of the document` : "";
  open(
    `Source ${source.number}`,
    from,
    [
      el("p", { class: "source-name" }, place(source)),
      el(
        "p",
        { class: "muted" },
        own.length ? "What the answer rests on is marked." : "Given to the model, not cited by the answer.",
        span && ` ${span[0].toUpperCase()}${span.slice(1)}.`,
      ),
      text,
      sources.length > 1 &&
        el(
          "div",
          { class: "row end" },
          el("button", { type: "button", class: "quiet", onclick: () => turn(-1) }, "Previous source"),
          el("button", { type: "button", class: "quiet", onclick: () => turn(1) }, "Next source"),
        ),
    ],
    "source",
  );
  const first = text.querySelector("mark.at") ?? text.querySelector("mark");
  first?.scrollIntoView({ block: "center" });
}

/** @param {string} text @param {Citation[]} citations sorted by start @param {Citation} [at] */
function highlighted(text, citations, at) {
  const nodes = [];
  let from = 0;
  for (const citation of citations) {
    const start = Math.max(from, citation.start);
    if (citation.end <= start) continue; // inside a span that is already marked
    nodes.push(
      slice(text, from, start),
      el(
        "mark",
        { class: citation === at ? "at" : "", "data-start": start, "data-end": citation.end },
        slice(text, start, citation.end),
      ),
    );
    from = citation.end;
  }
  nodes.push(slice(text, from));
  return nodes;
}
