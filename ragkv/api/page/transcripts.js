/** What was said, in this browser alone: questions, and answers as the server sent them. The server keeps no text. */

const PREFIX = "ragkv.said.";
const MOST = 40; // conversations; of more, and when the browser's storage is full, the oldest go

/** @typedef {{body: Record<string, any>, answer: import("./types.js").Answer}} Said */

/** @param {string} session @returns {Said[]} */
export function load(session) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + session) ?? "null")?.turns ?? [];
  } catch {
    return [];
  }
}

/** @param {string} session @param {Said[]} turns */
export function keep(session, turns) {
  const text = JSON.stringify({ at: Date.now(), turns });
  for (const old of oldest(session).slice(0, -(MOST - 1))) forget(old);
  for (;;) {
    try {
      return localStorage.setItem(PREFIX + session, text);
    } catch {
      const [first] = oldest(session);
      if (!first) return;
      forget(first);
    }
  }
}

/** @param {string} session */
export const forget = (session) => localStorage.removeItem(PREFIX + session);

export const forgetAll = () => oldest("").forEach(forget);

/** The other conversations, the oldest first. @param {string} but */
function oldest(but) {
  const names = Object.keys(localStorage).filter((name) => name.startsWith(PREFIX) && name !== PREFIX + but);
  const at = (/** @type {string} */ name) => JSON.parse(localStorage.getItem(name) ?? "{}").at ?? 0;
  return names.sort((a, b) => at(a) - at(b)).map((name) => name.slice(PREFIX.length));
}
