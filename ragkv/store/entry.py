"""Entries: the KV of one run of tokens without positions, and the identity under which it may be served.

An entry is immutable; whoever uses it copies into fresh buffers. Its key is a cryptographic hash of its identity and
its token ids, and the stored record repeats both, so that a hit is proven, not assumed (CacheBlend section 5.1, "KV
cache store"; the paper hashes the text alone, which serves one model's KV to another). This file knows no transformers.
"""

import functools
import hashlib
import json
import sys
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .codecs import CODECS

FORMAT_VERSION = 4


@dataclass(frozen=True, slots=True)
class Identity:
    """Everything that must be equal before stored KV may stand in for computed KV."""

    weights: str  # digest of the model's weights
    architecture: str  # digest of what the config says of the computation
    rope: str  # digest of the RoPE parameters
    dtype: str  # "bfloat16", "float32", ...
    adapter: str  # LoRA id, "" for none
    tokenizer: str  # digest of the tokenizer, "" for none
    context: str  # digest of the token ids seen before this run: the application's prefix, for a chunk
    tenant: str = ""  # salt: tenants never share entries
    codec: str = "raw"  # how the bytes are kept: rounded ones never stand in for the model's own, nor the reverse
    scorer: str = ""  # digest of the network that made the sensitivity scores; "" for none
    format_version: int = FORMAT_VERSION

    def key(self, token_ids: Sequence[int]) -> str:
        """Hex digest (blake2b, 32 bytes) of this identity and the token ids."""
        digest = hashlib.blake2b(digest_size=32)
        digest.update(self.to_json().encode())
        digest.update(ids_bytes(token_ids))
        return digest.hexdigest()

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces."""
        return _canonical(self)

    @classmethod
    def from_json(cls, text: str) -> "Identity":
        """Inverse of `to_json`; raises `TypeError` or `ValueError` on anything else."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**fields)


@functools.lru_cache(maxsize=64)  # a request hashes a key a chunk, all under one identity
def _canonical(identity: Identity) -> str:
    return json.dumps(asdict(identity), sort_keys=True, separators=(",", ":"))


def ids_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int64 bytes, for hashing."""
    ids = array("q", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def ids_digest(token_ids: Sequence[int]) -> str:
    """Hex digest (blake2b, 16 bytes) of a run of token ids."""
    return hashlib.blake2b(ids_bytes(token_ids), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """What is known of an entry without its tensors."""

    key: str
    identity: Identity
    token_ids: tuple[int, ...]
    frequencies: str  # digest of the RoPE frequencies it was encoded under (they may depend on the length)
    layers: int  # L
    kv_heads: int  # G
    head_dim: int  # D
    group: str = ""  # the conversation it belongs to; "" for a chunk
    index: int = 0  # its place in the group

    def matches(self, identity: Identity, token_ids: Sequence[int]) -> bool:
        """Whether this entry is what was asked for: every field of the identity and every token, not just the key."""
        return self.identity == identity and self.token_ids == tuple(token_ids)

    @property
    def tokens(self) -> int:
        """T, the number of tokens."""
        return len(self.token_ids)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return dtype_from_name(self.identity.dtype)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(2, G, T, D), of one layer slice."""
        return 2, self.kv_heads, self.tokens, self.head_dim

    @property
    def lossless(self) -> bool:
        """Whether what is read is bit by bit what was computed: else a span of it is never exact."""
        return CODECS[self.identity.codec].lossless

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer slice (2, G, T, D), decoded."""
        return 2 * self.kv_heads * self.tokens * self.head_dim * self.dtype.itemsize

    @property
    def size_bytes(self) -> int:
        """Bytes of all keys and values, decoded."""
        return self.layers * self.layer_bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """The KV of one run of tokens, position-free."""

    info: EntryInfo
    kv: torch.Tensor  # (L, 2, G, T, D); [:, 0] is k_raw (before RoPE, after any k-norm), [:, 1] is v
    sensitivity: torch.Tensor | None = None  # (T, C) float16: a score a token, and what a network adds (see `learned`)

    def __post_init__(self) -> None:
        info = self.info
        shape = (info.layers, 2, info.kv_heads, info.tokens, info.head_dim)
        if tuple(self.kv.shape) != shape or self.kv.dtype != info.dtype:
            found = f"{tuple(self.kv.shape)} {dtype_name(self.kv.dtype)}"
            raise ValueError(f"An entry's KV must be {shape} {info.identity.dtype} (L, 2, G, T, D), not {found}.")
        scores = self.sensitivity
        if scores is not None and (
            scores.dim() != 2 or len(scores) != info.tokens or not scores.shape[1] or scores.dtype != torch.float16
        ):
            found = f"{tuple(scores.shape)} {dtype_name(scores.dtype)}"
            raise ValueError(f"Sensitivity must be ({info.tokens}, C) float16, a score first, not {found}.")

    @property
    def size_bytes(self) -> int:
        """Bytes of keys, values and scores."""
        return self.kv.nbytes + (0 if self.sensitivity is None else self.sensitivity.nbytes)


def compact_tensor(tensor: torch.Tensor, page_locked: bool) -> torch.Tensor:
    """`tensor` on the host, contiguous, owning no more memory than it needs; itself when it already is so."""
    page_locked = page_locked and torch.cuda.is_available()
    tensor = tensor.detach() if tensor.requires_grad else tensor
    compact = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    if tensor.device.type == "cpu" and compact and (tensor.is_pinned() or not page_locked):
        return tensor
    settled = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=page_locked)
    return settled.copy_(tensor)


def dtype_from_name(name: str) -> torch.dtype:
    """`"bfloat16"` -> `torch.bfloat16`; raises `ValueError` for anything that is no floating dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{name!r} is not a floating torch dtype.")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")
