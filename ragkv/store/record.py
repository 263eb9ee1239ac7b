"""The file format of one entry: safetensors, with layers that can be read alone and checksums over
every byte served.

    [8 bytes: header length][JSON header, padded with spaces to 4 KiB]       \\ [token_ids
    int64][pad.head]                                               > the head, with one checksum
    [layer.0000][pad.0000][layer.0001]...                                    > one checksum a layer,
    in the header

A layer is (2, G, T, D), or what the entry's codec made of it. Any safetensors reader can open the
file; the `pad.*` tensors exist only because that format allows no gaps between tensors. Shared
storage holds the same head and layers (`remote/values.py`). Every kind of damage raises
`EntryDamagedError`; another format version raises `OtherVersionError`, which is not damage. The
checksum (xxh3_128) detects damage, not forgery: the directory's owner can compute checksums too.
Identity and token ids prove that a record is the entry asked for.
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

from .codecs import CODECS, Codec
from .entry import FORMAT_VERSION, EntryInfo, EntryKey, Identity

Bytes = bytes | bytearray | memoryview
Digest = Callable[[Bytes], str]  # 32 hex digits
ALIGNMENT = 4096  # In bytes: the header ends, and every layer begins, at a multiple of it.
FORMAT_NAME = "ragkv-entry"
# The checksum's place is fixed, so that it can be blanked.
CHECKSUM_START = 8 + len('{"__metadata__":{"checksum":"')
CHECKSUM_CHARS = 32  # A checksum has so many hex digits.
BLANK = "0" * CHECKSUM_CHARS  # stands for the checksum while the head is hashed
_HEAD_GUESS = 32768  # In bytes: one read of this size brings the whole head of most entries.
_MAX_HEAD = 64 * 1024**2  # In bytes: a longer head counts as damage and is not allocated.


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
    layer_offsets: tuple[int, ...]  # bytes from the start of the file, multiples of `ALIGNMENT`
    layer_checksums: tuple[str, ...]  # hex, of the stored bytes
    layer_bytes: int  # stored bytes of one layer
    file_bytes: int
    checksum: str  # of the head, and so of all that the entry holds
    layers_per_value: int  # on shared storage; 0 in a file
    digest: Digest  # that made the checksums

    def check_layer(self, layer: int, stored: Bytes) -> None:
        """Raise `EntryDamagedError` unless the checksum of `stored` is the one that was written."""
        if self.digest(stored) != self.layer_checksums[layer]:
            raise EntryDamagedError(self.info.key, f"checksum of layer {layer} does not match")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, in shared memory."""
    view: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return view


def read_fully(fd: int, into: memoryview, offset: int) -> int:
    """Fill `into` from `offset` of `fd`; the number of bytes read, fewer at the end of the file.
    Releases the GIL.
    """
    done = 0
    while done < len(into):
        got = os.preadv(fd, [into[done:]], offset + done)
        if got == 0:
            break
        done += got
    return done


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
        header_end, tensors, facts = _parse_header(first, start)
        if facts["version"] != str(FORMAT_VERSION):
            raise OtherVersionError(
                key, f"format version {facts['version']}, this is {FORMAT_VERSION}"
            )
        if facts["codec"] not in CODECS:
            raise OtherVersionError(key, f"codec {facts['codec']!r}, known are {', '.join(CODECS)}")
        data_end = max(place["data_offsets"][1] for place in tensors.values())
        head_end = header_end + tensors["layer.0000"]["data_offsets"][0]
        if not header_end <= head_end <= _MAX_HEAD:
            raise ValueError(f"a head of {head_end} bytes")
        head = start[:head_end] if head_end <= len(start) else first(head_end)
        _check_head(key, head, head_end, digest)
        return _head(key, head, header_end, tensors, facts, header_end + data_end, digest)
    except EntryDamagedError:
        raise
    except (
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        OverflowError,
        RuntimeError,
    ) as error:
        raise EntryDamagedError(
            key, f"unreadable head ({type(error).__name__}: {error})"
        ) from error


def read_info(path: Path, key: EntryKey) -> EntryInfo:
    """The `EntryInfo` in the record at `path`, stored under `key`. Raises as `read_head` does."""
    with path.open("rb", buffering=0) as file:
        return read_head(file.fileno(), key).info


def _parse_header(
    first: Callable[[int], bytes], start: bytes
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """The header's end, its tensors and its metadata; nothing is verified yet."""
    length = int.from_bytes(start[:8], "little")
    if not 0 < length <= _MAX_HEAD or (8 + length) % ALIGNMENT:
        raise ValueError(f"a header of {length} bytes")
    text = start if 8 + length <= len(start) else first(8 + length)
    tensors: dict[str, Any] = json.loads(text[8 : 8 + length])
    facts: dict[str, str] = tensors.pop("__metadata__")
    if facts["format"] != FORMAT_NAME:
        raise ValueError(f"format {facts['format']!r}")
    return 8 + length, tensors, facts


def _check_head(key: EntryKey, head: bytes, head_end: int, digest: Digest) -> None:
    if len(head) != head_end:
        raise EntryDamagedError(key, f"it ends after {len(head)} bytes, inside its head")
    blank = bytearray(head)
    blank[CHECKSUM_START : CHECKSUM_START + CHECKSUM_CHARS] = BLANK.encode()
    if digest(bytes(blank)).encode() != head[CHECKSUM_START : CHECKSUM_START + CHECKSUM_CHARS]:
        raise EntryDamagedError(key, "checksum of its head does not match")


def _head(
    key: EntryKey,
    head: bytes,
    start: int,
    tensors: dict[str, Any],
    facts: dict[str, str],
    file_bytes: int,
    digest: Digest,
) -> RecordHead:
    """The head as values. Its checksum was verified before, so an error here was made when it was
    written.

    On shared storage without a secret a head may be forged: its numbers must agree, so that reading
    it neither allocates without bound nor fails a request.
    """
    layers, kv_heads, tokens, head_dim = map(int, json.loads(facts["shape"]))
    info = EntryInfo(
        key=key,
        identity=Identity.from_json(facts["identity"]),
        token_ids=tuple(_tensor(head, start, tensors["token_ids"], torch.int64).tolist()),
        frequencies=str(facts["frequencies"]),
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        group=str(facts["group"]),
        index=int(facts["index"]),
    )
    if facts["key"] != key.to_text() or info.tokens != tokens:
        raise EntryDamagedError(key, f"it holds {info.tokens} tokens of entry {facts['key'][:80]}")
    spans = [tensors[f"layer.{number:04d}"]["data_offsets"] for number in range(layers)]
    codec = CODECS[facts["codec"]]
    checksums = tuple(facts["layer_checksums"].split(","))
    layer_bytes = codec.layout(info.shape, info.dtype).nbytes
    if min(layers, kv_heads, head_dim) < 1 or len(checksums) != layers:
        raise ValueError(f"a shape of {facts['shape']} with {len(checksums)} checksums")
    if any(end - begin != layer_bytes for begin, end in spans):
        raise ValueError(f"its layers do not have {layer_bytes} bytes")
    return RecordHead(
        info=info,
        codec=codec,
        layer_offsets=tuple(start + span[0] for span in spans),
        layer_checksums=checksums,
        layer_bytes=layer_bytes,
        file_bytes=file_bytes,
        checksum=facts["checksum"],
        layers_per_value=int(facts.get("layers_per_value", "0")),
        digest=digest,
    )


def _tensor(head: bytes, start: int, place: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """A copy of a small 1-d tensor in the head."""
    begin, end = place["data_offsets"]
    data = bytearray(head[start + begin : start + end])
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
