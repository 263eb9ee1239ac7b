/** Conversations: the list at the side; new, continue, fork, delete. */

import { Failure, get, post, remove } from "./api.js";
import { dialog } from "./dialog.js";
import { $, el, icon, say } from "./dom.js";
import { bus, update, view } from "./state.js";
import * as transcripts from "./transcripts.js";
import { ago, count } from "./words.js";

/**
 * @typedef {{id: string, title: string, turns: number, tokens: number, stored_bytes: number, used_at: number}} Session
 */

export const fresh = () =>
  `page-${[...crypto.getRandomValues(new Uint8Array(6))].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;

/** The server's title, or what its id says. @param {Session} session */
const called = ({ id, title }) =>
  (title || id.replace(/^page-(....).*/, "Conversation $1")) + (title && id.startsWith("fork-") ? " (fork)" : "");

/** @param {string} id */
const path = (id, rest = "") => `sessions/${encodeURIComponent(id)}${rest}`;

/** @param {Session} session */
function item(session) {
  const current = session.id === view.session;
  const title = called(session);
  const menu = el(
    "div",
    { class: "acts", hidden: true },
    act("Fork", () => fork(session)),
    act("Delete…", () => drop(session, title)),
  );
  const more = el(
    "button",
    {
      type: "button",
      class: "quiet square",
      "aria-label": `More for ${title}`,
      "aria-expanded": "false",
      onclick: () => {
        menu.hidden = !menu.hidden;
        more.setAttribute("aria-expanded", String(!menu.hidden));
      },
    },
    icon("more"),
  );
  const go = el(
    "button",
    {
      type: "button",
      class: "go",
      "aria-current": current ? "true" : null,
      title: session.id,
      onclick: () => choose(session.id),
    },
    el("span", { class: "title" }, title),
    el(
      "span",
      { class: "muted" },
      `${count(session.turns, "turn")} · ${count(session.tokens, "token")} · ${ago(session.used_at)}`,
    ),
  );
  return el(
    "li",
    { class: current ? "session current" : "session", "data-session": session.id },
    el("div", { class: "line" }, go, more),
    menu,
  );
}

/** @param {string} label @param {() => Promise<unknown>} what */
function act(label, what) {
  return el("button", { type: "button", class: "quiet", onclick: () => what().catch(told) }, label);
}

/** @param {unknown} error */
function told(error) {
  if (!(error instanceof Failure)) throw error;
  bus.dispatchEvent(new CustomEvent("trouble", { detail: error.message }));
}

/** @param {string} id */
export function choose(id) {
  update({ session: id });
  bus.dispatchEvent(new Event("session"));
  draw();
}

/** @param {Session} session */
async function fork(session) {
  const made = await post(path(session.id, "/fork"));
  say(`Forked. The new conversation has the same ${count(session.turns, "turn")}.`);
  bus.dispatchEvent(new CustomEvent("forked", { detail: { from: session.id, to: made.id } }));
  choose(made.id);
}

/** @param {Session} session @param {string} title */
async function drop(session, title) {
  const done = await dialog(
    "Delete this conversation?",
    [el("p", {}, `“${title}” and its stored KV are deleted for good.`)],
    "Delete",
    async () => {
      await remove(path(session.id));
      return true;
    },
    "danger",
  );
  if (!done) return;
  transcripts.forget(session.id);
  if (session.id === view.session) choose("");
  else draw();
  say("Deleted.");
}

let drawing = 0;

/** Update the list from the server. */
export async function draw() {
  const mine = ++drawing;
  try {
    const { data } = await get("sessions");
    if (mine !== drawing) return;
    const none = el("li", { class: "muted none" }, "Ask something: each conversation is stored here, with its KV.");
    $("sessions").replaceChildren(...(data.length ? data.map(item) : [none]));
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    if (mine === drawing) $("sessions").replaceChildren(el("li", { class: "muted none" }, error.message));
  }
}

export function setUp() {
  $("new-session").addEventListener("click", () => choose(""));
  bus.addEventListener("done", draw);
  bus.addEventListener("key", draw);
  draw();
}
