"""The bytes of one entry, in a file and on shared storage: a head, then the layers in order.

    [checksum of the rest of the head, 32 hex digits][bytes of the JSON, 8 hex digits][JSON][layers]

The JSON names key, identity, tokens, shape and codec, and the checksum of every layer. So a read of
one layer is verified without the others. A layer is (2, G, T, D), in the form of the entry's codec.
On shared storage the layers are in several values (`cluster/entry_values.py`).

Damage of any kind raises `EntryDamagedError`. Another format version raises `OtherVersionError`. A
lookup drops such an entry; a list of entries leaves it to `gc`. The checksum (xxh3_128) detects
damage, not forgery: the directory's owner can compute checksums too. Identity and token ids prove
that a record is the entry asked for.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from ragkv.errors import EntryDamagedError
from ragkv.registry import CODECS

from .codecs import Codec, codec_of
from .entry import EntryInfo, EntryKey, Identity, StoredEntry

Bytes = bytes | bytearray | memoryview
Digest = Callable[[Bytes], str]  # 32 hex digits

FORMAT_NAME = "ragkv-entry"
RECORD_VERSION = 6
CHECKSUM_CHARS = 32  # A checksum has so many hex digits; that of the head stands first.
_JSON_START = CHECKSUM_CHARS + 8
_HEAD_GUESS = 16384  # In bytes: one read of this size brings the whole head of most entries.
_MAX_HEAD = 64 * 1024**2  # In bytes: a longer head counts as damage and is not allocated.
# What reading values raises that are not those of a head.
_NO_HEAD = (LookupError, ValueError, TypeError, AttributeError, OverflowError, RecursionError)


class OtherVersionError(EntryDamagedError):
    """A record whose format version or codec this code cannot read."""


def checksum(data: Bytes) -> str:
    """xxh3_128 of `data`, hex; releases the GIL."""
    return xxhash.xxh3_128_hexdigest(data)


@dataclass(frozen=True, slots=True)
class RecordHead:
    """A record's head, verified."""

    info: EntryInfo
    codec: Codec
    layer_checksums: tuple[str, ...]  # hex, of the stored bytes
    layer_bytes: int  # stored bytes of one layer
    head_bytes: int
    checksum: str  # of the head, and so of all that the entry holds
    layers_per_value: int  # on shared storage; 0 in a file
    digest: Digest  # that made the checksums

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole record."""
        return self.layer_start(self.info.layers)

    def layer_start(self, layer: int) -> int:
        """Where a layer begins in a file."""
        return self.head_bytes + layer * self.layer_bytes

    def check_layer(self, layer: int, stored: Bytes) -> None:
        """Raise `EntryDamagedError` unless the checksum of `stored` is the one that was written."""
        if self.digest(stored) != self.layer_checksums[layer]:
            raise EntryDamagedError(self.info.key, f"checksum of layer {layer} does not match")


def record_of(
    entry: StoredEntry, digest: Digest = checksum, layers_per_value: int = 0
) -> tuple[bytes, list[memoryview]]:
    """The head of the record of `entry`, and its layers, which share the tensors' memory."""
    info = entry.info
    layers = [bytes_of(layer) for layer in entry.layers]
    facts = {
        "format": FORMAT_NAME,
        "version": RECORD_VERSION,
        "key": info.key.to_text(),
        "identity": info.identity.to_json(),
        "token_ids": info.token_ids,
        "frequencies": info.rope_digest,
        "shape": (info.layers, info.kv_heads, info.head_dim),  # L, G, D
        "group": info.group,
        "index": info.index,
        "codec": entry.codec.name,
        "layer_checksums": list(map(digest, layers)),
        "layers_per_value": layers_per_value,
    }
    text = json.dumps(facts, separators=(",", ":")).encode()
    rest = b"%08x" % len(text) + text
    return digest(rest).encode() + rest, layers


def read_head(fd: int, key: EntryKey) -> RecordHead:
    """The verified head of the record open at `fd`, stored under `key`.

    Raises `EntryDamagedError` if the head's checksum, the file's length or the key is wrong,
    `OtherVersionError` for another format version or an unknown codec, and `OSError` if reading
    fails.
    """
    head = parse_head(key, os.pread(fd, _HEAD_GUESS, 0), lambda size: os.pread(fd, size, 0))
    size = os.fstat(fd).st_size
    if size != head.file_bytes:
        raise EntryDamagedError(key, f"the file has {size} bytes, not {head.file_bytes}")
    return head


def parse_head(
    key: EntryKey, start: bytes, first: Callable[[int], bytes], digest: Digest = checksum
) -> RecordHead:
    """As `read_head`, of a record that begins with `start`; the length of what follows the head is
    not checked.

    `first(n)` returns its first n bytes, or all if it has fewer.
    """
    try:
        size = _JSON_START + int(start[CHECKSUM_CHARS:_JSON_START], 16)
        if not _JSON_START < size <= _MAX_HEAD:
            raise ValueError(f"a head of {size} bytes")
        head = start[:size] if size <= len(start) else first(size)
        if len(head) != size:
            raise EntryDamagedError(key, f"it ends after {len(head)} bytes, inside its head")
        if digest(memoryview(head)[CHECKSUM_CHARS:]).encode() != head[:CHECKSUM_CHARS]:
            raise EntryDamagedError(key, "checksum of its head does not match")
        return _head(key, json.loads(head[_JSON_START:]), head, digest)
    except EntryDamagedError:
        raise
    except _NO_HEAD as error:
        raise EntryDamagedError(
            key, f"unreadable head ({type(error).__name__}: {error})"
        ) from error


def read_info(path: Path, key: EntryKey) -> EntryInfo:
    """The `EntryInfo` in the record at `path`, stored under `key`. Raises as `read_head` does."""
    with path.open("rb", buffering=0) as file:
        return read_head(file.fileno(), key).info


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, in shared memory."""
    view: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return view


def _head(key: EntryKey, facts: dict[str, Any], head: bytes, digest: Digest) -> RecordHead:
    """The head as values. Its checksum was verified before, so an error here was made when it was
    written.

    On shared storage without a secret a head may be forged: its numbers must agree, so that reading
    it neither allocates without bound nor fails a request.
    """
    if facts["format"] != FORMAT_NAME:
        raise ValueError(f"format {facts['format']!r}")
    if facts["version"] != RECORD_VERSION:
        raise OtherVersionError(key, f"format version {facts['version']}, this is {RECORD_VERSION}")
    if facts["codec"] not in CODECS:
        raise OtherVersionError(key, f"codec {facts['codec']!r}, known are {', '.join(CODECS)}")
    if facts["key"] != key.to_text():
        raise EntryDamagedError(key, f"it is of entry {facts['key'][:80]}")
    layers, kv_heads, head_dim = map(int, facts["shape"])
    info = EntryInfo(
        key=key,
        identity=Identity.from_json(facts["identity"]),
        token_ids=tuple(map(int, facts["token_ids"])),
        rope_digest=str(facts["frequencies"]),
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        group=str(facts["group"]),
        index=int(facts["index"]),
    )
    checksums = tuple(map(str, facts["layer_checksums"]))
    if min(layers, kv_heads, head_dim) < 1 or len(checksums) != layers:
        raise ValueError(f"a shape of {facts['shape']} with {len(checksums)} checksums")
    codec = codec_of(facts["codec"])
    return RecordHead(
        info=info,
        codec=codec,
        layer_checksums=checksums,
        layer_bytes=codec.nbytes(info.shape, info.dtype),
        head_bytes=len(head),
        checksum=head[:CHECKSUM_CHARS].decode(),
        layers_per_value=int(facts["layers_per_value"]),
        digest=digest,
    )
