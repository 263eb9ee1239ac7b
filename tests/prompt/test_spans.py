"""A prompt's spans cover it, sum to its `Reuse`, and name the recomputed tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ragkv import Answer, Engine, PromptSpan, Reuse, StoreConfig, Text, TokenEvent
from ragkv.prompt import PromptReport
from tests.engine.helpers import A, B, C, Q, engine_of, text_engine
from tests.toy_tokenizers import CHATML, byte_tokenizer

CHUNKS = [A, B, C]
FAMILIES = ["llama", "mistral", "gemma3_text", "gpt_neox", "phi3", "cohere2", "qwen3"]


def sums(spans: Sequence[PromptSpan]) -> dict[str, int]:
    of = {
        state: sum(span.tokens for span in spans if span.state == state)
        for state in ("exact", "fused", "computed")
    }
    recomputed = sum(span.recomputed for span in spans)
    return {**of, "fused": of["fused"] - recomputed, "recomputed": recomputed}


def check(spans: Sequence[PromptSpan], reuse: Reuse) -> None:
    at = 0
    for span in spans:
        assert span.start == at and span.tokens > 0
        assert list(span.recomputed_at) == sorted(
            {at for at in span.recomputed_at if 0 <= at < span.tokens}
        )
        assert not span.recomputed_at or span.state == "fused"
        assert (span.chunk is not None) == (span.kind == "chunk")
        at += span.tokens
    assert at == reuse.tokens
    assert sums(spans) == {
        name: getattr(reuse, name) for name in ("exact", "fused", "computed", "recomputed")
    }


@pytest.mark.parametrize("reuse", ["fused", "prefix", "none"])
@pytest.mark.parametrize("family", FAMILIES)
def test_spans_cover_the_prompt_and_sum_to_its_reuse(family: str, reuse: str) -> None:
    with engine_of(family) as engine:
        engine.entries.encode([A, C])
        prefill = engine.prefill(Q, CHUNKS, ratio=0.4, reuse=reuse)
        check(prefill.spans, prefill.reuse)


@pytest.mark.parametrize("selector", ["hkvd", "attention", "first-k", "random"])
def test_recomputed_tokens_are_those_selected_in_the_last_layer(
    engine: Engine, selector: str
) -> None:
    engine.entries.encode(CHUNKS)
    prefill = engine.prefill(Q, CHUNKS, ratio=0.4, selector=selector)
    check(prefill.spans, prefill.reuse)
    named = [span.start + at for span in prefill.spans for at in span.recomputed_at]
    assert named == prefill.selected.tolist()


def test_the_last_token_of_a_prompt_that_ends_in_a_chunk_is_computed(engine: Engine) -> None:
    engine.entries.encode(CHUNKS)
    for chunks in (CHUNKS, [A]):
        prefill = engine.prefill((), chunks, ratio=0.5)
        check(prefill.spans, prefill.reuse)
        last = prefill.spans[-1]
        assert (last.kind, last.state, last.tokens) == ("chunk", "computed", 1)


def test_the_template_behind_the_question_and_text_among_chunks_are_of_kind_template() -> None:
    with text_engine(CHATML) as engine:
        engine.entries.encode(["one text of some length"])
        heading = Text(
            tuple(byte_tokenizer()("# Two\n", add_special_tokens=False)["input_ids"]), "# Two\n"
        )
        prefill = engine.prefill("what?", ["one text of some length", heading], ratio=0.5)
        check(prefill.spans, prefill.reuse)
        assert [span.kind for span in prefill.spans] == [
            "prefix",
            "chunk",
            "template",
            "question",
            "template",
        ]
        assert prefill.spans[3].tokens == len("what?")


def test_a_given_answer_is_of_kind_answer() -> None:
    with text_engine(CHATML) as engine:
        added = engine.append(engine.session("s"), "what?", "That.", ["one text"])
        check(added.spans, added.reuse)
        assert [(span.kind, span.tokens) for span in added.spans[-3:]] == [
            ("question", len("what?")),
            ("template", len(engine.parts.intake.runs.after_question)),
            ("answer", len("That.")),
        ]


def test_spans_number_the_chunks_of_a_request_without_the_text_among_them() -> None:
    with engine_of() as engine:
        given = [Text((5,), opening=True), A, Text((6,)), B, C]
        spans = engine.prefill(Q, given).spans
    assert [span.chunk for span in spans if span.kind == "chunk"] == [0, 1, 2]


def test_an_answers_spans_are_known_before_its_first_token() -> None:
    with engine_of() as engine:
        engine.entries.encode(CHUNKS)
        report, token, *_, answer = engine.events(engine.request(Q, CHUNKS, max_new_tokens=3))
    assert isinstance(report, PromptReport) and isinstance(token, TokenEvent)
    assert isinstance(answer, Answer) and answer.spans == report.spans
    check(answer.spans, answer.reuse)


def test_a_chunk_that_is_computed_says_why_it_was_not_reused(tmp_path: Path) -> None:
    def whys(engine: Engine, **how: Any) -> list[str | None]:
        return [span.why for span in engine.prefill(Q, CHUNKS, **how).spans if span.kind == "chunk"]

    with engine_of(store=StoreConfig(directory=str(tmp_path), memory_bytes=0)) as engine:
        engine.entries.encode([A, C])
        engine.flush()
        assert [why and "no usable KV" in why for why in whys(engine)] == [None, True, None]
        engine.entries.encode(CHUNKS)
        assert whys(engine, reuse="fused") == [None] * 3
        assert ["full recompute" in str(why) for why in whys(engine, reuse="none")] == [True] * 3
        assert all("exact reuse" in str(why) for why in whys(engine, reuse="prefix"))
        for path in tmp_path.rglob("*.kv"):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        damaged = [str(why) for why in whys(engine)]
        assert any("is damaged" in why for why in damaged)
        # An entry that another read dropped meanwhile is no longer there.
        assert all("is damaged" in why or "no usable KV" in why for why in damaged)
