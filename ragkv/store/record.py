"""The file of one entry: a safetensors file whose layers can be read alone and whose every served byte is checked.

    [8 bytes: header length][JSON header, padded with spaces to 4 KiB]       \\
    [token_ids int64][sensitivity float16, optional][pad.head]                > the head, one checksum over all of it
    [layer.0000][pad.0000][layer.0001]...                                    > one checksum a layer, in the header

A layer is (2, G, T, D), or what the entry's codec made of it. Any safetensors reader opens it; the `pad.*` tensors only
exist because that format allows no holes. What lies here is pure format: no directory, no index, no policy. Whatever is
wrong with a file is an `EntryDamagedError`; a file of another format version is an `OtherVersionError`, which is not
damage. The checksum (xxh3_128) is against damage, not against forgery: whoever may write to the directory, which is its
owner's alone, can write what checks; that an entry is the one asked for is proven by identity and token ids.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from ragkv.errors import EntryDamagedError

from .codecs import CODECS, Codec, Layout
from .encoded import EncodedEntry
from .entry import FORMAT_VERSION, Entry, EntryInfo, Identity, ids_bytes

Bytes = bytes | bytearray | memoryview
ALIGNMENT = 4096  # bytes; of the header, of the data's beginning, of every layer
FORMAT_NAME = "ragkv-entry"
_CHECKSUM_START = 8 + len('{"__metadata__":{"checksum":"')  # its place in the file is fixed, so that it can be blanked
_CHECKSUM_CHARS = 32  # xxh3_128, hex
_BLANK = "0" * _CHECKSUM_CHARS
_HEAD_GUESS = 32768  # bytes; one read gets the whole head of most entries
_MAX_HEADER = 64 * 1024**2  # bytes; a longer header is damage, not a reason to allocate
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
}


class OtherVersionError(EntryDamagedError):
    """A sound-looking record of a format version, or in a codec, that this code does not read."""


@dataclass(frozen=True, slots=True)
class RecordHead:
    """What a record's head says, verified."""

    info: EntryInfo
    sensitivity: torch.Tensor | None  # (T, C) float16
    codec: Codec
    layer_offsets: tuple[int, ...]  # bytes from the file's beginning, multiples of `ALIGNMENT`
    layer_checksums: tuple[str, ...]  # hex, of the stored bytes
    layer_bytes: int  # stored bytes of one layer
    file_bytes: int

    def check_layer(self, layer: int, stored: Bytes) -> None:
        """Raise `EntryDamagedError` unless `stored` is exactly the bytes that were written."""
        if checksum(stored) != self.layer_checksums[layer]:
            raise EntryDamagedError(self.info.key, f"checksum of layer {layer} does not match")


@dataclass(frozen=True, slots=True)
class Record:
    """An entry ready to be written: its head's bytes and its layers."""

    head: bytes
    layers: tuple[torch.Tensor, ...]  # contiguous, on the host
    file_bytes: int

    @classmethod
    def of(cls, entry: Entry | EncodedEntry) -> "Record":
        """Lay `entry` out, encoded if it is not yet; hashes every layer. Its tensors are shared, not copied."""
        encoded = EncodedEntry.of(entry).compact()
        info, layers = encoded.info, tuple(encoded.layers)
        facts = _facts(info, encoded.codec.name, [checksum(bytes_of(layer)) for layer in layers])
        scores = b"" if encoded.sensitivity is None else bytes(bytes_of(encoded.sensitivity))
        layout = encoded.codec.layout(info.shape, info.dtype)
        head, file_bytes = _head_bytes(facts, ids_bytes(info.token_ids), scores, layers, layout)
        return cls(head, layers, file_bytes)

    def pieces(self) -> Iterator[Bytes]:
        """The file's bytes in order, in pieces."""
        yield self.head
        for layer in self.layers:
            yield bytes_of(layer)
            yield bytes(-layer.nbytes % ALIGNMENT)


def checksum(data: Bytes) -> str:
    """xxh3_128 of `data`, hex; releases the GIL."""
    return xxhash.xxh3_128_hexdigest(data)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, shared: writing to one writes to the other."""
    view: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return view


def read_fully(fd: int, into: memoryview, offset: int) -> int:
    """Fill `into` from `offset` of `fd`; returns the bytes got, fewer at the file's end. Releases the GIL."""
    done = 0
    while done < len(into):
        got = _read_into(fd, into[done:], offset + done)
        if got == 0:
            break
        done += got
    return done


def _read_into(fd: int, into: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, [into], offset)
    data = os.pread(fd, len(into), offset)  # macOS: one copy more
    into[: len(data)] = data
    return len(data)


def read_head(fd: int, key: str) -> RecordHead:
    """The verified head of the record open at `fd`, which is known by `key`.

    Raises `EntryDamagedError` if a byte of the head is not as written, the file's length is not, or it holds another
    key; `OtherVersionError` if the record says so; `OSError` if reading fails.
    """
    return parse_head(key, lambda size: os.pread(fd, size, 0), os.fstat(fd).st_size)


def parse_head(key: str, first: Callable[[int], bytes], size: int) -> RecordHead:
    """See `read_head`: of a record of `size` bytes, of which `first(n)` are the first n, or all it has."""
    start = first(_HEAD_GUESS)
    try:
        header_end, tensors, facts = _parse_header(first, start)
        if facts["version"] != str(FORMAT_VERSION):
            raise OtherVersionError(key, f"format version {facts['version']}, this is {FORMAT_VERSION}")
        if facts["codec"] not in CODECS:
            raise OtherVersionError(key, f"codec {facts['codec']!r}, known are {', '.join(CODECS)}")
        head_end = header_end + int(tensors["layer.0000"]["data_offsets"][0]) if "layer.0000" in tensors else size
        head = start[:head_end] if head_end <= len(start) else first(head_end)
        _check_head(key, head, head_end)
        return _head(key, head, header_end, tensors, facts, size)
    except EntryDamagedError:
        raise
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise EntryDamagedError(key, f"unreadable head ({type(error).__name__}: {error})") from error


def _facts(info: EntryInfo, codec: str, checksums: list[str]) -> dict[str, str]:
    return {
        "checksum": _BLANK,  # first, so that it stands at _CHECKSUM_START
        "format": FORMAT_NAME,
        "version": str(FORMAT_VERSION),
        "key": info.key,
        "identity": info.identity.to_json(),
        "frequencies": info.frequencies,
        "shape": json.dumps([info.layers, info.kv_heads, info.tokens, info.head_dim]),  # L, G, T, D
        "group": info.group,
        "index": str(info.index),
        "codec": codec,
        "layer_checksums": ",".join(checksums),
    }


def _head_bytes(
    facts: dict[str, str], ids: bytes, scores: bytes, layers: tuple[torch.Tensor, ...], layout: Layout
) -> tuple[bytes, int]:
    """The head with its checksum in place, and the length of the whole file."""
    # 1. every tensor in file order: (name, dtype, shape, bytes)
    tokens = len(ids) // 8
    plan: list[tuple[str, str, tuple[int, ...], int]] = [("token_ids", "I64", (tokens,), len(ids))]
    if scores:
        plan.append(("sensitivity", "F16", (tokens, len(scores) // (2 * tokens)), len(scores)))
    plan += _pad("pad.head", len(ids) + len(scores))
    head_data = sum(size for *_, size in plan)
    for number, layer in enumerate(layers):
        plan.append((f"layer.{number:04d}", _DTYPE_NAMES[layout.dtype], layout.shape, layer.nbytes))
        plan += _pad(f"pad.{number:04d}", layer.nbytes)
    # 2. the header
    header: dict[str, Any] = {"__metadata__": facts}
    offset = 0
    for name, dtype, shape, size in plan:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    # 3. the head, hashed with a blank checksum, then the checksum
    head = bytearray(len(text).to_bytes(8, "little") + text + ids + scores)
    head += bytes(8 + len(text) + head_data - len(head))
    head[_CHECKSUM_START : _CHECKSUM_START + _CHECKSUM_CHARS] = checksum(bytes(head)).encode()
    return bytes(head), 8 + len(text) + offset


def _pad(name: str, size: int) -> list[tuple[str, str, tuple[int, ...], int]]:
    missing = -size % ALIGNMENT
    return [(name, "U8", (missing,), missing)] if missing else []


def _parse_header(first: Callable[[int], bytes], start: bytes) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Where the header ends, its tensors and its metadata; nothing is verified yet."""
    length = int.from_bytes(start[:8], "little")
    if not 0 < length <= _MAX_HEADER or (8 + length) % ALIGNMENT:
        raise ValueError(f"a header of {length} bytes")
    text = start if 8 + length <= len(start) else first(8 + length)
    tensors: dict[str, Any] = json.loads(text[8 : 8 + length])
    facts: dict[str, str] = tensors.pop("__metadata__")
    if facts["format"] != FORMAT_NAME:
        raise ValueError(f"format {facts['format']!r}")
    return 8 + length, tensors, facts


def _check_head(key: str, head: bytes, head_end: int) -> None:
    if len(head) != head_end:
        raise EntryDamagedError(key, f"the file ends after {len(head)} bytes, inside its head")
    blank = bytearray(head)
    blank[_CHECKSUM_START : _CHECKSUM_START + _CHECKSUM_CHARS] = _BLANK.encode()
    if checksum(bytes(blank)).encode() != head[_CHECKSUM_START : _CHECKSUM_START + _CHECKSUM_CHARS]:
        raise EntryDamagedError(key, "checksum of its head does not match")


def _head(key: str, head: bytes, start: int, tensors: dict[str, Any], facts: dict[str, str], size: int) -> RecordHead:
    """The head as values. Its bytes are verified: what is wrong from here on was written wrong."""
    layers, kv_heads, tokens, head_dim = json.loads(facts["shape"])
    info = EntryInfo(
        key=facts["key"],
        identity=Identity.from_json(facts["identity"]),
        token_ids=tuple(_tensor(head, start, tensors["token_ids"], torch.int64).tolist()),
        frequencies=facts["frequencies"],
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        group=facts["group"],
        index=int(facts["index"]),
    )
    end = start + max(place["data_offsets"][1] for place in tensors.values())
    if key not in (info.key, "") or info.tokens != tokens:
        raise EntryDamagedError(key, f"it holds {info.tokens} tokens of entry {info.key[:12]}")
    if size != end:
        raise EntryDamagedError(key, f"the file has {size} bytes, not {end}")
    scores = tensors.get("sensitivity")
    spans = [tensors[f"layer.{number:04d}"]["data_offsets"] for number in range(layers)]
    return RecordHead(
        info=info,
        sensitivity=None if scores is None else _tensor(head, start, scores, torch.float16).view(scores["shape"]),
        codec=CODECS[facts["codec"]],
        layer_offsets=tuple(start + span[0] for span in spans),
        layer_checksums=tuple(facts["layer_checksums"].split(",")) if layers else (),
        layer_bytes=spans[0][1] - spans[0][0] if spans else 0,
        file_bytes=end,
    )


def _tensor(head: bytes, start: int, place: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """A small 1-d tensor out of the head, copied."""
    begin, end = place["data_offsets"]
    data = bytearray(head[start + begin : start + end])
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
