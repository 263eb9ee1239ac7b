/** One question and its answer, from Enter to the last token. A later failure keeps the text that has arrived. */

import { events, Failure, patiently } from "./api.js";
import { el, say, small } from "./dom.js";
import { rendered } from "./markdown.js";
import { chips, marked, show } from "./sources.js";
import { strip } from "./strip.js";
import { spent, waited } from "./timing.js";
import { count, duration, percent } from "./words.js";

/** @typedef {import("./types.js").Source} Source @typedef {import("./types.js").Citation} Citation
 * @typedef {import("./types.js").Span} Span
 * @typedef {import("./types.js").Reuse} Reuse
 * @typedef {import("./types.js").Timing} Timing */

const TYPES = {
  overloaded_error: "The server is busy.",
  rate_limit_error: "Too many requests for this key just now.",
  timeout_error: "The server ran out of time for this.",
};

/** A turn on the page. */
export class Turn {
  /**
   * @param {Record<string, any>} body of the request
   * @param {HTMLElement} measured what measures it
   * @param {() => void} again asks it once more
   */
  constructor(body, measured, again) {
    this.body = body;
    this.again = again;
    this.stopper = new AbortController();
    /** @type {Source[]} */
    this.sources = [];
    /** @type {Citation[]} */
    this.citations = [];
    this.text = "";
    this.answer = el("div", { class: "answer", "aria-live": "polite", "aria-busy": "true" });
    this.notice = el("div", { class: "notices" });
    this.from = el("div", { class: "sources" });
    this.made = el("details", { class: "made", open: !small.matches, hidden: true });
    this.measured = measured;
    this.node = el(
      "article",
      { class: "turn working", "aria-label": `Question: ${body.question}` },
      el("h3", { class: "question" }, body.question),
      this.answer,
      this.notice,
      this.from,
      this.made,
    );
    /** @param {number} number @param {HTMLElement} from @param {Citation} [at] */
    this.show = (number, from, at) => show(this.sources, this.citations, number, from, at);
  }

  stop() {
    this.stopper.abort();
  }

  /**
   * Ask, and show the events as they come. Never throws.
   * @returns {Promise<import("./types.js").Answer|null>} the answer if it came whole
   */
  async run() {
    try {
      return await this.followed();
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      this.failed(error);
      return null;
    } finally {
      this.node.classList.remove("working");
      this.answer.setAttribute("aria-busy", "false");
    }
  }

  /** Show an answer that came earlier. @param {import("./types.js").Answer} answer */
  restore(answer) {
    this.node.classList.remove("working");
    this.answer.setAttribute("aria-busy", "false");
    this.finished(answer);
    this.made.open = false;
    return this;
  }

  async followed() {
    const stream = await patiently(
      () => events("ask", this.body, this.stopper.signal),
      (failure, left) => this.waiting(failure, left),
      this.stopper.signal,
    );
    for await (const { event, data } of stream) {
      if (event === "sources") this.given(data.sources);
      else if (event === "prompt") this.prefilled(data.prompt, data.reuse, data.timing);
      else if (event === "token") this.add(data.text);
      else if (event === "error")
        throw new Failure(
          "told",
          TYPES[/** @type {keyof typeof TYPES} */ (data.error?.type)] ?? data.error?.message ?? "The server gave up.",
        );
      else if (event === "answer") return this.finished(data);
    }
    throw new Failure("broken", "The connection broke.");
  }

  /** @param {Failure|null} failure @param {number} left seconds */
  waiting(failure, left) {
    if (!failure) return this.notice.replaceChildren();
    if (!this.notice.querySelector(".waiting")) {
      this.notice.replaceChildren(
        el(
          "p",
          { class: "notice waiting", role: "status" },
          `${failure.message} Trying again in `,
          el("b", { class: "left", "aria-hidden": "true" }),
          ".",
        ),
      );
    }
    this.notice.querySelector(".left").textContent = count(left, "second");
  }

  /** @param {Source[]} sources */
  given(sources) {
    this.sources = sources;
    this.from.replaceChildren(
      sources.length
        ? chips(sources, this.citations, this.show)
        : el(
            "p",
            { class: "notice" },
            "Nothing in this collection matched the question. The answer rests on the model alone.",
          ),
    );
  }

  /** @param {Span[]} prompt @param {Reuse} reuse @param {Timing} timing */
  prefilled(prompt, reuse, timing) {
    const total = reuse.exact + reuse.fused + reuse.recomputed + reuse.computed;
    const work = reuse.recomputed + reuse.computed;
    const reused = total ? (reuse.exact + reuse.fused) / total : 0;
    const notes = reuse.notes ?? [];
    const first = timing?.first_token_s ? ` First token after ${duration(timing.first_token_s)}${waited(timing)}.` : "";
    this.made.replaceChildren(
      el("summary", {}, el("b", {}, percent(reused)), ` of ${count(total, "prompt token")} reused, ${work.toLocaleString("en")} computed.${first}`),
      strip(prompt, reuse, this.sources, this.show),
      ...notes.map((note) =>
        el("p", { class: "note" }, note[0].toUpperCase() + note.slice(1) + (/[.!?]$/.test(note) ? "" : ".")),
      ),
      timing?.first_token_s ? spent(timing) : "",
      this.measured,
    );
    this.measured.hidden = !this.node.classList.contains("whole");
    this.made.hidden = false;
  }

  /** @param {string} text */
  add(text) {
    const shown = this.text ? text : text.trimStart();
    this.text += shown;
    this.answer.append(shown);
  }

  /** @param {import("./types.js").Answer} answer */
  finished(answer) {
    this.node.classList.add("whole");
    this.text = answer.answer;
    this.citations = answer.citations ?? [];
    this.given(answer.sources);
    this.answer.replaceChildren(...rendered(marked(answer.answer, this.citations, this.sources, this.show)));
    if (!answer.answer.trim()) this.tell("The model answered with nothing.");
    if (answer.finish_reason === "length") this.tell("The answer was cut at the server's longest.");
    this.prefilled(answer.prompt, answer.reuse, answer.timing);
    return answer;
  }

  /** @param {Failure} failure */
  failed(failure) {
    this.notice.replaceChildren();
    const kept = this.text ? " What had arrived stays; the conversation may not have this turn." : "";
    const words =
      failure.kind === "broken"
        ? this.text
          ? "The connection broke before the answer was complete."
          : "The connection broke before the answer began."
        : failure.message;
    const again = el("button", { type: "button", class: "outline again", onclick: () => this.again() }, "Ask again");
    this.tell(words + kept, failure.kind === "stopped" ? "" : "bad", again);
    say(words);
  }

  /** @param {string} words @param {string} [tone] @param {...Node} more */
  tell(words, tone = "", ...more) {
    this.notice.append(
      el("div", { class: `notice ${tone}`, role: tone ? "alert" : null }, el("p", {}, words), ...more),
    );
  }
}
