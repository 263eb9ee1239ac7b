"""Runs of tokens in one pass: each gets the KV of a pass of its own, behind its own context."""

import pytest
import torch

from ragkv.model import (
    Adapter,
    Context,
    TokenRun,
    adapt,
    full_pass,
    raw_kv,
    token_runs,
)
from tests import tiny_models

LENGTHS = (3, 45, 1, 30, 61)  # around the window and around the length where RoPE changes


def ids(length: int, seed: int) -> tuple[int, ...]:
    return tuple(tiny_models.tokens(length, seed))


@torch.no_grad()
def alone(adapter: Adapter, before: tuple[int, ...], token_ids: tuple[int, ...]) -> torch.Tensor:
    """The raw KV (L, 2, G, T, D) of `token_ids` in a pass over `before` and them."""
    length = len(before) + len(token_ids)
    record = adapter.new_recording(len(before), length)
    full_pass(adapter, before + token_ids, adapter.new_kv(length), 0, record)
    return record.kv


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
class TestEveryFamily:
    def test_each_run_gets_the_kv_of_a_pass_of_its_own(self, family: str) -> None:
        adapter = adapt(tiny_models.model(family))
        runs = [TokenRun(ids(length, seed)) for seed, length in enumerate(LENGTHS)]
        for run, kv in zip(runs, raw_kv(adapter, runs), strict=True):
            close(kv, alone(adapter, (), run.token_ids))

    def test_each_run_attends_to_its_own_context(self, family: str) -> None:
        adapter = adapt(tiny_models.model(family))
        # short, so that RoPE does not change with the length
        before = [ids(20, seed=90), ids(9, seed=91)]
        contexts = [Context(tuple(raw_kv(adapter, [TokenRun(text)]))) for text in before]
        chunks = [ids(11, seed=92), ids(17, seed=93), ids(5, seed=94)]
        places = (0, 1, 0)
        runs = [
            TokenRun(chunk, contexts[place]) for chunk, place in zip(chunks, places, strict=True)
        ]
        for chunk, place, kv in zip(chunks, places, raw_kv(adapter, runs), strict=True):
            close(kv, alone(adapter, before[place], chunk))


def test_a_context_of_pieces_stands_in_their_order() -> None:
    adapter = adapt(tiny_models.model("llama"))
    whole = alone(adapter, (), text := ids(20, seed=1))
    pieces = Context((whole[:, :, :, :8], whole[:, :, :, 8:]))
    (kv,) = raw_kv(adapter, [TokenRun(chunk := ids(7, seed=2), pieces)])
    close(kv, alone(adapter, text, chunk))


def test_a_cut_context_keeps_its_first_tokens() -> None:
    kv = torch.arange(10.0).reshape(1, 1, 1, 10, 1)
    context = Context((kv[:, :, :, :4], kv[:, :, :, 4:]))
    assert context.shortened(10) is context
    for length in range(10):
        cut = context.shortened(length)
        assert torch.cat(
            [torch.empty((1, 1, 1, 0, 1)), *cut.pieces], dim=3
        ).flatten().tolist() == list(range(length))


def test_tokens_that_are_skipped_are_computed_and_not_returned() -> None:
    adapter = adapt(tiny_models.model("llama"))
    text = ids(20, seed=1)
    chunk = ids(7, seed=2)
    (kv,) = raw_kv(adapter, [TokenRun(text + chunk, skip=len(text))])
    close(kv, alone(adapter, text, chunk))


def test_runs_are_cut_into_passes_of_a_bounded_number_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = adapt(tiny_models.model("llama"))
    rows = list[int]()
    call_layer = adapter.call_layer

    def counted(layer: int, hidden: torch.Tensor, *args: object) -> torch.Tensor:
        if layer == 0:
            rows.append(hidden.shape[1])
        return call_layer(layer, hidden, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(adapter, "call_layer", counted)
    monkeypatch.setitem(token_runs.PASS_ROWS, "cpu", 50)
    runs = [TokenRun(ids(length, seed)) for seed, length in enumerate((20, 30, 1, 70, 10))]
    found = raw_kv(adapter, runs)
    assert rows == [50, 1, 70, 10]
    assert [kv.shape[3] for kv in found] == [20, 30, 1, 70, 10]
    assert raw_kv(adapter, []) == []
