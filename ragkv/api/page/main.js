/** The page: connects its parts. All data comes from the public API. */

import { Failure, get, key, onKeyNeeded, patiently, setKey } from "./api.js";
import { Turn } from "./ask.js";
import * as collections from "./collections.js";
import { dialog } from "./dialog.js";
import * as documents from "./documents.js";
import { $, el, say, small } from "./dom.js";
import { close, opened, side } from "./drawer.js";
import * as examples from "./examples.js";
import * as sessions from "./sessions.js";
import * as settings from "./settings.js";
import { bus, changed, update, view } from "./state.js";
import * as transcripts from "./transcripts.js";
import { measure } from "./timing.js";
import { count } from "./words.js";

/** @type {Map<string, HTMLElement[]>} the turns shown in this tab, by conversation */
const said = new Map();
/** @type {Turn|null} */
let current = null;

/** @param {string} question */
function ask(question) {
  const follows = Boolean(view.session);
  if (!follows) update({ session: sessions.fresh() });
  if (small.matches) $("how").open = false;
  /** @type {Record<string, any>} */
  const how = { question, ...(view.collection ? { collection: view.collection } : {}), ...settings.asked() };
  const { reuse: _, ...comparison } = how;
  pose({ ...how, session_id: view.session, stream: true }, comparison, follows);
}

/** @param {Record<string, any>} body @param {Record<string, any>} comparison @param {boolean} follows */
async function pose(body, comparison, follows) {
  const turn = new Turn(body, measure(comparison, follows), () => {
    if (!current) pose(body, comparison, follows);
  });
  const turns = said.get(body.session_id) ?? [];
  said.set(body.session_id, turns);
  for (const made of document.querySelectorAll("#turns details.made"))
    /** @type {HTMLDetailsElement} */ (made).open = false;
  turns.push(turn.node);
  current = turn;
  busy(true);
  draw();
  const bottom = follow(turn.node);
  const answer = await turn.run();
  current = null;
  busy(false);
  hint();
  bottom();
  if (answer) {
    say("The answer is complete.");
    transcripts.keep(body.session_id, [...transcripts.load(body.session_id), { body, answer }]);
  }
  changed();
}

/** Keep what grows in sight, unless its reader scrolled away. @param {HTMLElement} node @returns {() => void} stops */
function follow(node) {
  const thread = $("thread");
  let pinned = true;
  const grown = new ResizeObserver(() => {
    if (pinned) thread.scrollTop = Math.min(thread.scrollHeight, node.offsetTop - 16);
  });
  const moved = () => {
    pinned = false;
  };
  grown.observe(node);
  for (const way of ["wheel", "touchmove", "keydown"])
    thread.addEventListener(way, moved, { passive: true, once: true });
  return () => setTimeout(() => grown.disconnect(), 300);
}

/** @param {boolean} on */
function busy(on) {
  $("send").hidden = on;
  $("stop").hidden = !on;
}

/** Show the conversation, or what to do first. */
function draw() {
  if (view.session && !said.has(view.session)) restore(view.session);
  const turns = said.get(view.session) ?? [];
  const past = view.session && !turns.length;
  const nodes = turns.length ? turns : past ? [goOn()] : [welcome()];
  const shown = $("turns").children;
  if (shown.length !== nodes.length || nodes.some((node, at) => node !== shown[at]))
    $("turns").replaceChildren(...nodes);
  hint();
}

/** Show what this browser kept of a conversation. @param {string} session */
function restore(session) {
  const kept = transcripts.load(session);
  const shown = kept.map(({ body, answer }, at) => {
    const { reuse: _, session_id: _id, stream: _stream, ...comparison } = body;
    return new Turn(body, measure(comparison, at > 0), () => ask(body.question)).restore(answer).node;
  });
  if (shown.length) said.set(session, shown);
}

const goOn = () =>
  el(
    "section",
    { class: "welcome" },
    el("h1", {}, "Continue this conversation"),
    el(
      "p",
      {},
      "The server stores its history as tokens and KV, and puts it before your next question. " +
        "Its text is kept in the browser where it was asked.",
    ),
  );

function welcome() {
  const collection = collections.current();
  if (!collections.ready()) return el("section", { class: "welcome" });
  if (collection?.documents) {
    return el(
      "section",
      { class: "welcome" },
      el("h1", {}, examples.chosen() ? "Ask the example documents" : "Ask your documents"),
      el(
        "p",
        {},
        `The collection ${collection.name} holds ${count(collection.documents, "document")} in ` +
          `${count(collection.chunks, "chunk")}. ` +
          `An answer comes with its sources, and with its prompt: which tokens were reused, and which had to be computed.`,
      ),
      examples.questions(ask),
    );
  }
  return el(
    "section",
    { class: "welcome" },
    el("h1", {}, "Add documents, then ask"),
    el(
      "p",
      {},
      "Each passage is run through the model once and its KV is stored. A question then reuses it " +
        "wherever the passage stands in the prompt, and recomputes only the tokens that need it. You see which.",
    ),
    examples.offer(),
    documents.dropZone(),
  );
}

/** @param {boolean} [asked] although it cannot be asked now */
function hint(asked = false) {
  const empty =
    collections.ready() && view.collection && !collections.current()?.documents && !said.get(view.session)?.length;
  if (asked && current) {
    $("ask-hint").textContent = "The answer before is being written. Ask when it is complete, or stop it with Esc.";
    return;
  }
  $("ask-hint").textContent = asked
    ? "There is no collection to ask yet: add a document first."
    : empty
      ? "No documents yet: an answer would rest on the model alone."
      : "";
}

/** @param {string} words "" clears */
function banner(words, label = "", act = () => {}) {
  $("banner").hidden = !words;
  $("banner").replaceChildren(
    words,
    ...(label ? [el("button", { type: "button", class: "outline", onclick: act }, label)] : []),
  );
}

async function begin() {
  try {
    await patiently(
      collections.refresh,
      (failure, left) => banner(failure ? `${failure.message} Trying again in ${left} s.` : ""),
      undefined,
      Infinity,
    );
    banner("");
    $("model").textContent = (await get("models")).data.at(-1)?.id ?? ""; // the last is the model alone
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    if (error.kind === "key") banner("This server asks for an API key.", "Enter the key", begin);
    else
      banner(error.message, "Try again", () => {
        begin();
        bus.dispatchEvent(new Event("key"));
      });
  }
  $("key").hidden = !key();
  draw();
}

/** @param {boolean} refused @returns {Promise<string|null>} */
async function askForKey(refused) {
  const field = el("input", { type: "password", required: true, autocomplete: "off", spellcheck: "false" });
  const why = refused
    ? "The server did not accept that key. Another one?"
    : "This server asks for an API key. It is made with ragkv keys.";
  const given = await dialog(
    "API key",
    [
      el("p", {}, why),
      el("label", {}, "Key", field),
      el("p", { class: "muted" }, "Stored in this tab only, until it is closed."),
    ],
    "Use this key",
    () => {
      setKey(field.value.trim());
      return field.value.trim();
    },
  );
  $("key").hidden = !key();
  if (given)
    setTimeout(() => {
      bus.dispatchEvent(new Event("key"));
      if (!collections.ready()) begin();
    });
  return given;
}

async function forgetKey() {
  const done = await dialog(
    "API key",
    [el("p", {}, "This tab sends a key with every request. Without it, the texts kept in this browser are deleted too.")],
    "Forget it",
    () => {
      setKey(null);
      transcripts.forgetAll();
      return true;
    },
    "danger",
  );
  if (done) location.reload();
}

function composer() {
  const field = $("question");
  const grow = () => {
    field.style.blockSize = "auto";
    field.style.blockSize = `${field.scrollHeight}px`;
  };
  field.addEventListener("input", grow);
  field.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("ask").requestSubmit();
  });
  $("ask").addEventListener("submit", (/** @type {Event} */ event) => {
    event.preventDefault();
    const question = field.value.trim();
    if (!question) return;
    if (current || !view.collection) return hint(true);
    field.value = "";
    grow();
    ask(question);
  });
  $("stop").addEventListener("click", () => current?.stop());
}

/** Close what is open, or stop the answer. */
function escape() {
  if (opened()) close();
  else if (document.body.classList.contains("side-open")) side(false);
  else if (current) current.stop();
  else $("question").focus();
}

onKeyNeeded(askForKey);
composer();
settings.setUp();
collections.setUp();
documents.setUp();
$("key").addEventListener("click", forgetKey);
$("menu").addEventListener("click", () => side(true));
$("skip").addEventListener("click", (/** @type {Event} */ event) => {
  event.preventDefault();
  $("question").focus();
});
bus.addEventListener("collection", draw);
bus.addEventListener("view", () => {
  sessions.draw();
  draw();
});
bus.addEventListener("session", () => {
  side(false);
  if (opened() === "source") close();
  draw();
  if (!view.session) $("question").focus();
});
bus.addEventListener("trouble", (event) =>
  banner(/** @type {CustomEvent} */ (event).detail, "Close", () => banner("")),
);
bus.addEventListener("forked", (event) => {
  const { from, to } = /** @type {CustomEvent} */ (event).detail;
  transcripts.keep(to, transcripts.load(from));
  said.set(
    to,
    (said.get(from) ?? []).filter((node) => node.classList.contains("whole")),
  );
}); // only one of the two is shown at a time
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.defaultPrevented && !$("dialog").open) escape();
});
begin().then(() => {
  sessions.setUp();
  settings.learn();
});
