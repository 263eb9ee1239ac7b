/** The example documents: something to ask before there are documents of one's own. They are those of `examples/`. */

import { Failure, patiently, post } from "./api.js";
import { choose, current, ensure } from "./collections.js";
import { el, say } from "./dom.js";
import { changed } from "./state.js";

const NAME = "examples"; // of the collection

/** @type {[string, ...string[]][]} name, then sentences */
const DOCUMENTS = [
  [
    "01-nesibissa.md", "The code name of Nesibissa is Erlque.", "Lodwin works as a pilot.",
    "Kiralus signs letters as Gorax.", "Ostmax sells ovens.", "Lodwin owns an old clarinet.",
    "Visitors of Munfest travel to Dusburg.",
  ],
  [
    "02-ebbmax.md", "Ebbmax has made umbrellas for years.", "She has been a dancer for years.",
    "Friends call the pilot by the name of Kamyx.", "Steneltron was founded in 1924.",
    "Erlque is learning the fiddle.", "Gorax plays the tuba.", "Ulmalfete is held in Nalinhaven.",
    "Gorax has been a librarian for years.",
  ],
  [
    "03-steneltron.md", "The main product of the company is ovens.", "Steneltron is the sponsor of the event.",
    "Visitors of Corisfete travel to that city.", "Visitors brought flowers and cakes.",
    "Dusune is also known as Quinax.", "As everyone knows, Halfair takes place in the same city.",
  ],
  [
    "04-morfair.md", "Morfair is a project of Gatdyne.", "Wexissa trained as a librarian.",
    "Quinax is learning the banjo.", "Kordyne is known for its bottles.", "Lesune is a dentist.",
    "Quinax has been a gardener for years.", "Naldyne was started in 1939.",
  ],
  [
    "05-naldyne.md", "By all accounts, that company makes shoes.", "The event is held in Junville.",
    "Enswyn goes by the name of Ackox.", "The trade in wool was never large.",
    "Visitors of Dorgala travel to Wolminster.", "The dentist plays the violin.",
    "The dentist goes by the name of Rovix.",
  ],
  [
    "06-halfair.md", "Ostmax is the sponsor of Halfair.", "Garune signs letters as Eldzar.",
    "A short film was made about it.", "Visitors of Ebbrally travel to that city.",
    "The favourite instrument of Ackox is the oboe.", "Ackox has been a singer for years.",
    "Rasric works as a librarian.",
  ],
  [
    "07-garune.md", "Eldzar has been a hunter for years.", "Istgen makes knives.",
    "Verlab has made pens for years.", "Zancon is a project of Belmax.", "The founding year of Gatdyne is 1922.",
  ],
  [
    "08-rasric.md", "He plays the fiddle.", "Junville is the host of the event.",
    "No money comes from that source any more.", "Eldzar plays the piano.", "Kordyne is the sponsor of Balfest.",
    "Friends call Rasina by the name of Birix.", "He signs letters as Finix.",
    "The maker of knives was started in 1932.",
  ],
  [
    "09-duselle.md", "Duselle goes by the name of Yaryx.", "Culfete is held in the same city.",
    "For some time now, the maker of pens opened its doors in 1952.", "Cadfest takes place in the same city.",
    "The favourite instrument of Birix is the horn.",
  ],
  [
    "10-rasina.md", "Birix trained as a fisher.", "Elddyne is the sponsor of Kosrally.",
    "Two of the letters are signed and dated.", "Yaryx is a potter by trade.", "Yaryx owns an old flute.",
    "Tordyne builds hats.", "In fact, Melisina is fond of the fiddle.", "Sila is a potter by trade.",
  ],
];

/** Questions that the bundled reader answers rightly. */
const QUESTIONS = [
  "What is the job of Kiralus?",
  "Which company was founded earlier, Verlab or Gatdyne?",
  "What is the instrument of Rasric?",
  "What is the founding year of Verlab?",
];

/** Whether the chosen collection is that of the examples. */
export const chosen = () => current()?.name === NAME && current()?.documents === DOCUMENTS.length;

/** The button that adds the example documents, and what became of it. @returns {HTMLElement} */
export function offer() {
  const note = el("p", { class: "note", role: "status" });
  const button = el("button", { type: "button", class: "primary try", onclick: () => add() }, "Try the example documents");
  async function add() {
    const documents = DOCUMENTS.map(([id, ...sentences]) => ({ id, title: id, text: sentences.join(" ") }));
    button.disabled = true;
    note.textContent = `Reading and encoding ${documents.length} documents …`;
    try {
      await ensure(NAME);
      await patiently(
        () => post(`collections/${NAME}/documents`, { documents }),
        (failure, left) => {
          note.textContent = failure ? `${failure.message} Again in ${left} s` : "Reading and encoding …";
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

/** Questions to click. @param {(question: string) => void} ask @returns {HTMLElement} */
export const questions = (ask) =>
  el(
    "ul",
    { class: "tries", "aria-label": "Example questions" },
    ...QUESTIONS.map((question) =>
      el("li", {}, el("button", { type: "button", class: "outline", onclick: () => ask(question) }, question)),
    ),
  );
