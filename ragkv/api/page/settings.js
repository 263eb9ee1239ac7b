/**
 * How questions are answered: reuse, ratio, selector, passages. The address stores these settings. A value that equals
 * the server's setting is not sent.
 */

import { Failure, get } from "./api.js";
import { $ } from "./dom.js";
import { bus, update, view } from "./state.js";

let server = { ratio: /** @type {number|null|undefined} */ (undefined), selector: "" };
const radios = () =>
  [...document.querySelectorAll("input[name=ratio]")].map((one) => /** @type {HTMLInputElement} */ (one));

/** The fields of a request that differ from the server's own. @returns {Record<string, any>} */
export function asked() {
  /** @type {Record<string, any>} */
  const how = { k: view.k };
  if (view.reuse !== "fused") how.reuse = view.reuse;
  else {
    if (view.ratio === "auto") how.ratio = null;
    else if (view.ratio !== "server") how.ratio = Number(view.ratio);
    if (view.selector) how.selector = view.selector;
  }
  return how;
}

/** Ask what the server would do by itself. */
export async function learn() {
  try {
    const { ratio, selector } = await get("stats", { quiet: true });
    server = { ratio, selector: selector ?? "" };
    draw();
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
  }
}

const number = (/** @type {number} */ ratio) => ratio.toFixed(2);
const servers = () => (server.ratio === undefined ? "" : server.ratio === null ? "controller" : number(server.ratio));

/** The current settings in one line. */
function now() {
  const passages = `${view.k} passages`;
  if (view.reuse !== "fused")
    return [view.reuse === "none" ? "full recompute" : "exact prefix only", passages].join(" · ");
  const ratio =
    view.ratio === "server"
      ? servers() && `ratio ${servers()}`
      : view.ratio === "auto"
        ? "ratio by the controller"
        : `ratio ${number(Number(view.ratio))}`;
  return ["fused", ratio, view.selector || server.selector, passages].filter(Boolean).join(" · ");
}

/** Why the ratio has no effect; "" if it has. */
const doesNotCount = () => (view.reuse === "fused" ? "" : "It does not count: nothing is fused.");

/** Why the slider cannot be moved. */
const notSet = () =>
  view.ratio === "auto"
    ? "The controller decides for each question."
    : `The server's${servers() && ` (${servers()})`}. Choose “fixed” to set it.`;

function draw() {
  const own = view.ratio !== "server" && view.ratio !== "auto";
  const fused = view.reuse === "fused";
  $("reuse").value = view.reuse;
  $("selector").value = view.selector;
  if ($("selector").selectedIndex < 0) {
    update({ selector: "" });
    $("selector").value = "";
  }
  $("selector").disabled = !fused;
  $("selector").options[0].textContent = server.selector ? `The server's (${server.selector})` : "The server's choice";
  $("k").value = view.k;
  $("ratio-field").disabled = Boolean(doesNotCount());
  $("ratio-server").textContent = servers() ? `the server's (${servers()})` : "the server's";
  for (const radio of radios()) radio.checked = radio.value === (own ? "own" : view.ratio);
  const at = own ? Number(view.ratio) : (server.ratio ?? 0.15);
  const idle = doesNotCount();
  $("ratio").value = String(at);
  $("ratio").disabled = !own || Boolean(idle);
  $("ratio-value").textContent = idle || (own ? number(at) : notSet());
  $("how-now").textContent = now();
}

export function setUp() {
  const set = (/** @type {Partial<import("./state.js").View>} */ patch) => {
    update(patch);
    draw();
  };
  $("reuse").addEventListener("change", () => set({ reuse: $("reuse").value }));
  $("selector").addEventListener("change", () => set({ selector: $("selector").value }));
  $("ratio").addEventListener("input", () => set({ ratio: String(Number($("ratio").value)) }));
  $("k").addEventListener("change", () => set({ k: Math.min(64, Math.max(1, Math.round(Number($("k").value)) || 6)) }));
  for (const radio of radios()) {
    radio.addEventListener("change", () =>
      set({ ratio: radio.value === "own" ? String(Number($("ratio").value)) : radio.value }),
    );
  }
  bus.addEventListener("view", draw);
  bus.addEventListener("key", learn);
  draw();
}
