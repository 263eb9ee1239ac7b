"""How many rows a prompt's selector recomputes, as read-ahead and room for rows count them."""

import pytest
import torch

from ragkv.fusion import Candidates, Plan, Recompute, Span, SpanKind, SpanState, make_selector
from ragkv.fusion.fuse import TokenChoice

TOKENS = 20


def plan_of() -> Plan:
    spans = [
        Span(SpanKind.CHUNK, 0, TOKENS, SpanState.FUSED, chunk=0),
        Span(SpanKind.QUESTION, TOKENS, TOKENS + 2, SpanState.COMPUTED),
    ]
    return Plan.of(torch.arange(TOKENS + 2), spans)


@pytest.mark.parametrize("selector", ["first-k", "attention", "hkvd"])
@pytest.mark.parametrize(("ratio", "wanted"), [(0.0, 0), (0.15, 3), (1.0, TOKENS)])
def test_the_ratio_says_how_many_tokens_a_selector_recomputes(
    selector: str, ratio: float, wanted: int
) -> None:
    plan = plan_of()
    assert isinstance(plan.candidates, Candidates) and len(plan.candidates) == TOKENS
    recompute = Recompute(make_selector(selector), ratio)
    assert TokenChoice(plan, recompute, 0, layers=4).budget == wanted
