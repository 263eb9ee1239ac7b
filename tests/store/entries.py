"""Tiny entries for tests. The number of an entry determines every byte of it."""

import dataclasses
import hashlib

import torch

from ragkv.errors import EntryDamagedError
from ragkv.store.entry import Entry, EntryInfo, Identity, dtype_from_name
from ragkv.store.prefetch import HintedEntry, PrefetchHint
from ragkv.store.record import record_of
from ragkv.store.store import Store
from ragkv.store.stored_form import stored_form
from ragkv.store.tiers import Lease, Tier

IDENTITY = Identity(
    weights="w0",
    architecture="a0",
    rope_parameters="r0",
    dtype="bfloat16",
    lora="",
    tokenizer="t0",
    seen_digest="c0",
)


def ids_of(number: int, tokens: int = 4) -> list[int]:
    """`tokens` token ids, different for every `number`."""
    return [1000 * number + place for place in range(tokens)]


def make_entry(
    number: int = 0,
    *,
    tokens: int = 4,
    layers: int = 2,
    identity: Identity = IDENTITY,
    group: str = "",
    index: int = 0,
) -> Entry:
    """The entry of `ids_of(number)`: (L, 2, G=1, T, D=8), random by its number alone."""
    ids = ids_of(number, tokens)
    info = EntryInfo(
        key=identity.key(ids),
        identity=identity,
        token_ids=tuple(ids),
        rope_digest="f0",
        layers=layers,
        kv_heads=1,
        head_dim=8,
        group=group,
        index=index,
    )
    random = torch.Generator().manual_seed(number)
    shape = (layers, 2, 1, tokens, 8)
    kv = torch.randn(shape, generator=random).to(dtype_from_name(identity.dtype))
    return Entry(info, kv)


def as_stored(entry: Entry) -> Entry:
    """`entry` as a store returns it: unchanged, or rounded by its codec."""
    stored = stored_form(entry)
    layers = [stored.read_layer(layer) for layer in range(entry.info.layers)]
    return dataclasses.replace(entry, kv=torch.stack(layers))


def stored_bytes(entry: Entry) -> bytes:
    """The bytes of the entry's file."""
    head, layers = record_of(stored_form(entry))
    return b"".join([head, *layers])


def with_codec(codec: str, identity: Identity = IDENTITY) -> Identity:
    """`identity` with that codec."""
    return dataclasses.replace(identity, codec=codec)


def digest(tensor: torch.Tensor) -> str:
    """A digest of a tensor's bytes, which shows whether anything wrote to them."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


def hint_of(*numbers: int, group: str = "") -> PrefetchHint:
    """What a request announces that will read these entries."""
    size = make_entry().size_bytes
    return PrefetchHint(
        tuple(HintedEntry(IDENTITY, tuple(ids_of(number)), size, group) for number in numbers)
    )


def leased(source: Store | Tier, entry: Entry) -> Lease:
    """A lease of `entry`, which must be a hit."""
    lease = source.lease(entry.info.identity, entry.info.token_ids)
    assert lease is not None
    return lease


def open_leases(*tiers: Tier) -> int:
    """How many leases of these tiers are open, as far as they have a ledger."""
    held = (tier.ledger.slots() for tier in tiers if tier.ledger is not None)
    return sum(slot.leases for slots in held for slot in slots)


def read_all(lease: Lease) -> Entry:
    """The whole entry behind a lease, copied."""
    layers = [lease.read_layer(layer) for layer in range(lease.info.layers)]
    return Entry(lease.info, torch.stack(layers))


def same(a: Entry, b: Entry) -> bool:
    """Whether two entries have equal infos and equal bytes."""
    return a.info == b.info and digest(a.kv) == digest(b.kv)


def served(source: Store | Tier, entry: Entry) -> bool:
    """Whether the entry is a hit that can be read; wrong bytes fail the test."""
    lease = source.lease(entry.info.identity, entry.info.token_ids)
    if lease is None:
        return False
    with lease:
        try:
            found = read_all(lease)
        # on shared storage also: deleted or evicted by another process meanwhile
        except EntryDamagedError:
            return False
    assert same(found, as_stored(entry)), "wrong bytes were served"
    return True


def other_identities(identity: Identity = IDENTITY) -> list[tuple[str, Identity]]:
    """`identity` with one field changed, for every field."""
    other_codec = "int8" if identity.codec == "raw" else "raw"
    changed: dict[str, object] = {"dtype": "float16", "format_version": 99, "codec": other_codec}
    return [
        (
            field.name,
            dataclasses.replace(identity, **{field.name: changed.get(field.name, "other")}),
        )
        for field in dataclasses.fields(IDENTITY)
    ]
