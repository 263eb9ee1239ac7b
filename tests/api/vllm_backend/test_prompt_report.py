"""What the connector reports becomes the report of the whole prompt: each token is counted once."""

import dataclasses
from typing import Any

import pytest

from ragkv.prompt import Prompt
from ragkv.prompt.history import EMPTY
from ragkv.store.entry import Identity
from ragkv.types import Chunk, PromptSpan, Reuse, Text, Timing
from ragkv.vllm.front import cached_report, differences, left_report
from ragkv.vllm.front.prompt_report import connector_answer, prompt_report

A = (1, 2, 3, 4)
HEADING = (9,)
B = (5, 6, 7)
PROMPT = Prompt(
    prefix=(0,),
    history=EMPTY,
    pieces=(Chunk(A), Text(HEADING), Chunk(B)),
    tail=(8, 8, 8),
    question_tokens=2,
)  # 12 tokens; vLLM computes the last 3


def report(**changes: Any) -> dict[str, Any]:
    """ragkv made 9 tokens and passed one of the question: 5 exact, 2 fused, 1 recomputed, the
    heading computed.
    """
    reuse = Reuse(
        exact=5,
        fused=2,
        recomputed=1,
        computed=2,
        ratio=0.3,
        selector="random",
        compute=0.3,
        notes=("n",),
    )
    spans = [
        PromptSpan("prefix", 0, 1, "exact"),
        PromptSpan("chunk", 1, 4, "exact", (), 0),
        PromptSpan("template", 5, 1, "computed"),
        PromptSpan("chunk", 6, 3, "fused", (2,), 1),
        PromptSpan("question", 9, 1, "computed"),
    ]
    fields = {
        "promised_tokens": 9,
        "reuse": dataclasses.asdict(reuse),
        "timing": dataclasses.asdict(Timing(load_s=0.1, fuse_s=0.2)),
        "spans": [dataclasses.asdict(span) for span in spans],
        "notes": ["m"],
        "why": "vLLM computed this prompt",
    }
    return {**fields, **changes}


def test_the_counts_sum_to_the_prompt_and_the_spans_to_the_counts() -> None:
    served = prompt_report(PROMPT, report(), sent_s=0.5, first_token_s=2.0, notes=("o",))
    reuse = served.reuse
    assert (reuse.exact, reuse.fused, reuse.recomputed, reuse.computed, reuse.tokens) == (
        5,
        2,
        1,
        4,
        12,
    )
    assert reuse.notes == ("n", "m", "o")
    assert reuse.compute == pytest.approx((0.3 * 10 + 3) / 12)
    assert [(one.kind, one.start, one.tokens, one.state) for one in served.spans] == [
        ("prefix", 0, 1, "exact"),
        ("chunk", 1, 4, "exact"),
        ("template", 5, 1, "computed"),
        ("chunk", 6, 3, "fused"),
        ("question", 9, 2, "computed"),
        ("template", 11, 1, "computed"),
    ]
    assert served.spans[3].recomputed_at == (2,)
    assert [one.chunk for one in served.spans] == [None, 0, None, 1, None, None]
    assert (served.timing.prefill_s, served.timing.first_token_s, served.timing.load_s) == (
        1.5,
        2.0,
        0.1,
    )


def test_a_span_that_covers_two_runs_is_cut_between_them() -> None:
    spans = [dataclasses.asdict(PromptSpan("chunk", 4, 5, "fused", (0, 3)))]
    served = prompt_report(PROMPT, report(spans=spans), 0.0, 1.0)
    found = [
        (one.kind, one.start, one.tokens, one.recomputed_at)
        for one in served.spans
        if one.state == "fused"
    ]
    assert found == [("chunk", 4, 1, (0,)), ("template", 5, 1, ()), ("chunk", 6, 3, (1,))]


def test_a_prompt_that_vllm_computed_has_the_reason_at_its_chunks() -> None:
    served = prompt_report(PROMPT, left_report("only 0 of 9", [4, 3]), 0.0, 1.0)
    reuse = served.reuse
    assert (reuse.computed, reuse.tokens, reuse.compute) == (12, 12, 1.0)
    assert (reuse.missed_chunks, reuse.missed_tokens) == (2, 7)
    assert {one.why for one in served.spans if one.kind == "chunk"} == {"only 0 of 9"}
    assert {one.why for one in served.spans if one.kind != "chunk"} == {None}


def test_what_vllms_cache_had_is_a_span_and_is_not_computed() -> None:
    served = prompt_report(PROMPT, cached_report(left_report("why"), 5, "fused"), 0.0, 1.0)
    assert (served.reuse.fused, served.reuse.computed, served.reuse.tokens) == (5, 7, 12)
    assert served.reuse.compute == pytest.approx(7 / 12)
    assert [(one.start, one.tokens) for one in served.spans if one.state == "fused"] == [
        (0, 1),
        (1, 4),
    ]
    assert {one.why for one in served.spans if one.why} == {"why"}


def test_a_connector_of_another_model_is_named_by_what_differs() -> None:
    own = Identity("w", "a", "r", "float32", "", "t", "c")
    theirs = connector_answer(None, own, None, "attention")["identity"]
    assert differences(own, theirs) == []
    expected = dataclasses.replace(own, neutral="text")
    assert differences(expected, theirs) == [] == differences(own, {**theirs, "tenant": "other"})
    other = {**theirs, "weights": "x", "dtype": "bfloat16", "adapter": "lora"}
    assert differences(own, other) == [
        "weights",
        "dtype (bfloat16 there, float32 here)",
        "adapter (lora there,  here)",
    ]


def test_an_identity_goes_over_the_wire_under_the_names_of_stored_json() -> None:
    """Otherwise a connector of another version would be taken for another model's."""
    own = Identity("w", "a", "r", "float32", "l", "t", "c", neutral="n")
    assert own.key([1])  # what an identity remembers of itself is no field
    named = connector_answer(None, own, None, "attention")["identity"]
    assert named == {
        "weights": "w",
        "architecture": "a",
        "rope": "r",
        "dtype": "float32",
        "adapter": "l",
        "tokenizer": "t",
        "context": "c",
        "tenant": "",
        "codec": "raw",
        "behind": "n",
        "format_version": own.format_version,
    }
