"""Making the record of an entry, in the format that `record.py` describes and reads."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .codecs import Layout
from .entry import FORMAT_VERSION, EncodedEntry, Entry, EntryInfo, ids_bytes
from .record import (
    ALIGNMENT,
    BLANK,
    CHECKSUM_CHARS,
    CHECKSUM_START,
    FORMAT_NAME,
    Bytes,
    Digest,
    bytes_of,
    checksum,
)

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
}


@dataclass(frozen=True, slots=True)
class Record:
    """An entry ready to be written: its head's bytes and its layers."""

    head: bytes
    layers: tuple[torch.Tensor, ...]  # contiguous, on the host
    file_bytes: int

    @classmethod
    def of(
        cls, entry: Entry | EncodedEntry, digest: Digest = checksum, layers_per_value: int = 0
    ) -> "Record":
        """The record of `entry`, which is encoded if it is not yet. Hashes every layer; shares the
        tensors.
        """
        encoded = EncodedEntry.of(entry).compact()
        info = encoded.info
        layers = tuple(encoded.layers)
        facts = _facts(info, encoded.codec.name, [digest(bytes_of(layer)) for layer in layers])
        if layers_per_value:
            facts["layers_per_value"] = str(layers_per_value)
        layout = encoded.codec.layout(info.shape, info.dtype)
        head, file_bytes = _head_bytes(facts, ids_bytes(info.token_ids), layers, layout, digest)
        return cls(head, layers, file_bytes)

    def pieces(self) -> Iterator[Bytes]:
        """The file's bytes in order, in pieces."""
        yield self.head
        for layer in self.layers:
            yield bytes_of(layer)
            yield bytes(-layer.nbytes % ALIGNMENT)


def _facts(info: EntryInfo, codec: str, checksums: list[str]) -> dict[str, str]:
    return {
        "checksum": BLANK,  # first, so that it begins at CHECKSUM_START
        "format": FORMAT_NAME,
        "version": str(FORMAT_VERSION),
        "key": info.key.to_text(),
        "identity": info.identity.to_json(),
        "frequencies": info.frequencies,
        "shape": json.dumps([info.layers, info.kv_heads, info.tokens, info.head_dim]),  # L, G, T, D
        "group": info.group,
        "index": str(info.index),
        "codec": codec,
        "layer_checksums": ",".join(checksums),
    }


def _head_bytes(
    facts: dict[str, str],
    ids: bytes,
    layers: tuple[torch.Tensor, ...],
    layout: Layout,
    digest: Digest,
) -> tuple[bytes, int]:
    """The head with its checksum, and the length of the whole file."""
    # 1. list every tensor in file order: (name, dtype, shape, bytes)
    tokens = len(ids) // 8
    plan: list[tuple[str, str, tuple[int, ...], int]] = [("token_ids", "I64", (tokens,), len(ids))]
    plan += _pad("pad.head", len(ids))
    head_data = sum(size for *_, size in plan)
    for number, layer in enumerate(layers):
        plan.append((f"layer.{number:04d}", _DTYPE_NAMES[layout.dtype], layout.shape, layer.nbytes))
        plan += _pad(f"pad.{number:04d}", layer.nbytes)
    # 2. write the header
    header: dict[str, Any] = {"__metadata__": facts}
    offset = 0
    for name, dtype, shape, size in plan:
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    # 3. hash the head with a blank checksum, then insert the checksum
    head = bytearray(len(text).to_bytes(8, "little") + text + ids)
    head += bytes(8 + len(text) + head_data - len(head))
    head[CHECKSUM_START : CHECKSUM_START + CHECKSUM_CHARS] = digest(bytes(head)).encode()
    return bytes(head), 8 + len(text) + offset


def _pad(name: str, size: int) -> list[tuple[str, str, tuple[int, ...], int]]:
    missing = -size % ALIGNMENT
    return [(name, "U8", (missing,), missing)] if missing else []
