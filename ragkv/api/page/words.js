/** Numbers and failures as text for people. */

/** @param {number} n @param {string} one @param {string} [many] */
export const count = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;

/** @param {number} share between 0 and 1 */
export const percent = (share) => `${Math.round(share * 100)} %`;

/** @param {number} seconds */
export function duration(seconds) {
  const ms = seconds * 1000;
  if (ms >= 10_000) return `${seconds.toFixed(1)} s`;
  if (ms >= 1000) return `${seconds.toFixed(2)} s`;
  return `${ms >= 10 || ms === 0 ? Math.round(ms) : ms.toFixed(1)} ms`;
}

/** @param {number} seconds since the epoch */
export function ago(seconds) {
  const past = Date.now() / 1000 - seconds;
  if (past < 60) return "just now";
  if (past < 3600) return `${Math.floor(past / 60)} min ago`;
  if (past < 86400) return `${Math.floor(past / 3600)} h ago`;
  return new Date(seconds * 1000).toLocaleDateString();
}

/** The last part of a path, which is what people call a document by. @param {string} path */
export const base = (path) => path.split(/[\\/]/).pop() || path;

/**
 * The kind and message of a failed response.
 * @param {number} status
 * @param {{message?: string, param?: string|null, code?: string|null}} error
 * @param {string|null} id
 * @returns {{kind: string, message: string}}
 */
export function told(status, error, id) {
  const said = error.message ?? "";
  const where = error.param && !said.includes(error.param) ? ` (${error.param})` : "";
  if (status === 401) return { kind: "key", message: "This server asks for an API key." };
  if (status === 403) return { kind: "refused", message: said || "This key may not do that." };
  if (status === 404) return { kind: "missing", message: said || "It is not there any more." };
  if (status === 413) return { kind: "large", message: `Too large for this server. ${said}` };
  if (status === 415) return { kind: "refused", message: `This server does not take that kind of file. ${said}` };
  if (status === 429) return { kind: "busy", message: "Too many requests for this key just now." };
  if (status === 503)
    return { kind: "busy", message: said.replace(/[.;,]? ask again\.$/i, ".") || "The server is busy." };
  if (status === 408 || status === 504)
    return { kind: "late", message: `The server ran out of time for this. ${said}` };
  if (status >= 500)
    return { kind: "server", message: `The server failed${id ? ` (request ${id}: its log says more)` : ""}.` };
  return { kind: "invalid", message: said ? said + where : `The server refused this (${status}).` };
}
