/** What tests ask of the page. Run in it before its own scripts; nothing of it is served. */
(() => {
  const real = window.fetch;
  /** Texts of the streams of answers, as the page itself got them. */
  window.streams = [];

  window.fetch = async (url, how) => {
    if (probes.slow && String(url).endsWith("/v1/ask")) return slow(how.signal);
    const response = await real(url, how);
    if (String(url).endsWith("/v1/ask")) {
      const at = streams.push(null) - 1;
      response
        .clone()
        .text()
        .then(
          (text) => {
            streams[at] = text;
          },
          () => {},
        );
    }
    return response;
  };

  /** A stream of two tokens, the second in two pieces cut inside a character, that never ends. */
  function slow(signal) {
    const event = (text) => new TextEncoder().encode(`event: token\ndata: {"text": "${text}"}\n\n`);
    const second = event("\u{1f9c1} here");
    const body = new ReadableStream({
      start(to) {
        to.enqueue(event("Ovens "));
        setTimeout(() => to.enqueue(second.slice(0, 31)), 50);
        setTimeout(() => to.enqueue(second.slice(31)), 100);
        signal.addEventListener("abort", () => to.error(new DOMException("", "AbortError")));
      },
    });
    return new Response(body, { headers: { "content-type": "text/event-stream" } });
  }

  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const seen = (node) => node.checkVisibility({ visibilityProperty: true });
  const brief = (node) => node.outerHTML.slice(0, 100);

  /** A colour of CSS as red, green, blue and alpha. */
  function parsed(colour) {
    const brush = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    brush.fillStyle = colour;
    brush.fillRect(0, 0, 1, 1);
    const [red, green, blue, alpha] = brush.getImageData(0, 0, 1, 1).data;
    return [red, green, blue, alpha / 255];
  }

  const over = (a, b) => [0, 1, 2].map((at) => a[at] * a[3] + b[at] * (1 - a[3])).concat(1);

  function luminance(colour) {
    const linear = (value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear(colour[0]) + 0.7152 * linear(colour[1]) + 0.0722 * linear(colour[2]);
  }

  function ground(node) {
    const layers = [];
    for (let at = node; at; at = at.parentElement) layers.push(parsed(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255, 1]);
  }

  window.probes = {
    slow: false,

    /** Follow the growing answer. */
    watchAnswer() {
      window.grown = [];
      const look = () => {
        const text = document.querySelector(".turn.working .answer")?.textContent;
        if (text && text !== grown.at(-1)) grown.push(text);
      };
      new MutationObserver(look).observe(document.querySelector("#turns"), {
        childList: true,
        subtree: true,
        characterData: true,
      });
    },

    /** The last answer's text, without its markers. */
    answer() {
      const answer = all(".answer").at(-1).cloneNode(true);
      for (const marker of all(".cite", answer)) marker.remove();
      return answer.textContent;
    },

    /** What the last strip shows: pixels and counts, by colour, and its width. */
    drawn() {
      const strip = all(".strip").at(-1),
        pixels = {},
        counts = {};
      const add = (to, state, value) => {
        to[state] = (to[state] ?? 0) + value;
      };
      const width = (node) => node.getBoundingClientRect().width;
      for (const span of strip.children) {
        const marks = all("rect", span).reduce((sum, mark) => sum + width(mark), 0);
        add(pixels, span.dataset.state, width(span) - marks);
        add(pixels, "recomputed", marks);
        add(counts, span.dataset.state, span.dataset.tokens - span.dataset.recomputed);
        add(counts, "recomputed", Number(span.dataset.recomputed));
      }
      return { pixels, counts, width: width(strip) };
    },

    /** Where the marks of each span begin and how wide they are, in tokens. */
    marks: () =>
      all(".strip").at(-1).children.length &&
      [...all(".strip").at(-1).children].map((span) =>
        all("rect", span).map((mark) => [Number(mark.getAttribute("x")), Number(mark.getAttribute("width"))]),
      ),

    widths: (selector) => all(selector).map((node) => node.getBoundingClientRect().width),

    /** Drag a file over the page. */
    drag(name, text) {
      window.items = new DataTransfer();
      items.items.add(new File([text], name, { type: "text/plain" }));
      dispatchEvent(new DragEvent("dragenter", { dataTransfer: items, cancelable: true }));
    },

    /** Let go of it; whether the browser was kept from opening it. */
    drop: () => !dispatchEvent(new DragEvent("drop", { dataTransfer: items, cancelable: true })),

    /** Everything the Tab key should stop at. */
    reachable: () =>
      all("a[href], button, input, select, textarea, summary, [tabindex]").filter(
        (node) =>
          node.tabIndex >= 0 &&
          !node.disabled &&
          !node.closest("fieldset:disabled, [inert], [hidden]") &&
          seen(node) &&
          !(node.type === "radio" && !node.checked),
      ),

    /** What has the focus, and whether that can be seen; remembers it. */
    focused() {
      const node = document.activeElement;
      if (node === document.body) return null;
      (window.met ??= new Set()).add(node);
      const ring = (one) =>
        one && getComputedStyle(one).outlineStyle !== "none" && parseFloat(getComputedStyle(one).outlineWidth) >= 1;
      return [brief(node), Boolean(ring(node) || ring(node.closest(".field")))];
    },

    missed: () =>
      probes
        .reachable()
        .filter((node) => !met.has(node))
        .map(brief),

    nameless: () =>
      all("button, input, select, textarea")
        .filter((node) => seen(node) && !(node.ariaLabel || node.innerText?.trim() || node.labels?.length))
        .map(brief),

    /** How wide the page is, and what is outside the window. */
    outside: () => [
      document.documentElement.scrollWidth,
      all("body *")
        .filter(
          (node) =>
            seen(node) &&
            !node.closest(".scroll, .sr, .skip, .symbols, #how-now") &&
            node.getBoundingClientRect().right > innerWidth + 1,
        )
        .map(brief),
    ],

    /** Texts whose contrast with what is really behind them is less than 4.5, and how many texts were seen. */
    contrasts() {
      const poor = [],
        walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
      let texts = 0;
      while (walker.nextNode()) {
        const node = walker.currentNode.parentElement,
          text = walker.currentNode.data.trim();
        if (!text || !seen(node) || node.closest("option, script, .sr, :disabled")) continue;
        texts += 1;
        const behind = ground(node),
          ink = over(parsed(getComputedStyle(node).color), behind);
        const [high, low] = [luminance(ink), luminance(behind)].sort((a, b) => b - a);
        if ((high + 0.05) / (low + 0.05) < 4.5)
          poor.push([text.slice(0, 40), node.className, (high + 0.05) / (low + 0.05)]);
      }
      return { poor, texts };
    },

    inject() {
      const node = document.createElement("script");
      node.textContent = "window.broken = 1";
      document.body.append(node);
      return window.broken ?? null;
    },
  };
})();
