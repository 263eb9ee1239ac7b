"""The order that CUDA needs of the layer reader and of passes, without a GPU: see
`lazy_cuda.py`.
"""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ragkv import Engine
from ragkv.fusion import Readers
from ragkv.fusion.device.staging import StagedReader, _Copier
from ragkv.model import Adapter, Rows
from ragkv.store.tiers import Lease, MemoryLease
from tests import tiny_models
from tests.fusion.lazy_cuda import DEVICE, LazyCuda
from tests.fusion.test_pipeline import LAYERS, FakeLease

Q = tiny_models.tokens(5)
CHUNKS = [tiny_models.tokens(12, seed) for seed in (1, 2)]


class HostReaders(Readers):
    """Readers whose buffers for a CUDA device are ordinary memory; they record the sizes that were
    asked for.
    """

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.taken: list[int] = []

    def take(self, size: int, device: torch.device) -> torch.Tensor:
        self.taken.append(size)
        return torch.empty(size, dtype=torch.uint8)


@pytest.fixture
def readers() -> Iterator[HostReaders]:
    with HostReaders(2) as readers:
        yield readers


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> LazyCuda:
    cuda = LazyCuda()
    cuda.install(monkeypatch)
    return cuda


def arrived_slices(
    leases: list[Lease], ahead: int, readers: Readers, cuda: LazyCuda
) -> list[list[torch.Tensor]]:
    """By layer, what a kernel of the compute stream reads of each slice; all kernels run after the
    last layer.
    """
    read: list[list[torch.Tensor]] = [[] for _ in range(LAYERS)]

    def kernel(layer: int, buffer: torch.Tensor, starts: list[int]) -> None:
        for lease, start in zip(leases, starts, strict=True):
            info = lease.info
            piece = buffer[start : start + info.layer_bytes].clone()
            read[layer].append(piece.view(info.dtype).view(info.shape))

    with StagedReader(leases, LAYERS, ahead, readers, DEVICE) as reader:
        for layer in range(LAYERS):
            reader.take(layer)
            cuda.default.work.append(partial(kernel, layer, reader.buffer, reader.starts))
    cuda.default.synchronize()
    return read


def all_equal(read: list[list[torch.Tensor]], leases: list[Any]) -> bool:
    return all(
        torch.equal(piece, lease.entry.kv[layer])
        for layer, pieces in enumerate(read)
        for piece, lease in zip(pieces, leases, strict=True)
    )


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_kernels_that_run_late_read_the_slices_of_their_layer(
    ahead: int, readers: HostReaders, cuda: LazyCuda
) -> None:
    leases: list[Any] = [FakeLease(), FakeLease(), FakeLease()]
    assert all_equal(arrived_slices(leases, ahead, readers, cuda), leases)


@pytest.mark.parametrize("step", ["wait_reusable", "arrived"])
def test_without_a_wait_the_lazy_device_gives_wrong_slices(
    step: str, readers: HostReaders, cuda: LazyCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves that the test above can fail."""
    monkeypatch.setattr(_Copier, step, lambda *_: None)
    leases: list[Any] = [FakeLease()]
    assert not all_equal(arrived_slices(leases, 1, readers, cuda), leases)


def test_slices_stay_allocated_until_the_compute_stream_has_read_them(
    readers: HostReaders, cuda: LazyCuda
) -> None:
    with StagedReader([FakeLease()], LAYERS, 1, readers, DEVICE) as reader:
        for layer in range(LAYERS):
            reader.take(layer)
            assert cuda.recorded[-1] == (reader.buffer.data_ptr(), cuda.default)


def test_entries_that_are_read_in_place_take_no_page_locked_buffer(
    readers: HostReaders, cuda: LazyCuda
) -> None:
    fake = FakeLease()
    lease = MemoryLease(fake.entry)
    lease.entry = fake.entry  # type: ignore[attr-defined]
    assert all_equal(arrived_slices([lease], 2, readers, cuda), [lease])
    assert readers.taken == [0]


def test_an_adapter_waits_for_the_current_stream_of_its_own_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[torch.device] = []

    def current_stream(device: torch.device) -> Any:
        return SimpleNamespace(synchronize=lambda: waited.append(device))

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    for device in (torch.device("cpu"), torch.device("cuda", 1)):
        Adapter.wait_for_device(SimpleNamespace(device=device))  # type: ignore[arg-type]
    assert waited == [torch.device("cuda", 1)]


def test_every_pass_ends_when_the_device_has_computed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    with Engine(tiny_models.model("llama")) as engine:
        engine.entries.encode(CHUNKS)
        monkeypatch.setattr(Adapter, "wait_for_device", lambda _: waits.append("waited"))
        engine.prefill(Q, CHUNKS)
        assert len(waits) == 1
        answer = engine.answer(Q, CHUNKS, max_new_tokens=4, min_new_tokens=4)
    assert len(waits) == 1 + 1 + len(answer.token_ids) - 1  # the last token is not computed


def test_what_the_host_knows_of_rows_is_not_read_back_from_the_device() -> None:
    """A tensor of the device "meta" cannot be read at all."""
    for positions in ([3, 4, 5], [2, 7, 9]):
        known = Rows.of(torch.tensor(positions))
        moved = known.on(torch.device("meta"))
        assert (moved.start, moved.stop, len(moved)) == (known.start, positions[-1] + 1, 3)
        assert moved.positions.device.type == "meta"
    assert known.on(torch.device("cpu")) is known
