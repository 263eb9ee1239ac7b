/**
 * One dialog for every short question: yes or no, a name, a key, a text. It is the browser's own dialog element, which
 * handles focus and Escape.
 */

import { $ } from "./dom.js";

/** @type {Promise<unknown>} */
let before = Promise.resolve();

/**
 * Show a dialog, one at a time. Resolves with the result of `take`, or `null` if it was closed. `take` may throw an
 * error whose message is shown.
 * @template T
 * @param {string} title
 * @param {Node[]} body
 * @param {string} yes the button that does it
 * @param {() => T|Promise<T>} take
 * @param {string} [tone] "danger"
 * @returns {Promise<T|null>}
 */
export function dialog(title, body, yes, take, tone = "") {
  const next = before.then(() => shown(title, body, yes, take, tone));
  before = next.catch(() => null);
  return next;
}

/**
 * @param {string} title
 * @param {Node[]} body
 * @param {string} yes
 * @param {() => any} take
 * @param {string} tone
 * @returns {Promise<any>}
 */
function shown(title, body, yes, take, tone) {
  const box = $("dialog");
  const wrong = document.createElement("p");
  wrong.className = "wrong";
  wrong.setAttribute("role", "alert");
  $("dialog-title").textContent = title;
  $("dialog-body").replaceChildren(...body, wrong);
  $("dialog-yes").textContent = yes;
  $("dialog-yes").className = `primary ${tone}`;
  return new Promise((resolve) => {
    /** @type {any} */
    let result = null;
    $("dialog-form").onsubmit = async (/** @type {Event} */ event) => {
      event.preventDefault();
      $("dialog-yes").disabled = true;
      try {
        result = await take();
        box.close();
      } catch (error) {
        wrong.textContent = error instanceof Error ? error.message : String(error);
      } finally {
        $("dialog-yes").disabled = false;
      }
    };
    $("dialog-no").onclick = () => box.close();
    box.onclose = () => resolve(result);
    box.showModal();
    (
      $("dialog-body").querySelector("input, textarea") ??
      $(tone === "danger" ? "dialog-no" : "dialog-yes")
    ).focus();
  });
}
