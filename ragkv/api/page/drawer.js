/**
 * The panel at the side. It shows one thing at a time, is closed by Escape, and returns the focus. On small screens it
 * covers the page.
 */

import { $ } from "./dom.js";

const narrow = matchMedia("(max-width: 1179px)");
/** @type {HTMLElement|null} */
let opener = null;
let name = "";

/** The name of the open content; "" if the drawer is closed. */
export const opened = () => name;

/**
 * @param {string} title
 * @param {HTMLElement|null} from gets the focus back
 * @param {any[]} content
 * @param {string} what
 */
export function open(title, from, content, what) {
  if (!name || !$("drawer").contains(document.activeElement)) opener = from;
  name = what;
  $("drawer-title").textContent = title;
  $("drawer-body").replaceChildren(...content.filter((one) => one != null && one !== false));
  $("drawer-body").scrollTop = 0;
  $("drawer").hidden = false;
  $("drawer").dataset.what = what;
  cover();
  $("drawer-title").focus({ preventScroll: true });
}

export function close() {
  if (!name) return;
  name = "";
  $("drawer").hidden = true;
  cover();
  const back = opener?.isConnected ? opener : $("question");
  back.focus({ preventScroll: true });
}

/** Make the page inert while the drawer covers it. */
function cover() {
  const covering = Boolean(name) && narrow.matches;
  for (const under of [$("main"), $("side")]) under.inert = covering;
  $("veil").hidden = !covering && !document.body.classList.contains("side-open");
}

/** The side bar, where it is a sheet. @param {boolean} on */
export function side(on) {
  document.body.classList.toggle("side-open", on);
  $("menu").setAttribute("aria-expanded", String(on));
  $("main").inert = on;
  $("veil").hidden = !on;
  if (on) $("new-session").focus();
  else if ($("side").contains(document.activeElement)) $("menu").focus();
}

narrow.addEventListener("change", () => {
  side(false);
  cover();
});
$("drawer-close").addEventListener("click", close);
$("veil").addEventListener("click", () => {
  side(false);
  close();
});
