/**
 * The fill of the store's tiers. Requested every few seconds after an action, rarely otherwise, and never while the page
 * is hidden.
 */

import { Failure, get } from "./api.js";
import { $, el } from "./dom.js";
import { serverDoes } from "./settings.js";
import { bus } from "./state.js";
import { bytes, count, percent } from "./words.js";

const EVERY_MS = 5000;
const IDLE_MS = 30_000; // leaves the requests of a key with a low rate to questions
const LONGEST_MS = 120_000;

let wait = EVERY_MS;
let looks = 0; // requests since the last action
/** @type {ReturnType<typeof setTimeout>|undefined} */
let timer;
let asking = false;

/**
 * @typedef {{tier: string, entries: number|null, used_bytes: number|null, capacity_bytes: number|null, hits: number,
 * misses: number, evictions: number, damaged: number}} Tier
 */

/** @param {Tier} tier */
function tierView(tier) {
  const used = tier.used_bytes ?? 0; // shared storage counts and bounds itself
  const share = tier.capacity_bytes ? Math.min(1, used / tier.capacity_bytes) : 0;
  const words = tier.capacity_bytes === null ? "shared" : `${bytes(used)} of ${bytes(tier.capacity_bytes)}`;
  const entries = tier.entries === null ? "" : count(tier.entries, "entry", "entries");
  const fill = el("span", { class: "fill" });
  fill.style.inlineSize = `${Math.max(share * 100, used ? 1 : 0)}%`;
  const more = [
    count(tier.hits, "hit"),
    tier.evictions ? count(tier.evictions, "eviction") : "",
    tier.damaged ? `${tier.damaged} damaged` : "",
  ]
    .filter(Boolean)
    .join(" · ");
  return el(
    "div",
    { class: "tier", "data-tier": tier.tier, "data-used": used },
    el("p", { class: "tier-name" }, el("b", {}, tier.tier), el("span", {}, entries)),
    el(
      "div",
      {
        class: "meter",
        role: "meter",
        "aria-label": `${tier.tier}: ${words}`,
        "aria-valuemin": 0,
        "aria-valuemax": 100,
        "aria-valuenow": Math.round(share * 100),
        "aria-valuetext": `${words}, ${percent(share)}`,
      },
      fill,
    ),
    el("p", { class: "muted" }, words, el("span", {}, more)),
  );
}

async function look() {
  if (asking || document.hidden) return;
  asking = true;
  clearTimeout(timer);
  try {
    const stats = await get("stats", { quiet: true });
    serverDoes(stats);
    if (stats.model) {
      $("brand").title = stats.model;
    }
    $("tiers").replaceChildren(
      ...stats.tiers.map(tierView),
      el("p", { class: "muted" }, `${bytes(stats.kv_bytes_per_token)} of stored KV a token`),
    );
    wait = ++looks < 4 ? EVERY_MS : IDLE_MS;
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    wait = Math.min(LONGEST_MS, Math.max(wait * 2, (error.retryAfter ?? 0) * 1000));
    if (!$("tiers").firstChild) $("tiers").replaceChildren(el("p", { class: "muted" }, error.message));
  } finally {
    asking = false;
    timer = setTimeout(look, wait);
  }
}

/** @returns {void} */
const soon = () => {
  looks = 0;
  look();
};

export function setUp() {
  document.addEventListener("visibilitychange", look);
  bus.addEventListener("done", soon);
  bus.addEventListener("key", soon);
  look();
}
