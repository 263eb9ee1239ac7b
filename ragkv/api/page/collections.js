/** The collections: the list in the bar, creating one, deleting one. */

import { Failure, get, post, remove } from "./api.js";
import { dialog } from "./dialog.js";
import { $, el, say } from "./dom.js";
import { bus, named, update, view } from "./state.js";
import { count } from "./words.js";

const NEW = "/"; // not a valid name, so no collection has it
export const FIRST = "default"; // created automatically for the first document

/** @type {{name: string, documents: number, chunks: number}[]} */
let known = [];
let loaded = false;

/** The chosen collection with the server's counts. */
export const current = () => known.find(({ name }) => name === view.collection);

/** Whether the server has answered yet. */
export const ready = () => loaded;

/** Update the list; if the chosen collection was deleted, choose another. Throws `Failure`. */
export async function refresh() {
  known = (await get("collections")).data;
  loaded = true;
  if (!current()) update({ collection: (known.find(({ documents }) => documents > 0) ?? known[0])?.name ?? "" });
  draw();
  bus.dispatchEvent(new Event("collection"));
}

function draw() {
  const options = known.map(({ name }) => el("option", { value: name }, name));
  if (!known.length) options.push(el("option", { value: "", disabled: true }, "No collection yet"));
  options.push(el("option", { value: NEW }, "New collection …"));
  $("collection").replaceChildren(...options);
  $("collection").value = view.collection;
  const documents = current()?.documents;
  $("document-count").hidden = documents === undefined;
  $("document-count").textContent = documents === undefined ? "" : documents.toLocaleString("en");
}

/** The collection to put documents in, made if there is none. @returns {Promise<string>} */
export async function wanted() {
  if (!view.collection) await made(FIRST);
  return view.collection;
}

/** Create a collection, unless it exists. Throws `Failure`. @param {string} name */
export async function ensure(name) {
  try {
    await post("collections", { name });
  } catch (error) {
    if (!(error instanceof Failure) || error.status !== 409) throw error; // it exists already, as wanted
  }
}

/** @param {string} name */
export async function choose(name) {
  update({ collection: name });
  await refresh();
}

/** @param {string} name */
async function made(name) {
  await ensure(name);
  await choose(name);
  return name;
}

/**
 * Count the documents of one upload at once; `refresh` asks the server for the exact numbers.
 * @param {string} name
 * @param {{added?: string[], deleted?: string[], chunks?: {encoded: number, present: number}}} report
 */
export function counted(name, report) {
  const collection = known.find((one) => one.name === name);
  if (!collection) return;
  collection.documents += (report.added?.length ?? 0) - (report.deleted?.length ?? 0);
  collection.chunks += (report.chunks?.encoded ?? 0) + (report.chunks?.present ?? 0);
  draw();
  bus.dispatchEvent(new Event("collection"));
}

async function create() {
  const input = el("input", {
    type: "text",
    maxlength: 64,
    required: true,
    spellcheck: "false",
    autocapitalize: "off",
  });
  const body = [
    el("label", {}, "Name", input),
    el("p", { class: "muted" }, "Letters, digits, dots, dashes and underscores; 64 at most."),
  ];
  const name = await dialog("New collection", body, "Create", () => {
    if (!named(input.value.trim()))
      throw new Error(
        "A name begins with a letter or digit, and has letters, digits, dots, dashes and underscores only.",
      );
    return made(input.value.trim());
  });
  if (name) say(`Collection ${name} is ready.`);
}

/** Delete the chosen collection after a confirmation. */
export async function drop() {
  const { name, documents } = /** @type {any} */ (current());
  const gone = await dialog(
    `Delete ${name}?`,
    [el("p", {}, `Its ${count(documents, "document")} and their stored KV are deleted for good.`)],
    "Delete",
    async () => {
      await remove(`collections/${encodeURIComponent(name)}`);
      return true;
    },
    "danger",
  );
  if (!gone) return false;
  update({ collection: "" });
  await refresh();
  return true;
}

export function setUp() {
  $("collection").addEventListener("change", async () => {
    const picked = $("collection").value;
    if (picked !== NEW) update({ collection: picked });
    draw();
    if (picked === NEW) await create();
    bus.dispatchEvent(new Event("collection"));
  });
  bus.addEventListener("view", () => {
    draw();
    bus.dispatchEvent(new Event("collection"));
  });
}
