/** The parts of the time to the first token and, on request, the time of a full recompute. */

import { Failure, patiently, post } from "./api.js";
import { el, say } from "./dom.js";
import { count, duration } from "./words.js";

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

const WORK = ["look-up", "loading", "placing", "computing"];

/** Seconds of work alone: without waiting for other requests, before and between the layers. @param {Timing} t */
const worked = (t) => t.lookup_s + t.prefill_s;

/** What to add to the time of a first token that waited. @param {Timing} t */
export const waited = (t) => (t.queue_s >= 0.1 * t.first_token_s ? `, ${duration(t.queue_s)} of it waiting` : "");

/** @param {Timing} timing @param {number} share of a full bar @param {(name: string) => boolean} [wanted] */
function bar(timing, share = 1, wanted = () => true) {
  const line = el("div", { class: "bar-line", "aria-hidden": "true" });
  const filled = el("div", { class: "bar-fill" });
  filled.style.inlineSize = `${Math.min(100, share * 100)}%`;
  parts(timing).forEach(([name, seconds], at) => {
    if (!wanted(name)) return;
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
  const prefilled = (/** @type {string} */ reuse) => post("ask", { ...body, reuse, max_tokens: 1 });
  async function run() {
    button.disabled = true;
    note.textContent = "Measuring: the same prompt, both ways …";
    try {
      const result = await patiently(
        async () => ({ fused: await prefilled("fused"), full: await prefilled("none") }),
        (_, left) => {
          note.textContent = left ? `The server is busy. Measuring in ${left} s …` : "Measuring …";
        },
      );
      found.replaceChildren(...compared(result.fused, result.full, follows));
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

/** @typedef {{timing: Timing, reuse: import("./types.js").Reuse}} Measured */

/** Two prefills by their work alone. @param {Measured} fused @param {Measured} full @param {boolean} follows */
function compared(fused, full, follows) {
  const [ours, theirs] = [worked(fused.timing), worked(full.timing)];
  const scale = Math.max(ours, theirs, 1e-9);
  const times = theirs / Math.max(ours, 1e-9);
  const comparison =
    times >= 1.05
      ? `${times.toFixed(1)} times faster`
      : times <= 0.95
        ? `${(1 / times).toFixed(1)} times slower`
        : "As fast";
  const line = (/** @type {string} */ name, /** @type {Timing} */ t) =>
    el(
      "div",
      { class: "versus" },
      el("span", {}, name),
      bar(t, worked(t) / scale, (part) => WORK.includes(part)),
      el("b", {}, duration(worked(t))),
    );
  const { recomputed, computed, exact, fused: kept } = fused.reuse;
  const total = recomputed + computed + exact + kept;
  const why = `: ${(recomputed + computed).toLocaleString("en")} of ${count(total, "token")} computed instead of all. `;
  const [wait, fullWait] = [duration(fused.timing.queue_s), duration(full.timing.queue_s)];
  say(`${comparison} than full recompute, without waiting: ${duration(ours)} against ${duration(theirs)}.`);
  return [
    line("Fused", fused.timing),
    line("Full recompute", full.timing),
    el(
      "p",
      { class: "comparison" },
      el("b", { "data-ratio": times.toFixed(3) }, comparison),
      why,
      el(
        "span",
        { class: "muted" },
        `Work alone: waiting for other requests (${wait} and ${fullWait}) is left out. ` +
          `This machine, this question${follows ? " without the conversation before it" : ""}, once.`,
      ),
    ),
  ];
}
