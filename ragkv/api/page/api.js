/** Requests to /v1: the API key, failures as messages, retries after a wait, server-sent events. Touches no element. */

import { told } from "./words.js";

const ROOT = new URL("v1/", document.baseURI);
const KEY = "ragkv.key"; // in this tab's session storage only
const TRIES = 8;
const LONGEST_WAIT_S = 120;

/** A failure with a message that can be shown as it is. */
export class Failure extends Error {
  /** @param {string} kind @param {string} message @param {number} [status] @param {number|null} [retryAfter] seconds */
  constructor(kind, message, status = 0, retryAfter = null) {
    super(message);
    this.kind = kind;
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** @type {(refused: boolean) => Promise<string|null>} */
let askForKey = async () => null;
/** @type {Promise<string|null>|null} */
let asking = null;

/** @param {typeof askForKey} ask asks the user; resolves with `null` if the user declines */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

export const key = () => sessionStorage.getItem(KEY);

/** @param {string|null} value */
export function setKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

/**
 * One request; asks the user for a key if the server requires one. Throws `Failure`.
 * @param {string} method
 * @param {string} path below /v1
 * @param {{json?: any, form?: FormData, signal?: AbortSignal, quiet?: boolean}} [how]
 * @returns {Promise<Response>}
 */
async function request(method, path, how = {}) {
  for (;;) {
    const used = key();
    /** @type {Record<string, string>} */
    const headers = { Accept: "application/json, text/event-stream" };
    if (used) headers.Authorization = `Bearer ${used}`;
    if (how.json !== undefined) headers["Content-Type"] = "application/json";
    const body = how.json === undefined ? how.form : JSON.stringify(how.json);
    let response;
    try {
      response = await fetch(new URL(path, ROOT), {
        method,
        headers,
        body,
        signal: how.signal,
        credentials: "omit",
        cache: "no-store",
      });
    } catch (error) {
      throw broken(error, "unreachable", "The server cannot be reached. Is ragkv serve still running?");
    }
    if (response.ok) return response;
    const failure = await failed(response);
    if (failure.kind !== "key" || how.quiet) throw failure;
    if (key() !== used) continue; // another request has asked the user meanwhile
    asking ??= askForKey(Boolean(used)).finally(() => {
      asking = null;
    });
    if (!(await asking)) throw failure;
  }
}

/** @param {any} error @param {string} kind @param {string} message */
function broken(error, kind, message) {
  return error?.name === "AbortError" ? new Failure("stopped", "Stopped.") : new Failure(kind, message);
}

/** @param {Response} response @returns {Promise<Failure>} */
async function failed(response) {
  const body = await response.json().catch(() => ({}));
  const { kind, message } = told(response.status, body?.error ?? {}, response.headers.get("x-request-id"));
  const after = Number.parseFloat(response.headers.get("retry-after") ?? "");
  return new Failure(kind, message, response.status, Number.isFinite(after) ? after : null);
}

/** @param {string} path @param {{signal?: AbortSignal, quiet?: boolean}} [how] @returns {Promise<any>} */
export const get = async (path, how) => (await request("GET", path, how)).json();

/** @param {string} path @param {any} [json] @param {AbortSignal} [signal] @returns {Promise<any>} */
export const post = async (path, json = {}, signal) => (await request("POST", path, { json, signal })).json();

/** @param {string} path @param {FormData} form @returns {Promise<any>} */
export const upload = async (path, form) => (await request("POST", path, { form })).json();

/** @param {string} path */
export const remove = async (path) => {
  await request("DELETE", path);
};

/**
 * Try again after the wait that the server names, and report the seconds left. Throws the last `Failure`.
 * @template T
 * @param {() => Promise<T>} attempt
 * @param {(failure: Failure|null, left: number) => void} onWait `null` when the wait is over
 * @param {AbortSignal} [signal] ends the wait too @param {number} [tries]
 * @returns {Promise<T>}
 */
export async function patiently(attempt, onWait, signal, tries = TRIES) {
  for (let tried = 1; ; tried += 1) {
    try {
      return await attempt();
    } catch (error) {
      if (!(error instanceof Failure) || error.kind !== "busy" || tried === tries) throw error;
      const wait = Math.min(LONGEST_WAIT_S, Math.max(1, Math.ceil(error.retryAfter ?? 2 ** tried)));
      for (let left = wait; left > 0; left -= 1) {
        onWait(error, left);
        await pause(1000, signal);
      }
      onWait(null, 0);
    }
  }
}

/** @param {number} ms @param {AbortSignal} [signal] @returns {Promise<void>} */
function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const stop = () => {
      clearTimeout(timer);
      reject(new Failure("stopped", "Stopped."));
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", stop);
      resolve();
    }, ms);
    if (signal?.aborted) stop();
    else signal?.addEventListener("abort", stop, { once: true });
  });
}

/**
 * Server-sent events of a POST, as they arrive. Throws `Failure`, of kind "broken" when the connection ends in between.
 * @param {string} path @param {any} json @param {AbortSignal} signal
 * @returns {Promise<AsyncGenerator<{event: string, data: any}>>} resolves once the server accepted
 */
export async function events(path, json, signal) {
  const response = await request("POST", path, { json, signal });
  return parsed(response.body);
}

/** @param {any} body a stream of bytes */
async function* parsed(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
      rest = blocks.pop() ?? "";
      for (const block of blocks) {
        const lines = block.split("\n");
        const field = (/** @type {string} */ name) =>
          lines.filter((line) => line.startsWith(`${name}:`)).map((line) => line.slice(name.length + 1).trimStart());
        const data = field("data").join("\n");
        if (data) yield { event: field("event")[0] ?? "message", data: JSON.parse(data) };
      }
    }
  } catch (error) {
    throw broken(error, "broken", "The connection broke.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
