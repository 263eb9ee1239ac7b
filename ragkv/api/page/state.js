/** The state in the address: collection, conversation, and how to answer. `transcripts.js` keeps what was said. */

/**
 * @typedef {object} View
 * @property {string} collection "" without a collection
 * @property {string} session "" before the first question
 * @property {string} reuse "fused", "prefix" or "none"
 * @property {string} selector "" for the server's setting
 * @property {string} ratio "server", "auto" or a number
 * @property {number} k
 */

/** @type {View} */
const DEFAULTS = { collection: "", session: "", reuse: "fused", selector: "", ratio: "server", k: 6 };
const NAME = /^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$/;

/** @type {View} */
export const view = read();

/** Sends "view" when the user changed the address, "done" when documents, answers or conversations changed on the server. */
export const bus = new EventTarget();

/** @returns {View} */
function read() {
  const given = new URLSearchParams(location.hash.slice(1));
  const k = Number(given.get("k"));
  const ratio = given.get("ratio") ?? "server";
  const own = ratio !== "" && Number(ratio) >= 0 && Number(ratio) <= 1;
  return {
    collection: named(given.get("collection")) ?? "",
    session: given.get("session") ?? "",
    reuse: ["prefix", "none"].includes(given.get("reuse") ?? "") ? String(given.get("reuse")) : "fused",
    selector: given.get("selector") ?? "",
    ratio: ratio === "auto" || own ? ratio : "server",
    k: Number.isInteger(k) && k >= 1 && k <= 64 ? k : DEFAULTS.k,
  };
}

/** @param {string|null} name @returns {string|null} */
export function named(name) {
  return name && NAME.test(name) ? name : null;
}

/** @param {Partial<View>} patch */
export function update(patch) {
  Object.assign(view, patch);
  const kept = Object.entries(view).filter(([name, value]) => value !== DEFAULTS[/** @type {keyof View} */ (name)]);
  const hash = new URLSearchParams(kept.map(([name, value]) => [name, String(value)])).toString();
  history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
}

export const changed = () => bus.dispatchEvent(new Event("done"));

addEventListener("hashchange", () => {
  Object.assign(view, read());
  bus.dispatchEvent(new Event("view"));
});
