"""How many rows a prompt's selector recomputes, as read-ahead and room for rows count them."""

from dataclasses import replace

import pytest
import torch

from ragkv.fusion import Candidates, Plan, Span, SpanKind, SpanState, make_selector
from ragkv.fusion.fuse import TokenChoice

TOKENS = 20


def plan_of() -> Plan:
    spans = [
        Span(SpanKind.CHUNK, 0, TOKENS, SpanState.FUSED, chunk=0),
        Span(SpanKind.QUESTION, TOKENS, TOKENS + 2, SpanState.COMPUTED),
    ]
    return Plan.of(torch.arange(TOKENS + 2), spans)


@pytest.mark.parametrize(
    ("selector", "wanted"),
    [("none", 0), ("all", TOKENS), ("first-k", 3), ("attention", 3), ("hkvd", 3)],
)
def test_a_selector_without_a_ratio_counts_what_it_recomputes(selector: str, wanted: int) -> None:
    plan = plan_of()
    assert isinstance(plan.candidates, Candidates) and len(plan.candidates) == TOKENS
    assert (
        TokenChoice(replace(plan, ratio=0.15), make_selector(selector), 0, layers=4).wanted
        == wanted
    )
