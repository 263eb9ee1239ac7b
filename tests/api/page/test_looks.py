"""Whoever looks, at whatever: keyboard alone, small screens, dark and light, little motion, text that can be read."""

from typing import Any

import pytest

from .conftest import QUESTION
from .house import ask

REACHABLE = """() => [...document.querySelectorAll('a[href], button, input, select, textarea, summary, [tabindex]')].filter(node =>
    node.tabIndex >= 0 && !node.disabled && !node.closest('fieldset:disabled, [inert], [hidden]') && node.checkVisibility({visibilityProperty: true})
    && !(node.type === 'radio' && !node.checked))"""

# Of every text that is seen: its contrast with what is really behind it.
CONTRASTS = """() => {
    const parse = colour => { const c = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
        c.fillStyle = colour; c.fillRect(0, 0, 1, 1); const d = c.getImageData(0, 0, 1, 1).data; return [d[0], d[1], d[2], d[3] / 255]; };
    const over = (a, b) => [0, 1, 2].map(i => a[i] * a[3] + b[i] * (1 - a[3])).concat(1);
    const light = c => { const [r, g, b] = c.slice(0, 3).map(v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
        return .2126 * r + .7152 * g + .0722 * b; };
    const ground = node => { const layers = []; for (let at = node; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
        return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255, 1]); };
    const poor = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    let seen = 0;
    while (walker.nextNode()) {
        const node = walker.currentNode.parentElement;
        if (!walker.currentNode.data.trim() || !node.checkVisibility({visibilityProperty: true}) || node.closest('option, script, .sr, :disabled')) continue;
        seen += 1;
        const behind = ground(node), ink = over(parse(getComputedStyle(node).color), behind);
        const [high, low] = [light(ink), light(behind)].sort((a, b) => b - a);
        const ratio = (high + .05) / (low + .05);
        if (ratio < 4.5) poor.push([walker.currentNode.data.trim().slice(0, 40), node.className, ratio]);
    }
    return {poor, seen};
}"""


def test_the_main_job_needs_no_mouse(page: Any, library: str) -> None:
    page.goto(f"/#collection={library}")
    page.wait_for_selector(".tier")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "question"
    page.keyboard.type(QUESTION)
    page.keyboard.press("Shift+Enter")
    assert page.input_value("#question").endswith("\n")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn.whole")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("1")
    assert page.evaluate("document.activeElement.id") == "drawer-title"
    assert page.locator("#drawer-title").inner_text() == "Source 1"
    page.keyboard.press("Escape")
    assert page.locator("#drawer").is_hidden()
    assert page.evaluate("document.activeElement.dataset.number") == "1"  # back on the chip
    page.keyboard.press("p")
    first = page.locator(".strip-detail").inner_text()
    page.keyboard.press("ArrowRight")
    assert page.locator(".strip-detail").inner_text() != first
    assert page.evaluate("document.activeElement.dataset.kind") == "chunk"
    page.keyboard.press("Enter")
    assert page.locator("#drawer").is_visible()
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.dataset.kind") == "chunk"
    page.keyboard.press("m")
    page.wait_for_selector(".verdict")
    page.keyboard.press("n")
    assert page.evaluate("document.activeElement.id") == "question"
    page.keyboard.type("d/t?1")
    assert page.input_value("#question") == "d/t?1"  # typed, not taken for shortcuts
    assert page.locator("#dialog").is_hidden()


def test_everything_is_reached_by_tab_and_shows_it(asked: Any) -> None:
    ask(asked)
    asked.click("#how summary")
    asked.click(".chip >> nth=0")
    asked.wait_for_selector(".source-text")
    asked.evaluate("document.activeElement.blur(); document.body.focus()")
    wanted = asked.evaluate(f"({REACHABLE})().length")
    asked.evaluate("window.met = new Set()")
    for _ in range(wanted + 6):
        asked.keyboard.press("Tab")
        shown = asked.evaluate(
            """() => { const node = document.activeElement; if (node === document.body) return null; met.add(node);
            const style = getComputedStyle(node), field = node.closest('.field');
            const ring = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 1;
            const around = field && getComputedStyle(field).outlineStyle !== 'none';
            return [node.outerHTML.slice(0, 90), Boolean(ring || around)]; }"""
        )
        assert shown is None or shown[1], shown
    missed = asked.evaluate(f"({REACHABLE})().filter(node => !met.has(node)).map(node => node.outerHTML.slice(0, 100))")
    assert wanted > 30 and missed == []


def test_every_control_has_a_name(asked: Any) -> None:
    ask(asked)
    asked.click("#documents")
    asked.wait_for_selector(".documents li")
    nameless = asked.evaluate(
        """() => [...document.querySelectorAll('button, input, select, textarea')].filter(node =>
        node.checkVisibility() && !node.ariaHidden && !(node.ariaLabel || node.innerText?.trim() || node.labels?.length)).map(node => node.outerHTML)"""
    )
    assert nameless == []


def test_the_shortcuts_are_listed_and_can_be_switched_off(asked: Any) -> None:
    asked.evaluate("document.activeElement.blur()")
    asked.keyboard.press("?")
    listed = asked.locator("#dialog kbd").all_inner_texts()
    assert {"/", "d", "n", "m", "Esc", "Enter"} <= set(listed)
    asked.get_by_label("Single keys work").uncheck()
    asked.keyboard.press("Escape")
    assert asked.locator("#dialog").is_hidden()
    asked.evaluate("document.activeElement.blur()")
    asked.keyboard.press("d")
    assert asked.locator("#drawer").is_hidden()


@pytest.mark.parametrize("width", [360, 768, 1920])
def test_nothing_sticks_out(asked: Any, width: int) -> None:
    asked.set_viewport_size({"width": width, "height": 740})
    asked.reload()
    asked.wait_for_selector(".welcome h1")
    ask(asked)
    asked.click(".measure")
    asked.wait_for_selector(".verdict")
    asked.evaluate("document.querySelector('#how').open = true")
    out = """() => [document.documentElement.scrollWidth, [...document.querySelectorAll('body *')].filter(node =>
        node.checkVisibility({visibilityProperty: true}) && !node.closest('.scroll, .sr, .skip, .symbols, #how-now') && node.getBoundingClientRect().right > innerWidth + 1).map(node => node.outerHTML.slice(0, 80))]"""
    assert asked.evaluate(out) == [width, []]
    for what in ("#documents", ".chip >> nth=0"):
        asked.click(what)
        asked.wait_for_selector("#drawer:not([hidden])")
        assert asked.evaluate(out) == [width, []]
        asked.click("#drawer-close")


def test_small_screens_have_conversations_and_store_in_a_sheet(asked: Any) -> None:
    asked.set_viewport_size({"width": 360, "height": 740})
    ask(asked)
    assert not asked.locator("#tiers").is_visible()
    asked.click("#menu")
    asked.wait_for_function("() => document.querySelector('#side').getBoundingClientRect().left === 0")
    assert asked.locator("#menu").get_attribute("aria-expanded") == "true"
    assert asked.evaluate("document.querySelector('#main').inert")
    asked.keyboard.press("Escape")
    assert not asked.evaluate("document.querySelector('#main').inert")
    assert asked.evaluate("document.activeElement.id") == "menu"
    asked.wait_for_function("() => !document.querySelector('#tiers').checkVisibility({visibilityProperty: true})")


def test_a_drawer_over_the_page_holds_the_focus(asked: Any) -> None:
    asked.set_viewport_size({"width": 360, "height": 740})
    ask(asked)
    asked.click(".chip >> nth=0")
    assert asked.evaluate("document.querySelector('#main').inert && document.querySelector('#side').inert")
    asked.keyboard.press("Escape")
    assert not asked.evaluate("document.querySelector('#main').inert || document.querySelector('#side').inert")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(asked: Any, scheme: str) -> None:
    asked.emulate_media(color_scheme=scheme)
    found = [asked.evaluate(CONTRASTS)]
    ask(asked)
    asked.click(".measure")
    asked.wait_for_selector(".verdict")
    asked.click("#how summary")
    asked.click(".answer .cite >> nth=0")
    found.append(asked.evaluate(CONTRASTS))
    asked.watch.allowed.append("Failed to load resource")
    asked.route("**/v1/ask", lambda route: route.abort())
    asked.fill("#question", "What?")
    asked.press("#question", "Enter")
    asked.wait_for_selector(".notice.bad")
    asked.click("#documents")
    asked.wait_for_selector(".documents li")
    found.append(asked.evaluate(CONTRASTS))
    assert [one["poor"] for one in found] == [[], [], []]
    assert [one["seen"] > 10 for one in found] == [True, True, True]


def test_the_theme_is_the_systems_until_it_is_chosen(asked: Any) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    asked.emulate_media(color_scheme="dark")
    dark = asked.evaluate(paper)
    asked.emulate_media(color_scheme="light")
    light = asked.evaluate(paper)
    assert dark != light
    asked.click("#theme")
    assert asked.evaluate(paper) == dark
    asked.reload()
    asked.wait_for_selector(".tier")
    assert asked.evaluate(paper) == dark
    asked.click("#theme")
    assert asked.evaluate(paper) == light
    assert asked.evaluate("localStorage.getItem('ragkv.theme')") is None


def test_little_motion_where_it_is_asked_for(asked: Any) -> None:
    asked.emulate_media(reduced_motion="reduce")
    asked.evaluate("document.querySelector('#turns').append(Object.assign(document.createElement('article'), {className: 'turn working'}))")
    asked.evaluate("document.querySelector('.working').append(Object.assign(document.createElement('p'), {className: 'answer'}))")
    animation = "getComputedStyle(document.querySelector('.working .answer'), '::after').animationName"
    assert asked.evaluate(animation) == "none"
    asked.emulate_media(reduced_motion="no-preference")
    assert asked.evaluate(animation) == "pulse"


def test_the_page_comes_with_a_policy_that_lets_nothing_else_in(asked: Any) -> None:
    policy = asked.request.get("/").headers["content-security-policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy
    asked.watch.allowed.append("Content Security Policy")
    asked.evaluate("""() => { const node = document.createElement('script'); node.textContent = 'window.broken = 1'; document.body.append(node); }""")
    assert asked.evaluate("window.broken ?? null") is None
