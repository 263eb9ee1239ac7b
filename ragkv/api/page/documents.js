/**
 * Dropped, picked or pasted documents, one request each so that each has its own result; the list of stored documents.
 */

import { Failure, get, patiently, post, remove, upload } from "./api.js";
import { counted, current, drop as dropCollection, refresh, wanted } from "./collections.js";
import { dialog } from "./dialog.js";
import { $, el, icon, say } from "./dom.js";
import { open, opened } from "./drawer.js";
import { bus, changed, view } from "./state.js";
import { base, count } from "./words.js";

const PAGE = 50;
const LIST_EVERY_MS = 1500; // while documents are being added

/** @typedef {{name: string, send: (to: string) => Promise<any>, row: any, said: any}} Job */

/** @type {Job[]} */
const queue = [];
let working = false;
let asked = 0;
let done = 0;
const results = el("ul", { class: "results", "aria-label": "Added now" });
const progress = el("progress", { max: 1, value: 0, "aria-label": "Documents added" });
const summary = el("p", { class: "muted", role: "status" });
const uploads = el(
  "section",
  { class: "uploads", hidden: true },
  el("div", { class: "row" }, progress, summary),
  results,
);
const list = el("div", { class: "documents" });

/** @param {File[]} files */
export function add(files) {
  enqueue(
    files.map((file) => [
      file.name,
      (to) => {
        const form = new FormData();
        form.append("files", file);
        return upload(to, form);
      },
    ]),
  );
}

/** @param {string} title @param {string} text */
function paste(title, text) {
  const id = title || `Pasted ${new Date().toISOString().slice(0, 19).replace("T", " ")}`;
  enqueue([[id, (to) => post(to, { documents: [{ id, title: id, text }] })]]);
}

/** @param {[string, (to: string) => Promise<any>][]} wishes */
function enqueue(wishes) {
  if (!wishes.length) return;
  if (!working) {
    asked = 0;
    done = 0;
    results.replaceChildren();
  }
  for (const [name, send] of wishes) {
    const said = el("span", { class: "said" }, "waiting");
    const row = el("li", { class: "result", "data-name": name }, el("span", { class: "name" }, base(name)), said);
    results.append(row);
    queue.push({ name, send, row, said });
  }
  asked += wishes.length;
  if (opened() !== "documents") show();
  if (!working) work();
}

/** Send one document after the other, so that the server sets the pace. */
async function work() {
  working = true;
  uploads.hidden = false;
  for (let job = queue.shift(); job; job = queue.shift()) {
    count_();
    await one(job);
    done += 1;
    count_();
    changed();
  }
  working = false;
  await refresh().catch(told);
  await draw();
}

function count_() {
  progress.max = asked;
  progress.value = done;
  const failures = results.querySelectorAll(".result.bad").length;
  summary.textContent =
    done < asked ? `${done} of ${asked}` : `${asked - failures} done${failures ? `, ${failures} failed` : ""}`;
}

/** @param {Job} job */
async function one({ name, send, row, said }) {
  row.classList.add("now");
  said.textContent = "reading and encoding …";
  row.scrollIntoView({ block: "nearest" });
  try {
    const collection = await wanted();
    const to = `collections/${encodeURIComponent(collection)}/documents`;
    const report = await patiently(
      () => send(to),
      (failure, left) => {
        said.textContent = failure ? `${failure.message} Again in ${left} s` : "reading and encoding …";
      },
    );
    said.textContent = happened(report);
    row.classList.add(report.chunks?.failed ? "bad" : "good");
    counted(collection, report);
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    said.textContent = error.message;
    row.classList.add("bad");
    say(`${base(name)}: ${error.message}`);
  }
  row.classList.remove("now");
}

/**
 * @param {{added: string[], changed: string[], unchanged: string[], chunks: {encoded: number, present: number, failed:
 * number, left: number}}} report
 */
function happened(report) {
  const what = report.added.length
    ? "added"
    : report.changed.length
      ? "replaced"
      : report.unchanged.length
        ? "already here, unchanged"
        : "nothing in it to keep";
  const { encoded = 0, present = 0, failed = 0, left = 0 } = report.chunks ?? {};
  const kv = [
    encoded && `${count(encoded, "chunk")} encoded`,
    present && `${count(present, "chunk")} stored already`,
    failed && `${failed} could not be encoded`,
    left && `${left} to be encoded when a question needs them`,
  ].filter(Boolean);
  return [what, ...kv].join(", ");
}

/** The place where documents are dropped, picked or pasted. @returns {HTMLElement} */
export function dropZone() {
  const picker = el("input", {
    type: "file",
    multiple: true,
    hidden: true,
    onchange: () => {
      add([...picker.files]);
      picker.value = "";
    },
  });
  return el(
    "div",
    { class: "drop" },
    icon("doc"),
    el("p", { class: "fine-only" }, "Drop documents anywhere on this page"),
    el(
      "div",
      { class: "row middle" },
      picker,
      el("button", { type: "button", class: "outline pick-files", onclick: () => picker.click() }, "Choose files"),
      el("button", { type: "button", class: "outline paste", onclick: pasteDialog }, "Paste text"),
    ),
  );
}

async function pasteDialog() {
  const title = el("input", { type: "text", maxlength: 200, placeholder: "Notes" });
  const text = el("textarea", { rows: 9, required: true });
  const wish = await dialog(
    "Paste text",
    [el("label", {}, "Title", title), el("label", {}, "Text", text)],
    "Add",
    () => {
      if (!text.value.trim()) throw new Error("There is no text yet.");
      return [title.value.trim(), text.value];
    },
  );
  if (wish) paste(wish[0], wish[1]);
}

/** @param {HTMLElement|null} [from] */
export function show(from = null) {
  if (!working && !queue.length && !results.querySelector(".bad")) uploads.hidden = true;
  open("Documents", from, [dropZone(), uploads, list], "documents");
  draw();
}

/** @param {any} document */
function entry(document) {
  const name = base(document.title || document.source || document.id);
  const gone = el(
    "button",
    {
      type: "button",
      class: "quiet square",
      "aria-label": `Delete ${name}`,
      onclick: async () => {
        const sure = await dialog(
          `Delete ${name}?`,
          [el("p", {}, "Its text and its stored KV are deleted for good, unless another document has the same passage.")],
          "Delete",
          async () => {
            await remove(
              `collections/${encodeURIComponent(view.collection)}/documents/${encodeURIComponent(document.id)}`,
            );
            return true;
          },
          "danger",
        );
        if (!sure) return;
        say(`${name} is deleted.`);
        await refresh().catch(told);
        changed();
        await draw();
        $("drawer-title").focus();
      },
    },
    icon("close"),
  );
  const size = document.chunks === undefined ? "" : count(document.chunks, "chunk");
  return el(
    "li",
    { "data-id": document.id, title: document.id },
    el("span", { class: "name" }, name),
    el("span", { class: "muted" }, size),
    gone,
  );
}

let drawing = 0;

/** The chosen collection's documents, a page at a time. @param {string} [after] */
async function draw(after) {
  if (opened() !== "documents") return;
  const mine = ++drawing;
  drawn = performance.now();
  const name = view.collection;
  if (!name)
    return list.replaceChildren(
      el(
        "p",
        { class: "muted" },
        "There is no collection yet. The first document makes one; or choose “New collection …” above.",
      ),
    );
  try {
    const query = new URLSearchParams({ limit: String(PAGE), ...(after ? { after } : {}) });
    const page = await get(`collections/${encodeURIComponent(name)}/documents?${query}`);
    if (mine !== drawing) return;
    const items = page.data.map(entry);
    list.querySelector(".more")?.remove();
    if (after) list.querySelector("ul").append(...items);
    else {
      const foot = el(
        "div",
        { class: "row end" },
        el(
          "button",
          {
            type: "button",
            class: "quiet danger",
            onclick: async () => {
              if (await dropCollection()) show();
            },
          },
          "Delete collection …",
        ),
      );
      list.replaceChildren(
        el("h3", {}, `In ${name}`, el("span", { class: "muted total" }, total())),
        items.length ? el("ul", {}, ...items) : el("p", { class: "muted" }, working ? "Documents are being added." : "Nothing yet."),
        foot,
      );
    }
    const next = page.next ?? (page.has_more ? page.data.at(-1)?.id : null);
    if (next)
      list
        .querySelector("ul")
        .after(el("button", { type: "button", class: "outline more", onclick: () => draw(next) }, "Show more"));
  } catch (error) {
    told(error);
  }
}

const total = () => count(current()?.documents ?? 0, "document");

let drawn = 0; // when the list was requested last
/** @type {ReturnType<typeof setTimeout>|undefined} */
let due;

/** The number at once; the list itself rarely while documents are being added. */
function follow() {
  const shown = list.querySelector(".total");
  if (shown) shown.textContent = total();
  if (!working) draw();
  else
    due ??= setTimeout(() => {
      due = undefined;
      draw();
    }, drawn + LIST_EVERY_MS - performance.now());
}

/** @param {unknown} error */
function told(error) {
  if (!(error instanceof Failure)) throw error;
  list.replaceChildren(el("p", { class: "notice bad", role: "alert" }, error.message));
}

export function setUp() {
  let depth = 0;
  const over = (/** @type {boolean} */ on) => {
    $("dropping").hidden = !on;
    $("dropping-to").textContent = view.collection || "a new collection";
  };
  const files = (/** @type {DragEvent} */ event) => event.dataTransfer?.types.includes("Files");
  addEventListener("dragenter", (event) => {
    if (files(event)) {
      event.preventDefault();
      depth += 1;
      over(true);
    }
  });
  addEventListener("dragover", (event) => {
    if (files(event)) event.preventDefault();
  });
  addEventListener("dragleave", () => {
    depth = Math.max(0, depth - 1);
    if (!depth) over(false);
  });
  addEventListener("drop", (event) => {
    depth = 0;
    over(false);
    if (!files(event)) return;
    event.preventDefault();
    add([.../** @type {DataTransfer} */ (event.dataTransfer).files]);
  });
  $("documents").addEventListener("click", () => show($("documents")));
  bus.addEventListener("collection", follow);
}
