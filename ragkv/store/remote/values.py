"""The values of one entry on shared storage: layers in groups, each value with a header of its own.

    [8 magic][4 header bytes][16 edition][32 digest of all before and behind it in the header][4 JSON bytes]
    [JSON][token ids int64, sensitivity float16: in the head alone][zeros up to 4 KiB]
    [payload: the stored layers first ... first + count - 1, one behind the other]

The header repeats key, identity and token ids as digests, its place in the entry, and the payload's digest; the head,
group 0, has identity, token ids and sensitivity themselves, so that a lookup proves a hit before a layer is loaded.
The edition is a digest of everything an entry holds: two replicas that computed the same bytes wrote the same edition
and may be mixed, any other mixture is found. Digests are xxh3_128, against damage; under a secret they are HMAC-SHA256
(twice as fast here as keyed blake2b), and nobody without it can write what verifies.
"""

import hashlib
import hmac
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from ragkv.errors import EntryDamagedError

from ..codecs import CODECS, Codec
from ..encoded import EncodedEntry
from ..entry import EntryInfo, Identity, ids_bytes, ids_digest
from ..record import ALIGNMENT, Bytes, bytes_of

MAGIC = b"ragkvRV1"
_FIXED = struct.Struct("<8sI16s32sI")
_DIGEST_AT = 28
_DIGEST_BYTES = 32
EDITION_AT, EDITION_BYTES = 12, 16
_MAX_HEADER = 64 * 1024**2  # bytes; a longer header is damage, not a reason to allocate


class Seal:
    """Makes and checks digests."""

    def __init__(self, secret: str | None = None) -> None:
        """With a `secret` they are keyed: bytes that verify were written by who knows it."""
        self._key = None if secret is None else hashlib.blake2b(secret.encode(), digest_size=32).digest()

    def digest(self, *parts: Bytes) -> bytes:
        """32 bytes; releases the GIL."""
        if self._key is not None:
            keyed = hmac.new(self._key, digestmod="sha256")
            for part in parts:
                keyed.update(part)
            return keyed.digest()
        plain = xxhash.xxh3_128()
        for part in parts:
            plain.update(part)
        return plain.digest().ljust(_DIGEST_BYTES, b"\0")


@dataclass(frozen=True, slots=True)
class Value:
    """One value's header, verified."""

    edition: bytes
    group: int
    first: int  # layer
    count: int  # layers
    payload_bytes: int
    payload_digest: str  # hex
    start: int  # bytes from the value's beginning to its payload
    facts: dict[str, Any]
    rest: bytes  # of the header, behind its JSON

    def check(self, key: str, payload: Bytes, seal: Seal) -> None:
        """Raise `EntryDamagedError` unless `payload` is exactly the bytes that were written."""
        if len(payload) != self.payload_bytes:
            raise EntryDamagedError(key, f"group {self.group} has {len(payload)} bytes, not {self.payload_bytes}")
        if seal.digest(payload).hex() != self.payload_digest:
            raise EntryDamagedError(key, f"digest of group {self.group} does not match")


@dataclass(frozen=True, slots=True)
class RemoteHead:
    """What an entry's head says, verified."""

    info: EntryInfo
    sensitivity: torch.Tensor | None  # (T, C) float16
    codec: Codec
    layer_bytes: int  # stored bytes of one layer
    groups: int
    together: int  # layers in a group; the last may have fewer
    value: Value  # its own

    @property
    def edition(self) -> bytes:
        """Digest of everything the entry holds."""
        return self.value.edition

    def layers_of(self, group: int) -> range:
        """The layers in `group`."""
        return range(group * self.together, min(self.info.layers, (group + 1) * self.together))

    def check(self, value: Value, group: int) -> None:
        """Raise `EntryDamagedError` unless `value` is this entry's group of that number."""
        layers = self.layers_of(group)
        wanted = (self.edition, group, layers.start, len(layers), len(layers) * self.layer_bytes)
        if (value.edition, value.group, value.first, value.count, value.payload_bytes) != wanted:
            raise EntryDamagedError(self.info.key, f"group {group} is of another writing of this entry")


def pack(entry: EncodedEntry, group_bytes: int, seal: Seal) -> list[bytes]:
    """The values of `entry`, by group: as few layers together as make `group_bytes`, one at least."""
    encoded = entry.compact()
    info, layers = encoded.info, encoded.layers
    layer_bytes = layers[0].nbytes if info.layers else 0
    together = max(1, -(-group_bytes // max(1, layer_bytes)))
    groups = max(1, -(-info.layers // together))
    payloads = [bytes_of(layers[at : at + together]) for at in range(0, info.layers, together)] or [memoryview(b"")]
    digests = [seal.digest(payload) for payload in payloads]
    scores = b"" if encoded.sensitivity is None else bytes(bytes_of(encoded.sensitivity))
    identity = info.identity.to_json()
    described = json.dumps([info.key, encoded.codec.name, together, info.layers, info.group, info.index])
    edition = seal.digest(*digests, scores, described.encode())[:EDITION_BYTES]
    common = {
        "key": info.key,
        "identity_digest": _short_digest(identity.encode()),
        "ids_digest": ids_digest(info.token_ids),
        "groups": groups,
        "layer_bytes": layer_bytes,
    }
    whole = {
        "identity": identity,
        "frequencies": info.frequencies,
        "shape": [info.layers, info.kv_heads, info.tokens, info.head_dim],
        "group_name": info.group,
        "index": info.index,
        "codec": encoded.codec.name,
        "together": together,
        "scores": len(scores) // (2 * info.tokens) if scores else 0,  # numbers a token
    }
    values = []
    for group, (payload, digest) in enumerate(zip(payloads, digests, strict=True)):
        first = group * together
        facts = {**common, "group": group, "first": first, "count": min(together, info.layers - first)}
        facts |= {"payload_bytes": len(payload), "payload": digest.hex()} | (whole if group == 0 else {})
        rest = ids_bytes(info.token_ids) + scores if group == 0 else b""
        values.append(_value(edition, facts, rest, payload, seal))
    return values


def parse(key: str, data: Bytes, seal: Seal, more: Callable[[int], Bytes] | None = None) -> Value:
    """The verified header at the beginning of `data`.

    `more(n)` gives the value's first n bytes, or all it has, where `data` is not the whole. Raises `EntryDamagedError`.
    """
    if len(data) < _FIXED.size:
        raise EntryDamagedError(key, f"a value of {len(data)} bytes")
    magic, header_bytes, edition, digest, text_bytes = _FIXED.unpack_from(data)
    if magic != MAGIC or not _FIXED.size + text_bytes <= header_bytes <= _MAX_HEADER:
        raise EntryDamagedError(key, f"its value does not begin as one ({magic!r}, {header_bytes} bytes)")
    if header_bytes > len(data) and more is not None:
        data = more(header_bytes)
    header = bytes(data[:header_bytes])
    if len(header) != header_bytes:
        raise EntryDamagedError(key, f"a value ends inside its header, after {len(header)} bytes")
    if seal.digest(header[:_DIGEST_AT], header[_DIGEST_AT + _DIGEST_BYTES :]) != digest:
        raise EntryDamagedError(key, "digest of a value's header does not match")
    facts: dict[str, Any] = json.loads(header[_FIXED.size : _FIXED.size + text_bytes])  # verified: as it was written
    if facts["key"] != key:
        raise EntryDamagedError(key, f"it holds entry {facts['key'][:12]}")
    return Value(
        edition=edition,
        group=facts["group"],
        first=facts["first"],
        count=facts["count"],
        payload_bytes=facts["payload_bytes"],
        payload_digest=facts["payload"],
        start=header_bytes,
        facts=facts,
        rest=header[_FIXED.size + text_bytes :],
    )


def head_of(key: str, value: Value) -> RemoteHead:
    """What the head `value` says; raises `EntryDamagedError` if it is none that this code reads."""
    facts = value.facts
    if value.group != 0 or facts["codec"] not in CODECS:
        raise EntryDamagedError(key, f"its head is group {value.group}, in codec {facts.get('codec')!r}")
    layers, kv_heads, tokens, head_dim = facts["shape"]
    ids = torch.frombuffer(bytearray(value.rest[: 8 * tokens]), dtype=torch.int64) if tokens else torch.empty(0)
    per_token = facts["scores"]
    scores = bytearray(value.rest[8 * tokens : (8 + 2 * per_token) * tokens]) if per_token else None
    info = EntryInfo(
        key=facts["key"],
        identity=Identity.from_json(facts["identity"]),
        token_ids=tuple(ids.tolist()),
        frequencies=facts["frequencies"],
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        group=facts["group_name"],
        index=facts["index"],
    )
    return RemoteHead(
        info=info,
        sensitivity=None if scores is None else torch.frombuffer(scores, dtype=torch.float16).view(tokens, per_token),
        codec=CODECS[facts["codec"]],
        layer_bytes=facts["layer_bytes"],
        groups=facts["groups"],
        together=facts["together"],
        value=value,
    )


def _value(edition: bytes, facts: dict[str, Any], rest: bytes, payload: Bytes, seal: Seal) -> bytes:
    text = json.dumps(facts, separators=(",", ":")).encode()
    size = _FIXED.size + len(text) + len(rest)
    size += -size % ALIGNMENT
    header = bytearray(size)
    _FIXED.pack_into(header, 0, MAGIC, size, edition, bytes(_DIGEST_BYTES), len(text))
    header[_FIXED.size : _FIXED.size + len(text) + len(rest)] = text + rest
    digest = seal.digest(header[:_DIGEST_AT], header[_DIGEST_AT + _DIGEST_BYTES :])
    header[_DIGEST_AT : _DIGEST_AT + _DIGEST_BYTES] = digest
    return b"".join((header, payload))


def _short_digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
