/**
 * The prompt as a strip: every span is as wide as its tokens and coloured by their state; recomputed tokens are drawn at
 * their positions.
 */

import { el } from "./dom.js";
import { place } from "./sources.js";
import { count } from "./words.js";

/**
 * @typedef {import("./types.js").Span} Span
 * @typedef {import("./types.js").Source} Source
 * @typedef {import("./types.js").Reuse} Reuse
 */

const STATES = /** @type {const} */ (["exact", "fused", "recomputed", "computed"]);
const MEANING = {
  exact: "Reused: the same as computing it here.",
  fused: "Reused as stored: computed once, without the text that stands before it here.",
  recomputed: "Stored, but computed again: these tokens depend most on the text before them.",
  computed: "Not reused: the question, and text without usable stored KV.",
};
const KINDS = {
  prefix: "Prefix",
  history: "Conversation",
  chunk: "Source",
  question: "Question",
  template: "Template",
};

/** A span's tokens by colour. @param {Span} span */
function split(span) {
  const tokens = { exact: 0, fused: 0, recomputed: span.recomputed, computed: 0 };
  tokens[span.state] += span.tokens - span.recomputed;
  return tokens;
}

/** @param {Span} span @param {Source[]} sources */
function named(span, sources) {
  const kind = KINDS[/** @type {keyof typeof KINDS} */ (span.kind)] ?? span.kind;
  const source = span.number === null ? undefined : sources.find(({ number }) => number === span.number);
  return source ? `${kind} ${source.number}, ${place(source)}` : kind;
}

/** @param {Span} span @param {Source[]} sources */
function described(span, sources) {
  const tokens = split(span);
  const parts = STATES.filter((state) => tokens[state]).map((state) => `${tokens[state]} ${state}`);
  const why = span.why ? `; ${span.why}` : "";
  return `${named(span, sources)}: ${count(span.tokens, "token")}, ${parts.join(", ")}${why}`;
}

/** Offsets as runs, so that neighbours are one rectangle. @param {number[]} offsets sorted */
function runs(offsets) {
  /** @type {[number, number][]} */
  const found = [];
  for (const at of offsets) {
    const last = found.at(-1);
    if (last && last[0] + last[1] === at) last[1] += 1;
    else found.push([at, 1]);
  }
  return found;
}

/**
 * @param {Span[]} prompt
 * @param {Reuse} reuse
 * @param {Source[]} sources
 * @param {(number: number, from: HTMLElement) => void} open a source
 * @returns {HTMLElement}
 */
export function strip(prompt, reuse, sources, open) {
  const shown = prompt.filter((span) => span.tokens > 0);
  const resting = "Point at a part of the prompt, or move through it with the arrow keys.";
  const detail = el("p", { class: "strip-detail" }, resting);
  const bar = el("div", { class: "strip", role: "group", "aria-label": "The prompt, part by part" });
  const buttons = shown.map((span, at) => {
    const text = described(span, sources);
    const show = () => {
      detail.textContent = text;
    };
    const button = el(
      "button",
      {
        type: "button",
        class: `span ${span.state}`,
        "aria-label": text,
        tabindex: at ? -1 : 0,
        "data-kind": span.kind,
        "data-state": span.state,
        "data-tokens": span.tokens,
        "data-recomputed": span.recomputed,
        onmouseenter: show,
        onfocus: show,
        onclick: () => {
          if (span.number !== null) open(span.number, button);
        },
      },
      marks(span),
    );
    button.style.flexGrow = String(span.tokens);
    if (span.number !== null) button.classList.add("opens");
    return button;
  });
  bar.append(...buttons);
  bar.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => walk(event, buttons));
  bar.addEventListener("mouseleave", () => {
    if (!bar.contains(document.activeElement)) detail.textContent = resting;
  });
  return el(
    "figure",
    { class: "prompt" },
    bar,
    detail,
    el("figcaption", { class: "legend" }, ...legend(reuse)),
    ...unused(shown),
    table(shown, sources),
  );
}

/** @param {Span} span */
function marks(span) {
  if (!span.recomputed) return null;
  const svg = el("svg", { viewBox: `0 0 ${span.tokens} 1`, preserveAspectRatio: "none", "aria-hidden": "true" });
  svg.append(...runs(span.recomputed_at).map(([x, width]) => el("rect", { x, y: 0, width, height: 1 })));
  return svg;
}

/** One stop of the Tab key; the arrows go on from there. @param {KeyboardEvent} event @param {HTMLElement[]} buttons */
function walk(event, buttons) {
  const at = buttons.indexOf(/** @type {HTMLElement} */ (document.activeElement));
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: buttons.length - 1 }[event.key];
  const next = to === undefined ? undefined : buttons[to];
  if (at < 0 || !next) return;
  event.preventDefault();
  buttons[at].tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

/** @param {Reuse} reuse */
function legend(reuse) {
  return STATES.map((state) =>
    el(
      "span",
      { class: "entry" },
      el(
        "span",
        { class: "key", "data-state": state, "data-count": reuse[state] },
        el("span", { class: `swatch ${state}` }),
        `${state} `,
        el("b", {}, reuse[state].toLocaleString("en")),
      ),
      el("span", { class: "means" }, MEANING[state]),
    ),
  );
}

/** Why passages were not reused, a line for each reason; the strip says it of parts. @param {Span[]} spans */
function unused(spans) {
  /** @type {Map<string, number[]>} */
  const numbers = new Map();
  for (const { why, number } of spans)
    if (why && number !== null && spans.every((span) => span.number !== number || span.why))
      numbers.set(why, [...(numbers.get(why) ?? []), number]);
  const list = new Intl.ListFormat("en");
  return [...numbers].map(([why, sources]) =>
    el(
      "p",
      { class: "note why" },
      el("b", {}, `${sources.length > 1 ? "Sources" : "Source"} ${list.format(sources.map(String))} not reused:`),
      ` ${why}.`,
    ),
  );
}

/** @param {Span[]} spans @param {Source[]} sources */
function table(spans, sources) {
  const head = ["Part", "First token", "Tokens", ...STATES.map((state) => state[0].toUpperCase() + state.slice(1))];
  const rows = spans.map((span) => {
    const tokens = split(span);
    const cells = [span.start, span.tokens, ...STATES.map((state) => tokens[state])].map((value) =>
      el("td", {}, value.toLocaleString("en")),
    );
    return el("tr", {}, el("th", { scope: "row" }, named(span, sources)), ...cells);
  });
  return el(
    "details",
    { class: "as-table" },
    el("summary", {}, "As a table"),
    el(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "The prompt as a table" },
      el(
        "table",
        {},
        el("thead", {}, el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name)))),
        el("tbody", {}, ...rows),
      ),
    ),
  );
}
