/** The parts of the time to the first token and, on request, the time of a full recompute. */

import { Failure, patiently, post } from "./api.js";
import { el, say } from "./dom.js";
import { duration } from "./words.js";

/** @typedef {import("./types.js").Timing} Timing */

/**
 * Disjoint parts of the TTFT. The API counts loading and placing as part of the prefill.
 * @param {Timing} t
 * @returns {[string, number][]}
 */
function parts(t) {
  const compute = Math.max(0, t.prefill_s - t.load_s - t.fuse_s);
  const rest = Math.max(0, t.first_token_s - t.queue_s - t.lookup_s - t.prefill_s);
  return [
    ["waiting", t.queue_s],
    ["look-up", t.lookup_s],
    ["loading", t.load_s],
    ["placing", t.fuse_s],
    ["computing", compute],
    ["the rest", rest],
  ];
}

/** @param {Timing} timing @param {number} [scale] seconds of a full bar */
function bar(timing, scale = timing.first_token_s) {
  const line = el("div", { class: "bar-line", "aria-hidden": "true" });
  const filled = el("div", { class: "bar-fill" });
  filled.style.inlineSize = `${scale > 0 ? Math.min(100, (timing.first_token_s / scale) * 100) : 0}%`;
  parts(timing).forEach(([name, seconds], at) => {
    const part = el("span", { class: `part p${at}`, title: `${name} ${duration(seconds)}` });
    part.style.flexGrow = String(seconds * 1e6); // sums below 1 would not fill the bar
    filled.append(part);
  });
  line.append(filled);
  return line;
}

/** @param {Timing} timing */
const list = (timing) =>
  el(
    "ul",
    { class: "parts" },
    ...parts(timing).map(([name, seconds], at) =>
      el("li", {}, el("span", { class: `swatch p${at}` }), `${name} `, el("b", {}, duration(seconds))),
    ),
  );

/** @param {Timing} timing */
export const spent = (timing) =>
  el(
    "div",
    { class: "spent" },
    el("p", { class: "ttft" }, "First token after ", el("b", {}, duration(timing.first_token_s))),
    bar(timing),
    list(timing),
  );

/**
 * The button that measures, and the element for its result.
 * @param {Record<string, any>} body of the question
 * @param {boolean} follows a conversation, which is not measured with it
 * @returns {HTMLElement}
 */
export function measure(body, follows) {
  const found = el("div", { class: "compared" });
  const button = el(
    "button",
    { type: "button", class: "outline measure", onclick: () => run() },
    "Measure against full recompute",
  );
  const note = el("p", { class: "note", role: "status" });
  async function run() {
    button.disabled = true;
    note.textContent = "Measuring: the same prompt, both ways …";
    try {
      const result = await patiently(
        () => post("compare", body),
        (_, left) => {
          note.textContent = left ? `The server is busy. Measuring in ${left} s …` : "Measuring …";
        },
      );
      found.replaceChildren(...compared(result.fused.timing, result.full.timing, follows));
      note.textContent = "";
      button.textContent = "Measure again";
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      note.textContent = `Not measured. ${error.message}`;
    } finally {
      button.disabled = false;
    }
  }
  return el("div", { class: "against" }, found, el("div", { class: "row" }, button, note));
}

/** @param {Timing} fused @param {Timing} full @param {boolean} follows */
function compared(fused, full, follows) {
  const scale = Math.max(fused.first_token_s, full.first_token_s);
  const times = full.first_token_s / Math.max(fused.first_token_s, 1e-9);
  const comparison =
    times >= 1.05
      ? `${times.toFixed(1)} times faster`
      : times <= 0.95
        ? `${(1 / times).toFixed(1)} times slower`
        : "As fast";
  const line = (/** @type {string} */ name, /** @type {Timing} */ t) =>
    el("div", { class: "versus" }, el("span", {}, name), bar(t, scale), el("b", {}, duration(t.first_token_s)));
  say(`${comparison} than full recompute: ${duration(fused.first_token_s)} against ${duration(full.first_token_s)}.`);
  return [
    line("Fused", fused),
    line("Full recompute", full),
    el(
      "p",
      { class: "comparison" },
      el("b", { "data-ratio": times.toFixed(3) }, comparison),
      comparison === "As fast" ? " as full recompute to the first token. " : " to the first token. ",
      el(
        "span",
        { class: "muted" },
        `This machine, this question${follows ? " without the conversation before it" : ""}, once.`,
      ),
    ),
  ];
}
