/** Something to ask: the example articles, before there are documents of one's own, and questions to click. */

import { Failure, get, patiently, post } from "./api.js";
import { choose, current, ensure } from "./collections.js";
import { el, say } from "./dom.js";
import { changed } from "./state.js";
import { base } from "./words.js";

const NAME = "examples"; // of the collection
const ASKED = 3; // questions to click

/** The articles and their questions, as the server has them. */
const theirs = () => get("../static/examples.json");

/** Whether the chosen collection is that of the examples. */
export const chosen = () => current()?.name === NAME;

/** The button that adds the example documents, and what became of it. @returns {HTMLElement} */
export function offer() {
  const note = el("p", { class: "note", role: "status" });
  const button = el("button", { type: "button", class: "primary try", onclick: () => add() }, "Try the example documents");
  async function add() {
    button.disabled = true;
    try {
      const { documents } = await theirs();
      note.textContent = `Reading ${documents.length} documents …`;
      await ensure(NAME);
      await patiently(
        () => post(`collections/${NAME}/documents`, { documents }),
        (failure, left) => {
          note.textContent = failure ? `${failure.message} Again in ${left} s` : "Reading …";
        },
      );
      await choose(NAME);
      say("The example documents are added. Choose a question, or write one.");
      changed();
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      note.textContent = `The examples were not added. ${error.message}`;
    } finally {
      button.disabled = false;
    }
  }
  return el("div", { class: "row" }, button, note);
}

/** Three documents of a collection, spread over it, as questions. @param {string} name */
async function about(name) {
  const { data } = await get(`collections/${encodeURIComponent(name)}/documents?limit=100`);
  const step = Math.max(1, Math.floor(data.length / ASKED));
  const some = data.filter((/** @type {any} */ _, /** @type {number} */ at) => at % step === 0).slice(0, ASKED);
  return some.map((/** @type {any} */ one) => `What does “${subject(one.title || base(one.source || one.id))}” say?`);
}

/** What a title or a file's name says, without number and ending. @param {string} name */
const subject = (name) => name.replace(/\.\w{1,5}$/, "").replace(/^\d+[-_. ]+/, "").replace(/[-_]+/g, " ");

/** The questions shown, and of which collection at which size. */
let shown = { of: "", list: el("ul") };

/** Questions to click. @param {(question: string) => void} ask @returns {HTMLElement} */
export function questions(ask) {
  const of = `${current()?.name} ${current()?.documents}`;
  if (shown.of === of) return shown.list;
  const list = el("ul", { class: "tries", "aria-label": "Questions to begin with" });
  const name = current()?.name ?? "";
  const wanted = chosen() ? theirs().then(({ questions }) => questions.slice(0, ASKED)) : about(name);
  wanted.then(
    (/** @type {string[]} */ found) =>
      list.replaceChildren(
        ...found.map((question) =>
          el("li", {}, el("button", { type: "button", class: "outline", onclick: () => ask(question) }, question)),
        ),
      ),
    () => {}, // a failure shows itself elsewhere; there is nothing to click then
  );
  shown = { of, list };
  return list;
}
