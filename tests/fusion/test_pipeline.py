"""The layer reader: what is read when, and what a bad entry does."""

import threading
from collections.abc import Iterator

import pytest
import torch

from ragkv.errors import EntryDamagedError
from ragkv.fusion import LayerReader, Readers
from ragkv.store import LRU, Lease, MemoryTier, TierKind
from tests.store.entries import as_stored, make_entry, with_codec

CPU = torch.device("cpu")
LAYERS = 6


class FakeLease(Lease):
    """A slow tier's lease that tells which layers were asked for; `bad` ones are damaged."""

    kind = TierKind.DISK
    sensitivity = None

    def __init__(self, bad: int | None = None) -> None:
        self.entry = make_entry(tokens=4, layers=LAYERS)
        self.info, self.bad = self.entry.info, bad
        self.asked: list[int] = []
        self.arrived = threading.Semaphore(0)

    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        self.asked.append(layer)
        self.arrived.release()
        if layer == self.bad:
            raise EntryDamagedError(self.info.key, f"layer {layer}")
        assert out is not None
        assert out.data_ptr() % 4096 == 0, "reads past the page cache would be copied"
        return out.copy_(self.entry.kv[layer])

    def close(self) -> None:
        pass


@pytest.fixture
def readers() -> Iterator[Readers]:
    with Readers(1) as readers:
        yield readers


@pytest.mark.parametrize("ahead", [1, 2, 3, 9])
def test_reads_so_many_layers_ahead_and_no_more(readers: Readers, ahead: int) -> None:
    lease = FakeLease()
    with LayerReader([lease], LAYERS, ahead, readers, CPU) as reader:
        for layer in range(LAYERS):
            (piece,) = reader.layer(layer)
            for _ in range(len(lease.asked), min(layer + ahead + 1, LAYERS)):
                assert lease.arrived.acquire(timeout=5)
            readers.pool.submit(int).result()  # everything submitted so far has been read
            assert lease.asked == list(range(min(layer + ahead + 1, LAYERS)))
            assert torch.equal(piece, lease.entry.kv[layer]), "a buffer was overwritten while in use"


@pytest.mark.parametrize("together", [2, 4, 9])
@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
def test_reads_layers_together_where_a_tier_asks_for_it(readers: Readers, together: int, ahead: int) -> None:
    small, large = FakeLease(), FakeLease()
    small.layers_per_read = together
    with LayerReader([small, large], LAYERS, ahead, readers, CPU) as reader:
        for layer in range(LAYERS):
            for piece, lease in zip(reader.layer(layer), (small, large), strict=True):
                readers.pool.submit(int).result()  # everything submitted so far has been read
                assert torch.equal(piece, lease.entry.kv[layer]), "a buffer was overwritten while in use"
            due = (layer // together + 1 + -(-ahead // together)) * together
            assert small.asked == large.asked == list(range(min(due, LAYERS)))


def test_a_damaged_layer_surfaces_when_it_is_due(readers: Readers) -> None:
    lease = FakeLease(bad=3)
    with LayerReader([lease], LAYERS, 2, readers, CPU) as reader:
        for layer in range(3):
            reader.layer(layer)
        with pytest.raises(EntryDamagedError) as damaged:
            reader.layer(3)
    assert damaged.value.key == lease.info.key


def test_leaving_early_waits_for_reads_under_way(readers: Readers) -> None:
    """Else the next request would get memory that is still being written to."""
    started, held = threading.Event(), threading.Event()

    class HeldLease(FakeLease):
        def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
            started.set()
            assert held.wait(30)
            return super().read_layer(layer, out)

    reader = LayerReader([HeldLease()], LAYERS, 2, readers, CPU)
    assert started.wait(30)
    leaving = threading.Thread(target=reader.close)
    leaving.start()
    leaving.join(0.2)
    waits = leaving.is_alive()
    held.set()
    leaving.join(30)
    assert waits
    assert not leaving.is_alive()


def test_bytes_are_counted_by_tier(readers: Readers) -> None:
    lease = FakeLease()
    with LayerReader([lease, lease], LAYERS, 2, readers, CPU) as reader:
        assert reader.bytes_by_tier() == {"disk": 2 * lease.info.size_bytes}


def test_what_lies_in_memory_is_read_in_place_and_what_must_be_decoded_into_a_buffer(readers: Readers) -> None:
    """Also where another tier gives views, or memory needs decoding: the lease says which, not its tier's kind."""
    for codec in ("raw", "int8"):
        entry = make_entry(1, tokens=4, layers=LAYERS, identity=with_codec(codec))
        tier = MemoryTier(10**6, LRU())
        tier.put(entry)
        lease = tier.lease(entry.info.identity, entry.info.token_ids)
        assert lease is not None
        with lease, LayerReader([lease], LAYERS, 2, readers, CPU) as reader:
            pieces = [reader.layer(layer)[0] for layer in range(LAYERS)]
            buffers = {piece.data_ptr() for piece in pieces}
            assert reader.bytes_by_tier() == {"memory": lease.stored_bytes}
        if codec == "raw":
            assert buffers == {layer.data_ptr() for layer in entry.kv}
        else:
            assert len(buffers) == 3
            assert torch.equal(pieces[-1], as_stored(entry).kv[-1])


def test_a_request_reads_into_the_memory_of_the_one_before_and_never_into_another_ones(readers: Readers) -> None:
    def places(reader: LayerReader) -> set[int]:
        return {reader.layer(layer)[0].data_ptr() for layer in range(LAYERS)}

    with LayerReader([FakeLease()], LAYERS, 2, readers, CPU) as reader:
        first = places(reader)
    with LayerReader([FakeLease()], LAYERS, 2, readers, CPU) as reader:
        assert places(reader) == first
        with LayerReader([FakeLease()], LAYERS, 2, readers, CPU) as beside:
            assert not places(beside) & first
        reader.close()
        reader.close()  # twice is harmless: the memory is nobody's twice
    taken = [readers.take(4096, CPU).data_ptr() for _ in range(3)]
    assert len(set(taken)) == 3


def test_little_memory_is_kept_and_none_that_is_too_small(readers: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragkv.fusion.pipeline.SPARE_BYTES", 2 * 4096)
    pieces = [readers.take(size, CPU) for size in (3 * 4096, 4096, 4096, 4096)]
    for piece in pieces:
        readers.give_back(piece)
    assert readers.take(4096, CPU).data_ptr() == pieces[2].data_ptr(), "the last two are kept, and not the large one"
    assert readers.take(2 * 4096, CPU).numel() >= 2 * 4096
