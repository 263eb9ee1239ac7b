"""The page's main task in a browser, against the real service: ask, see the prompt's report, open a
source.
"""

import itertools
from typing import Any

import pytest

from tests.api.helpers import events

from .helpers import REUSE, TIMING, answer, ask, put, source, stream, streaming

LONGER = "What is the code name of Kiralus?"  # its answer has several tokens
STATES = ("exact", "fused", "recomputed", "computed")


def test_the_page_shows_the_streamed_answer_of_the_api(asked: Any) -> None:
    asked.evaluate("probes.watchAnswer()")
    said = ask(asked, LONGER)
    tokens = [
        data["text"] for name, data in events(asked.evaluate("streams.at(-1)")) if name == "token"
    ]
    assert len(tokens) > 1 and "".join(tokens) == said["answer"]
    seen = asked.evaluate("grown")
    assert seen and all(later.startswith(earlier) for earlier, later in itertools.pairwise(seen))
    text = asked.evaluate("probes.answer()")
    assert text == said["answer"].lstrip() and text.startswith(seen[0])
    assert asked.locator(".turn h3").inner_text() == LONGER
    assert asked.locator(".turn .answer").get_attribute("aria-live") == "polite"
    assert asked.locator(".turn .answer").get_attribute("aria-busy") == "false"


def test_the_report_of_an_answer_is_drawn_as_the_api_gives_it(asked: Any) -> None:
    """Strip, legend, table, times and sources, of one answer."""
    said = ask(asked)
    reuse = said["reuse"]
    spans = [span for span in said["prompt"] if span["tokens"]]
    assert reuse["fused"] > 0 and reuse["recomputed"] > 0  # otherwise the test shows nothing
    # The strip: counts and widths by state, the kind of each span, and its recomputed tokens at
    # their positions.
    shown = asked.evaluate("probes.drawn()")
    assert {state: shown["counts"].get(state, 0) for state in STATES} == {
        state: reuse[state] for state in STATES
    }
    for state in STATES:
        width = reuse[state] * shown["width"] / reuse["tokens"]
        assert shown["pixels"].get(state, 0.0) == pytest.approx(width, abs=1.0), state
    kinds = asked.locator(".strip .span").evaluate_all(
        "nodes => nodes.map(node => node.dataset.kind)"
    )
    assert kinds == [span["kind"] for span in spans]
    for span, marks in zip(spans, asked.evaluate("probes.marks()"), strict=True):
        assert [x + step for x, width in marks for step in range(width)] == span["recomputed_at"]
    # The legend has the counts, and four colours, which are the strip's.
    keys = asked.locator(".legend .key").all()
    legend = {key.get_attribute("data-state"): int(key.get_attribute("data-count")) for key in keys}
    assert legend == {state: reuse[state] for state in STATES}
    ground = "node => getComputedStyle(node).backgroundColor"
    swatches = {
        state: asked.locator(f".legend .swatch.{state}").evaluate(ground) for state in STATES
    }
    assert len(set(swatches.values())) == 4
    for node in asked.locator(".strip .span").all():
        assert node.evaluate(ground) == swatches[node.get_attribute("data-state")]
    # The table has the same numbers.
    asked.locator(".as-table summary").click()
    rows = asked.locator(".as-table tbody tr").all()
    columns = [
        [int(cell.replace(",", "")) for cell in row.locator("td").all_inner_texts()] for row in rows
    ]
    sums = [sum(column) for column in zip(*columns, strict=True)]
    assert sums[1:] == [reuse[name] for name in ("tokens", *STATES)]
    # The times fill their bar.
    first = said["timing"]["first_token_s"]
    number, unit = asked.locator(".ttft b").inner_text().split()
    assert float(number) * {"ms": 1e-3, "s": 1.0}[unit] == pytest.approx(
        first, rel=0.06, abs=0.6e-3
    )
    line = asked.locator(".spent .bar-line").bounding_box()["width"]
    assert sum(asked.evaluate("probes.widths('.spent .part')")) == pytest.approx(line, abs=1.0)
    # A span shows its counts and opens its source.
    chunk = next(span for span in spans if span["kind"] == "chunk" and span["recomputed"])
    # the beginning of a leading source, which is computed, is a span of its own
    label = f"[aria-label^='Source {chunk['number']},']"
    node = asked.locator(f".strip .span.fused{label}").first
    node.hover()
    fused = chunk["tokens"] - chunk["recomputed"]
    left = f", {fused} fused" if fused else ""  # a state without tokens is not named
    told = f"{chunk['tokens']} tokens{left}, {chunk['recomputed']} recomputed"
    assert told in asked.locator(".strip-detail").inner_text()
    node.click()
    assert asked.locator("#drawer-title").inner_text() == f"Source {chunk['number']}"


def measured(queue_s: float, prefill_s: float, computed: int) -> dict[str, Any]:
    """A side of a comparison whose work takes `prefill_s` and 10 ms."""
    first_token_s = queue_s + 0.01 + prefill_s
    timing = {**TIMING, "queue_s": queue_s, "prefill_s": prefill_s, "first_token_s": first_token_s}
    return {"timing": timing, "reuse": {**REUSE, "exact": 100 - computed, "computed": computed}}


def test_a_comparison_leaves_out_the_waiting_and_says_so(asked: Any) -> None:
    """With the waiting, this would show 15.1 times."""
    ask(asked)
    found = {"fused": measured(0.1, 0.09, 20), "full": measured(2.82, 0.19, 100)}
    sides = {"fused": found["fused"], "none": found["full"]}
    asked.route(
        "**/v1/ask", lambda route: route.fulfill(json=sides[route.request.post_data_json["reuse"]])
    )
    asked.click(".measure")
    asked.wait_for_selector(".comparison")
    text = asked.locator(".comparison").inner_text()
    assert text.startswith("2.0 times faster: 20 of 100 tokens computed instead of all.")
    assert "waiting for other requests (100 ms and 2.82 s) is left out" in text
    assert asked.locator(".versus b").all_inner_texts() == ["100 ms", "200 ms"]
    fused, full = (
        row.locator(".bar-fill").bounding_box()["width"] for row in asked.locator(".versus").all()
    )
    assert full / fused == pytest.approx(2.0, abs=0.05)
    named = asked.locator(".versus .part").evaluate_all(
        "parts => parts.map(part => part.title.split(' ')[0])"
    )
    assert "waiting" not in named and "computing" in named


def test_a_passage_that_was_not_reused_says_why(asked: Any) -> None:
    asked.click("#how summary")
    asked.select_option("#reuse", "prefix")
    said = ask(asked)
    whys = {span["number"]: span["why"] for span in said["prompt"] if span["why"]}
    assert len(whys) == 6 and len(set(whys.values())) == 1
    line = asked.locator(".why").inner_text()
    assert line.startswith("Sources 1, 2, 3, 4, 5, and 6 not reused: ")
    assert whys[2] in line
    asked.locator(".strip .span[aria-label^='Source 2,']").hover()
    assert whys[2] in asked.locator(".strip-detail").inner_text()


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("#reuse", "prefix", "It does not count: nothing is fused."),
        ("ratio", "auto", "The controller decides for each question."),
        ("ratio", "server", "The server's (controller). Choose “fixed” to set it."),
    ],
)
def test_the_ratio_is_disabled_with_the_reason_while_it_does_not_count(
    asked: Any, field: str, value: str, reason: str
) -> None:
    asked.click("#how summary")
    asked.check("input[name=ratio][value=own]")
    asked.locator("#ratio").fill("0.3")
    assert (
        asked.locator("#ratio").is_enabled()
        and asked.locator("#ratio-value").inner_text() == "0.30"
    )
    if field == "ratio":
        asked.check(f"input[name=ratio][value={value}]")
    else:
        asked.select_option(field, value)
    assert asked.locator("#ratio").is_disabled()
    assert asked.locator("#ratio-value").inner_text() == reason


def test_a_cited_span_is_counted_in_characters_and_scrolled_into_view(asked: Any) -> None:
    """Python counts code points, JavaScript UTF-16 units. A long source opens at the cited span,
    not at its top.
    """
    text = "🦊🦊🦊 " + "Nothing is said here. " * 300 + "Ostmax sells 🧁 ovens. The end."
    start = text.index("Ostmax")
    citation = {
        "number": 1,
        "document_id": "d1",
        "start": start,
        "end": start + 21,
        "answer_start": 0,
        "answer_end": 7,
    }
    final = answer("🧁 ovens, says [2] and [9].", [source(1, text), source(2)], [citation])
    streaming(asked, stream(("answer", final)))
    put(asked)
    asked.wait_for_selector(".turn.whole")
    assert (
        asked.locator(".answer").evaluate("node => node.textContent")
        == "🧁 ovens[1], says [2] and [9]."
    )
    # source 9 does not exist
    assert asked.locator(".answer .cite").all_inner_texts() == ["[1]", "[2]"]
    asked.locator(".answer .cite").first.click()
    mark = asked.locator(".source-text mark")
    assert mark.inner_text() == "Ostmax sells 🧁 ovens."
    inside = asked.locator("#drawer-body").bounding_box()
    box = mark.bounding_box()
    assert inside["y"] <= box["y"] and box["y"] + box["height"] <= inside["y"] + inside["height"]


def test_the_page_sends_the_ratio_that_is_set(asked: Any) -> None:
    asked.click("#how summary")
    assert asked.locator("#ratio-server").inner_text() == "the server's (controller)"
    asked.check("input[name=ratio][value=own]")
    asked.locator("#ratio").fill("1")
    assert ask(asked)["reuse"]["fused"] == 0  # everything is recomputed
    asked.locator("#ratio").fill("0")
    assert ask(asked)["reuse"]["recomputed"] == 0
    asked.check("input[name=ratio][value=auto]")
    with asked.expect_request("**/v1/ask") as sent:
        ask(asked)
    assert sent.value.post_data_json["ratio"] is None
    asked.check("input[name=ratio][value=server]")
    with asked.expect_request("**/v1/ask") as sent:
        ask(asked)
    assert "ratio" not in sent.value.post_data_json


def test_an_answer_in_markdown_is_shown_as_such_and_never_as_markup(asked: Any) -> None:
    text = (
        "## Ovens\n**Ostmax** sells [1]:\n1. `ovens`\n2. <b>no</b> "
        "[a](javascript:alert(1))\n\n```\n*raw*\n```"
    )
    streaming(asked, stream(("answer", answer(text, [source()], []))), times=1)
    put(asked)
    asked.wait_for_selector(".turn.whole")
    shown = asked.locator(".answer")
    for tag, words in (
        ("p.head", "Ovens"),
        ("strong", "Ostmax"),
        ("ol code", "ovens"),
        ("pre", "*raw*"),
    ):
        assert shown.locator(tag).inner_text() == words
    assert shown.locator("li").last.inner_text() == "<b>no</b> [a](javascript:alert(1))"
    assert (
        shown.locator("b, a, script").count() == 0
        and shown.locator("p .cite").inner_text() == "[1]"
    )
