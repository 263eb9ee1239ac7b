"""The layer reader: when layers are read, which buffers are used, and damaged entries."""

import threading
from collections.abc import Iterator
from typing import Never

import pytest
import torch

from ragkv.errors import EntryDamagedError, EntryUnreachableError
from ragkv.fusion import LayerReader, Readers
from ragkv.store.policies import LRU
from ragkv.store.stored_form import stored_form
from ragkv.store.tiers import Lease, MemoryTier, TierKind
from tests.scheduling.helpers import begin
from tests.store.entries import as_stored, make_entry, with_codec

CPU = torch.device("cpu")
LAYERS = 6


class FakeLease(Lease):
    """A lease that records which layers were read; the layer `bad` is damaged."""

    kind = TierKind.DISK

    def __init__(self, bad: int | None = None) -> None:
        self.entry = make_entry(tokens=4, layers=LAYERS)
        self.info = self.entry.info
        self.bad = bad
        self.asked: list[int] = []
        self.arrived = threading.Semaphore(0)

    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        self.asked.append(layer)
        self.arrived.release()
        if layer == self.bad:
            raise EntryDamagedError(self.info.key, f"layer {layer}")
        assert out is not None
        return out.copy_(self.entry.kv[layer])

    def read_entry(self) -> Never:
        raise NotImplementedError

    def release(self) -> None:
        pass


@pytest.fixture
def readers() -> Iterator[Readers]:
    with Readers(1) as readers:
        yield readers


def first_slice(reader: LayerReader, layer: int) -> torch.Tensor:
    """The slice of the first lease."""
    reader.take(layer)
    return reader.slices[0]


@pytest.mark.parametrize("ahead", [1, 2, 3, 9])
def test_a_reader_reads_exactly_the_given_number_of_layers_ahead(
    readers: Readers, ahead: int
) -> None:
    lease = FakeLease()
    with LayerReader([lease], LAYERS, ahead, readers, CPU) as reader:
        for layer in range(LAYERS):
            reader.take(layer)
            (piece,) = reader.slices
            for _ in range(len(lease.asked), min(layer + ahead + 1, LAYERS)):
                assert lease.arrived.acquire(timeout=5)
            readers.pool.submit(int).result()  # everything submitted so far has been read
            assert lease.asked == list(range(min(layer + ahead + 1, LAYERS)))
            assert torch.equal(piece, lease.entry.kv[layer]), (
                "a buffer was overwritten while in use"
            )


def test_a_damaged_layer_raises_when_it_is_needed(readers: Readers) -> None:
    lease = FakeLease(bad=3)
    with LayerReader([lease], LAYERS, 2, readers, CPU) as reader:
        for layer in range(3):
            reader.take(layer)
        with pytest.raises(EntryDamagedError) as damaged:
            reader.take(3)
    assert damaged.value.key == lease.info.key


def test_closing_a_reader_waits_for_running_reads(readers: Readers) -> None:
    """Otherwise the next request would get a buffer that a thread still writes to."""
    started = threading.Event()
    held = threading.Event()

    class HeldLease(FakeLease):
        def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
            started.set()
            assert held.wait(30)
            return super().read_layer(layer, out)

    reader = LayerReader([HeldLease()], LAYERS, 2, readers, CPU)
    assert started.wait(30)
    leaving = begin(reader.close)
    leaving.join(0.2)
    waits = leaving.is_alive()
    held.set()
    leaving.join(30)
    assert waits
    assert not leaving.is_alive()


def test_a_reader_counts_bytes_by_tier(readers: Readers) -> None:
    lease = FakeLease()
    with LayerReader([lease, lease], LAYERS, 2, readers, CPU) as reader:
        assert reader.bytes_by_tier() == {"disk": 2 * lease.info.size_bytes}


def test_what_lies_in_memory_counts_once_for_two_ranges(readers: Readers) -> None:
    entry = make_entry(1, tokens=4, layers=LAYERS)
    tier = MemoryTier(10**6, LRU())
    tier.put(stored_form(entry))
    lease = tier.lease(entry.info.identity, entry.info.token_ids)
    assert lease is not None
    with lease, LayerReader([lease, lease], LAYERS, 2, readers, CPU) as reader:
        assert reader.bytes_by_tier() == {"memory": entry.info.size_bytes}


def test_too_little_memory_is_a_miss_that_is_not_called_damage(readers: Readers) -> None:
    class TooLarge(FakeLease):
        def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
            raise MemoryError("no memory was left")

    lease = TooLarge()
    with (
        LayerReader([lease], LAYERS, 1, readers, CPU) as reader,
        pytest.raises(EntryUnreachableError, match="MemoryError") as missed,
    ):
        reader.take(0)
    assert missed.value.key == lease.info.key
    assert "damaged" not in str(missed.value)


def test_raw_entries_in_memory_are_read_in_place_and_encoded_ones_into_a_buffer(
    readers: Readers,
) -> None:
    """The lease decides this, not the kind of its tier."""
    for codec in ("raw", "int8"):
        entry = make_entry(1, tokens=4, layers=LAYERS, identity=with_codec(codec))
        tier = MemoryTier(10**6, LRU())
        tier.put(stored_form(entry))
        lease = tier.lease(entry.info.identity, entry.info.token_ids)
        assert lease is not None
        with lease, LayerReader([lease], LAYERS, 2, readers, CPU) as reader:
            pieces = [first_slice(reader, layer) for layer in range(LAYERS)]
            buffers = {piece.data_ptr() for piece in pieces}
            assert reader.bytes_by_tier() == {"memory": lease.stored_bytes}
        if codec == "raw":
            assert buffers == {layer.data_ptr() for layer in entry.kv}
        else:
            assert len(buffers) == 3
            assert torch.equal(pieces[-1], as_stored(entry).kv[-1])


def test_a_request_reuses_the_buffer_of_a_finished_request_and_never_that_of_a_running_one(
    readers: Readers,
) -> None:
    def places(reader: LayerReader) -> set[int]:
        return {first_slice(reader, layer).data_ptr() for layer in range(LAYERS)}

    with LayerReader([FakeLease()], LAYERS, 2, readers, CPU) as reader:
        first = places(reader)
    with LayerReader([FakeLease()], LAYERS, 2, readers, CPU) as reader:
        assert places(reader) == first
        with LayerReader([FakeLease()], LAYERS, 2, readers, CPU) as parallel:
            assert not places(parallel) & first
        reader.close()
        reader.close()  # a second close must not return the buffer again
    taken = [readers.take(4096, CPU) for _ in range(3)]
    assert len({buffer.data_ptr() for buffer in taken}) == 3


def test_few_and_small_buffers_are_kept_and_too_small_ones_are_not_handed_out(
    readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragkv.fusion.pipeline.REUSABLE_BYTES", 2 * 4096)
    pieces = [readers.take(size, CPU) for size in (3 * 4096, 4096, 4096, 4096)]
    for piece in pieces:
        readers.give_back(piece)
    assert readers.take(4096, CPU).data_ptr() == pieces[2].data_ptr(), (
        "the last two are kept, and not the large one"
    )
    assert readers.take(2 * 4096, CPU).numel() >= 2 * 4096


def test_what_no_thread_can_read_is_a_miss_and_nobody_gets_the_buffer_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start
    begun: list[threading.Thread] = []

    def one_alone(thread: threading.Thread) -> None:
        begun.append(thread)
        if len(begun) > 1:
            may_read.set()  # what is read is waited for
            raise RuntimeError("can't start new thread")
        start(thread)

    may_read = threading.Event()

    class HeldLease(FakeLease):
        def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
            assert may_read.wait(30)
            return super().read_layer(layer, out)

    leases = [HeldLease(), HeldLease()]
    given_back: list[torch.Tensor] = []
    with Readers(2) as readers:
        monkeypatch.setattr(readers, "give_back", given_back.append)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", one_alone)
            reader = LayerReader(leases, LAYERS, 0, readers, CPU)
            with reader, pytest.raises(EntryUnreachableError, match="can't start new thread") as no:
                reader.take(0)
            assert no.value.key == leases[1].info.key
        assert not given_back
        with LayerReader(leases, LAYERS, 2, readers, CPU) as again:
            assert torch.equal(first_slice(again, 0), leases[0].entry.kv[0])
        assert len(given_back) == 1
