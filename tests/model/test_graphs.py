"""Graphs of a layer's parts, with a stand-in for CUDA's capture: it runs the work again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ragkv.model import Adapter, Rows, run_layer
from ragkv.model.decode.batching import DecodeRow, decode_rows
from ragkv.model.device.graphs import MOST_BUCKET, Graphs, Replay, bucket
from ragkv.model.families import ADAPTERS
from ragkv.model.layer_views import use_graphs
from tests import tiny_models


class Recorder:
    """A capture that counts what is captured and replayed."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def __call__(self, work: Replay) -> Replay:
        self.captured += 1
        work()

        def replay() -> None:
            self.replayed += 1
            work()

        return replay


def adapter_of(family: str) -> Any:
    model = tiny_models.model(family)
    return ADAPTERS[model.config.model_type](model)


@torch.no_grad()
def last_hidden(adapter: Adapter, rows: int) -> torch.Tensor:
    """What all layers make of a prompt of `rows` tokens, (1, R, E)."""
    kv = adapter.new_kv(rows)
    tables = adapter.rope.tables(rows)
    place = Rows.span(0, rows, adapter.device)
    hidden = adapter.embed(torch.tensor(tiny_models.tokens(rows)))
    for layer in range(adapter.layer_count):
        hidden = run_layer(adapter, layer, hidden, place, kv, tables)
    return hidden


@pytest.mark.parametrize(
    ("rows", "size"),
    [(1, None), (7, None), (8, 16), (16, 16), (17, 32), (33, 64), (600, 1024), (1025, None)],
)
def test_a_bucket_is_at_most_twice_the_rows_or_the_pass_is_eager(
    rows: int, size: int | None
) -> None:
    assert bucket(rows) == size
    assert all((bucket(n) or n) <= 2 * n for n in range(1, 2 * MOST_BUCKET))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "glm4"])
def test_padded_passes_compute_what_eager_ones_do(family: str) -> None:
    adapter = adapter_of(family)
    lengths = (20, 9, 31, 20, 5)  # a shorter pass after a longer one finds its rows in the padding
    eager = [last_hidden(adapter, rows) for rows in lengths]
    capture = Recorder()
    use_graphs(adapter._plain, Graphs(capture))
    for rows, wanted in zip(lengths, eager, strict=True):
        torch.testing.assert_close(last_hidden(adapter, rows), wanted, atol=1e-4, rtol=1e-5)
    assert capture.captured == 2 * adapter.layer_count * 2  # parts, layers and buckets 16 and 32
    replayed = capture.replayed
    last_hidden(adapter, 5)
    assert capture.replayed == replayed  # eager


def test_a_step_between_two_layers_changes_no_hidden_state() -> None:
    adapter = adapter_of("llama")
    wanted = last_hidden(adapter, 12)
    use_graphs(adapter._plain, Graphs(Recorder()))
    call = adapter.call_layer

    def interrupted(*given: Any) -> torch.Tensor:
        made = call(*given)
        adapter.call_layer = call
        last_hidden(adapter, 14)
        adapter.call_layer = interrupted
        return made

    adapter.call_layer = interrupted
    torch.testing.assert_close(last_hidden(adapter, 12), wanted, atol=1e-4, rtol=1e-5)


def test_graphs_that_a_decoding_step_captured_serve_passes_too() -> None:
    """A step is in inference mode, where torch makes tensors that others must not write to."""
    adapter = adapter_of("llama")
    wanted = last_hidden(adapter, 12)
    use_graphs(adapter._plain, Graphs(Recorder()))
    kv = adapter.new_kv(12)
    decode_rows(adapter, [DecodeRow(kv, 1, drafts=tuple(range(2, 12)))])
    torch.testing.assert_close(last_hidden(adapter, 12), wanted, atol=1e-4, rtol=1e-5)


def refuse(_: Replay) -> Replay:
    raise RuntimeError("operation not permitted when stream is capturing")


def forget(_: Replay) -> Replay:
    return lambda: None


@pytest.mark.parametrize("capture", [refuse, forget])
def test_a_capture_that_fails_or_changes_numbers_leaves_every_pass_eager(
    capture: Callable[[Replay], Replay], caplog: pytest.LogCaptureFixture
) -> None:
    adapter = adapter_of("llama")
    wanted = last_hidden(adapter, 20)
    graphs = Graphs(capture)
    use_graphs(adapter._plain, graphs)
    assert torch.equal(last_hidden(adapter, 20), wanted)
    assert graphs.failed and len(caplog.records) == 1
