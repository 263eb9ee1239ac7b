"""The values of one entry on shared storage: one a layer group, each with a header of its own.

    [8 magic][4 header bytes][16 content digest][32 digest of the rest of the header][4 JSON bytes]
    [JSON][token ids int64, sensitivity float16: in the head alone][zeros up to 4 KiB]
    [payload: the stored layers of the group, one after the other]

The header has key, identity and token ids as digests, the layer group's place in the entry, and the payload's digest.
The head, which is the value of layer group 0, has identity, token ids and sensitivity themselves, so that a lookup
proves a hit before a layer is loaded. The content digest is of everything an entry holds: values of two replicas that
computed the same bytes have the same one and may be mixed; any other mixture is found. Digests are xxh3_128, against
damage. Under a secret they are HMAC-SHA256 (twice as fast here as keyed blake2b), and a process without the secret
cannot write a value that verifies.
"""

import hashlib
import hmac
import json
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from ragkv.errors import EntryDamagedError

from ..codecs import CODECS, Codec
from ..entry import EncodedEntry, EntryInfo, Identity, ids_bytes, ids_digest
from ..key import EntryKey
from ..record import ALIGNMENT, Bytes, bytes_of

MAGIC = b"ragkvRV1"
CONTENT_DIGEST_AT, CONTENT_DIGEST_BYTES = 12, 16
_FIXED = struct.Struct("<8sI16s32sI")
_DIGEST_AT, _DIGEST_BYTES = 28, 32
_MAX_HEADER = 16 * 1024**2  # In bytes: a longer header is damage, not a reason to allocate.
GROUP_HEADER_BYTES = 64 * 1024  # A header that is not the head's has at most so many bytes.
# What reading a header raises whose digest is right, but which this code did not write.
_FORGED = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, RuntimeError, struct.error)


class Digester:
    """Makes the digests that values are verified by."""

    def __init__(self, secret: str | None = None) -> None:
        """With a `secret` digests are keyed: bytes that verify were written by a process that has it."""
        self._key = None if secret is None else hashlib.blake2b(secret.encode(), digest_size=32).digest()

    def digest(self, *parts: Bytes) -> bytes:
        """32 bytes; releases the GIL."""
        hasher = xxhash.xxh3_128() if self._key is None else hmac.new(self._key, digestmod="sha256")
        for part in parts:
            hasher.update(part)
        return hasher.digest().ljust(_DIGEST_BYTES, b"\0")

    def of_header(self, header: Bytes) -> bytes:
        """Of a whole header but for the place of this digest in it."""
        return self.digest(header[:_DIGEST_AT], header[_DIGEST_AT + _DIGEST_BYTES :])


@dataclass(frozen=True, slots=True)
class ValueHeader:
    """The header of one value, verified."""

    content_digest: bytes  # of the whole entry
    layer_group: int
    layers: range
    payload_bytes: int
    payload_digest: str  # hex
    payload_at: int  # bytes from the value's beginning
    facts: dict[str, Any]  # the JSON
    tail: bytes  # what follows the JSON

    def check_payload(self, key: EntryKey, payload: Bytes, digester: Digester) -> None:
        """Raise `EntryDamagedError` unless `payload` is exactly the bytes that were written."""
        group = self.layer_group
        if len(payload) != self.payload_bytes:
            raise EntryDamagedError(key, f"layer group {group} has {len(payload)} bytes, not {self.payload_bytes}")
        if digester.digest(payload).hex() != self.payload_digest:
            raise EntryDamagedError(key, f"digest of layer group {group} does not match")


@dataclass(frozen=True, slots=True)
class RemoteHead:
    """The head of an entry, verified."""

    info: EntryInfo
    sensitivity: torch.Tensor | None  # (T, C) float16
    codec: Codec
    layer_bytes: int  # stored bytes of one layer
    layer_groups: int
    layers_per_group: int  # the last group may have fewer
    header: ValueHeader
    dropped: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)  # for a bad part

    def layers_of(self, layer_group: int) -> range:
        """The layers in `layer_group`."""
        return _layers_of(layer_group, self.layers_per_group, self.info.layers)

    def check_group(self, header: ValueHeader, layer_group: int) -> None:
        """Raise `EntryDamagedError` unless `header` is of this writing of the entry, and of this layer group."""
        layers = self.layers_of(layer_group)
        wanted = (self.header.content_digest, layer_group, layers, len(layers) * self.layer_bytes)
        if (header.content_digest, header.layer_group, header.layers, header.payload_bytes) != wanted:
            raise EntryDamagedError(self.info.key, f"layer group {layer_group} is of another writing of this entry")


def pack(entry: EncodedEntry, group_bytes: int, digester: Digester) -> list[bytes]:
    """The values of `entry`, one a layer group: a group has the fewest layers that make `group_bytes`."""
    encoded = entry.compact()
    info, layers = encoded.info, encoded.layers
    layer_bytes = layers[0].nbytes if info.layers else 0
    per_group = max(1, -(-group_bytes // max(1, layer_bytes)))
    groups = [_layers_of(group, per_group, info.layers) for group in range(max(1, -(-info.layers // per_group)))]
    payloads = [bytes_of(layers[group.start : group.stop]) if group else memoryview(b"") for group in groups]
    digests = [digester.digest(payload) for payload in payloads]
    scores = b"" if encoded.sensitivity is None else bytes(bytes_of(encoded.sensitivity))
    described = json.dumps([info.key.to_text(), encoded.codec.name, per_group, info.layers, info.group, info.index])
    content_digest = digester.digest(*digests, scores, described.encode())[:CONTENT_DIGEST_BYTES]
    identity = info.identity.to_json()
    common = {
        "key": info.key.to_text(),
        "identity_digest": hashlib.blake2b(identity.encode(), digest_size=16).hexdigest(),
        "ids_digest": ids_digest(info.token_ids),
        "groups": len(groups),
        "layer_bytes": layer_bytes,
    }
    of_head = {
        "identity": identity,
        "frequencies": info.frequencies,
        "shape": [info.layers, info.kv_heads, info.tokens, info.head_dim],
        "group_name": info.group,
        "index": info.index,
        "codec": encoded.codec.name,
        "together": per_group,
        "scores": len(scores) // (2 * info.tokens) if scores else 0,  # numbers a token
    }
    values = []
    for number, (group, payload, digest) in enumerate(zip(groups, payloads, digests, strict=True)):
        place = {"group": number, "first": group.start, "count": len(group)}
        facts = common | place | {"payload_bytes": len(payload), "payload": digest.hex()}
        tail = b"" if number else ids_bytes(info.token_ids) + scores
        values.append(_value(content_digest, facts if number else facts | of_head, tail, payload, digester))
    return values


def parse(key: EntryKey, data: Bytes, digester: Digester, more: Callable[[int], Bytes] | None = None) -> ValueHeader:
    """The verified header at the beginning of `data`.

    `more(n)` returns the value's first n bytes, or all it has, where `data` is not the whole. Raises
    `EntryDamagedError`.
    """
    if len(data) < _FIXED.size:
        raise EntryDamagedError(key, f"a value of {len(data)} bytes")
    magic, header_bytes, content_digest, digest, text_bytes = _FIXED.unpack_from(data)
    if magic != MAGIC or not _FIXED.size + text_bytes <= header_bytes <= _MAX_HEADER:
        raise EntryDamagedError(key, f"its value does not begin as one ({magic!r}, {header_bytes} bytes)")
    if header_bytes > len(data) and more is not None:
        data = more(header_bytes)
    header = bytes(data[:header_bytes])
    if len(header) != header_bytes:
        raise EntryDamagedError(key, f"a value ends inside its header, after {len(header)} bytes")
    if digester.of_header(header) != digest:
        raise EntryDamagedError(key, "digest of a value's header does not match")
    try:
        facts: dict[str, Any] = json.loads(header[_FIXED.size : _FIXED.size + text_bytes])
        if facts["key"] != key.to_text():
            raise EntryDamagedError(key, f"it holds entry {str(facts['key'])[:12]}")
        return ValueHeader(
            content_digest=content_digest,
            layer_group=int(facts["group"]),
            layers=range(facts["first"], facts["first"] + facts["count"]),
            payload_bytes=int(facts["payload_bytes"]),
            payload_digest=str(facts["payload"]),
            payload_at=header_bytes,
            facts=facts,
            tail=header[_FIXED.size + text_bytes :],
        )
    except _FORGED as error:
        raise EntryDamagedError(key, f"its header is not as this version writes it ({error!r:.80})") from error


def parse_head(key: EntryKey, header: ValueHeader) -> RemoteHead:
    """The head that `header` begins; raises `EntryDamagedError` if it is none that this code writes."""
    try:
        head = _head(key, header)
        if not _is_sound(head):
            raise ValueError("its numbers contradict each other")
    except _FORGED as error:
        raise EntryDamagedError(key, f"its head is not as this version writes it ({error!r:.80})") from error
    return head


def _head(key: EntryKey, header: ValueHeader) -> RemoteHead:
    """What the head's header says; raises one of `_FORGED`."""
    facts = header.facts
    layers, kv_heads, tokens, head_dim = map(int, facts["shape"])
    topics, ids_end = int(facts["scores"]), 8 * tokens
    if min(layers, topics) < 0 or min(kv_heads, tokens, head_dim) < 1 or ids_end > len(header.tail):
        raise ValueError(f"a shape of {facts['shape']}")
    scores = bytearray(header.tail[ids_end : ids_end + 2 * topics * tokens])
    info = EntryInfo(
        key=key,
        identity=Identity.from_json(facts["identity"]),
        token_ids=struct.unpack(f"<{tokens}q", header.tail[:ids_end]),
        frequencies=str(facts["frequencies"]),
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        group=str(facts["group_name"]),
        index=int(facts["index"]),
    )
    return RemoteHead(
        info=info,
        sensitivity=torch.frombuffer(scores, dtype=torch.float16).view(tokens, topics) if topics else None,
        codec=CODECS[facts["codec"]],
        layer_bytes=int(facts["layer_bytes"]),
        layer_groups=int(facts["groups"]),
        layers_per_group=int(facts["together"]),
        header=header,
    )


def _is_sound(head: RemoteHead) -> bool:
    """Whether the numbers of a head agree: a forged one must neither allocate without bound nor fail a request."""
    info, header = head.info, head.header
    if header.layer_group != 0 or head.layers_per_group < 1 or header.layers != head.layers_of(0):
        return False
    groups = max(1, -(-info.layers // head.layers_per_group))
    layer_bytes = head.codec.layout(info.shape, info.dtype).nbytes if info.layers else 0
    payload_bytes = len(header.layers) * layer_bytes
    return (head.layer_groups, head.layer_bytes, header.payload_bytes) == (groups, layer_bytes, payload_bytes)


def _layers_of(layer_group: int, per_group: int, layers: int) -> range:
    return range(layer_group * per_group, min(layers, (layer_group + 1) * per_group))


def _value(content_digest: bytes, facts: dict[str, Any], tail: bytes, payload: Bytes, digester: Digester) -> bytes:
    text = json.dumps(facts, separators=(",", ":")).encode()
    size = _FIXED.size + len(text) + len(tail)
    size += -size % ALIGNMENT
    header = bytearray(size)
    _FIXED.pack_into(header, 0, MAGIC, size, content_digest, bytes(_DIGEST_BYTES), len(text))
    header[_FIXED.size : _FIXED.size + len(text) + len(tail)] = text + tail
    header[_DIGEST_AT : _DIGEST_AT + _DIGEST_BYTES] = digester.of_header(header)
    return b"".join((header, payload))
