/** Shortcuts: single keys while no text is being typed; they can be switched off. Escape closes what is open. */

import { dialog } from "./dialog.js";
import { $, el } from "./dom.js";
import { close, opened, side } from "./drawer.js";

const OFF = "ragkv.keys-off";

/** @type {[string, string, () => void][]} */
const KEYS = [
  ["/", "Write a question", () => $("question").focus()],
  ["d", "Documents", () => $("documents").click()],
  [
    "n",
    "New conversation",
    () => {
      $("new-session").click();
      $("question").focus();
    },
  ],
  ["c", "Conversations", () => reach()],
  [
    "h",
    "How it answers",
    () => {
      $("how").open = !$("how").open;
      $("how")
        .querySelector($("how").open ? "select" : "summary")
        .focus();
    },
  ],
  ["m", "Measure the last answer", () => last(".measure")?.click()],
  ["p", "The last prompt's strip", () => last(".strip [tabindex='0']")?.focus()],
  ["t", "Theme", () => $("theme").click()],
  ["?", "This list", () => show()],
];
const OTHERS = [
  ["Enter", "Ask"],
  ["Shift Enter", "New line"],
  ["1 – 9", "Open that source of the last answer"],
  ["Esc", "Close, or stop the answer"],
];

/** @param {string} what @returns {any} within the last turn on the page */
const last = (what) => [...document.querySelectorAll(`.turn ${what}`)].at(-1);

function reach() {
  if ($("menu").offsetParent) side(true);
  (
    document.querySelector(".session.current .go") ??
    document.querySelector(".session .go") ??
    $("new-session")
  ).focus();
}

const off = () => localStorage.getItem(OFF) === "1";

export async function show() {
  const lines = [...OTHERS, ...KEYS].flatMap(([key, what]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, what)]);
  const box = el("input", {
    type: "checkbox",
    checked: !off(),
    onchange: () => (box.checked ? localStorage.removeItem(OFF) : localStorage.setItem(OFF, "1")),
  });
  await dialog(
    "Keyboard",
    [
      el("dl", { class: "keys" }, ...lines),
      el("label", { class: "check" }, box, "Single keys work while nothing is being typed"),
    ],
    "Close",
    () => true,
  );
}

/** @param {() => boolean} stop stops the running answer; returns whether there was one */
export function setUp(stop) {
  $("shortcuts").addEventListener("click", show);
  addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || $("dialog").open) return;
    const on = /** @type {HTMLElement} */ (event.target);
    if (event.key === "Escape") return escape(stop);
    if (off() || on.matches("input:not([type=radio], [type=range], [type=checkbox]), textarea, select")) return;
    const found = KEYS.find(([key]) => key === event.key);
    const source = /^[1-9]$/.test(event.key)
      ? last(".chips")?.querySelector(`.chip[data-number="${event.key}"]`)
      : null;
    if (!found && !source) return;
    event.preventDefault();
    if (found) found[2]();
    else source.click();
  });
}

/** @param {() => boolean} stop */
function escape(stop) {
  if (opened()) close();
  else if (document.body.classList.contains("side-open")) side(false);
  else if (!stop()) $("question").focus();
}
