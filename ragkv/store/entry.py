"""An entry is the KV of one run of tokens, stored without positions. Its identity decides who may
use it.

An entry is immutable. Readers copy it into fresh buffers. Its key is a cryptographic hash of its
identity and its token ids. The stored record repeats both, so a hit does not rely on the hash alone
(CacheBlend section 5.1, "KV cache store"). The paper hashes only the text, which would serve one
model's KV to another.

Tiers hold a `StoredEntry`, whose layers have the form of the identity's codec (`stored_form.py`).
"""

import functools
import hashlib
import json
import re
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from ragkv.errors import EntryDamagedError

from .codecs import Codec, codec_of

FORMAT_VERSION = 5  # of KV and of identities; `RECORD_VERSION` is that of the bytes of an entry
_KEY_TEXT = re.compile(r"[0-9a-f]{64}")
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
# The fields of an identity that stored JSON calls otherwise.
_STORED_AS = dict(rope_parameters="rope", lora="adapter", seen_digest="context", neutral="behind")
_GROUP = re.compile(r"[\w-]{0,64}", re.ASCII)  # it is a part of a file's name


@dataclass(frozen=True, slots=True, order=True)
class EntryKey:
    """Which entry. As text it names files, objects, Redis values and journal lines. `to_text` and
    `from_text` are called only there; everywhere else a key is this value.
    """

    # hex digest (blake2b, 32 bytes) of the identity of the KV and of the token ids of the chunk or
    # block
    digest: str

    def to_text(self) -> str:
        """This key in a file's name, an object's, a Redis value's or a journal."""
        return self.digest

    @classmethod
    def from_text(cls, text: str) -> "EntryKey | None":
        """Inverse of `to_text`; `None` if no key has this text."""
        return cls(text) if _KEY_TEXT.fullmatch(text) else None

    def __str__(self) -> str:
        """For messages: the first letters, which are enough to find it in a log."""
        return self.digest[:12]


@dataclass(frozen=True)
class Identity:
    """Everything that must be equal before stored KV may replace computed KV."""

    weights: str  # digest of the model's weights
    architecture: str  # digest of the config fields that affect the computation
    rope_parameters: str  # digest of the RoPE parameters
    dtype: str  # "bfloat16", "float32", ...
    lora: str  # LoRA id, "" for none
    tokenizer: str  # digest of the tokenizer, "" for none
    seen_digest: str  # of the token ids before this run: the application's prefix, for a chunk
    tenant: str = ""  # salt: tenants never share entries
    # part of the identity, so that rounded KV never replaces the model's own KV, nor the reverse
    codec: str = "raw"
    # digest of the neutral text between those ids and an expected entry; "" for all other KV
    neutral: str = ""
    format_version: int = FORMAT_VERSION

    def key(self, token_ids: Sequence[int]) -> EntryKey:
        """The digest of this identity and the token ids."""
        digest = hashlib.blake2b(self.to_json().encode() + ids_bytes(token_ids), digest_size=32)
        return EntryKey(digest.hexdigest())

    def to_json(self) -> str:
        """Canonical JSON of the stored fields: sorted keys, no spaces. A key is a digest of it."""
        return self._json

    @functools.cached_property
    def _json(self) -> str:  # once: a request hashes a key for every chunk
        return _CANONICAL.encode(self.stored_fields())

    def stored_fields(self) -> dict[str, Any]:
        """The fields under the names that entries and servers of other versions know. These lack
        `behind` if it is empty.
        """
        names = [one.name for one in fields(self) if one.name != "neutral" or self.neutral]
        return {_STORED_AS.get(name, name): getattr(self, name) for name in names}

    @staticmethod
    @functools.lru_cache(maxsize=64)  # a request reads one for every entry
    def from_json(text: str) -> "Identity":
        """Inverse of `to_json`; raises `TypeError` or `ValueError` for anything else."""
        return _of_stored(**json.loads(text))


def _of_stored(rope: str, adapter: str, context: str, behind: str = "", **named: Any) -> Identity:
    """The identity with the fields of its JSON."""
    return Identity(
        rope_parameters=rope, lora=adapter, seen_digest=context, neutral=behind, **named
    )


def ids_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int64 bytes, for hashing."""
    ids = array("q", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def ids_digest(token_ids: Sequence[int]) -> str:
    """Hex digest (blake2b, 16 bytes) of token ids."""
    return hashlib.blake2b(ids_bytes(token_ids), digest_size=16).hexdigest()


def conversation_group(session_id: str) -> str:
    """The group of a conversation's blocks: a digest of its id, which may be any text."""
    if not session_id:
        return ""
    return hashlib.blake2b(session_id.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """An entry without its tensors."""

    key: EntryKey
    identity: Identity
    token_ids: tuple[int, ...]
    # digest of the RoPE frequencies it was computed with (they may depend on the length)
    rope_digest: str
    layers: int  # L
    kv_heads: int  # G
    head_dim: int  # D
    group: str = ""  # the conversation it belongs to, see `conversation_group`; "" for a chunk
    index: int = 0  # the number of its block in the conversation

    def __post_init__(self) -> None:
        if not _GROUP.fullmatch(self.group):
            raise ValueError(f"{self.group!r:.80} is no group: use `conversation_group`.")

    def matches(self, identity: Identity, token_ids: Sequence[int]) -> bool:
        """Whether the whole identity and every token are equal to these, not just the key."""
        is_same = self.identity.to_json() == identity.to_json()
        return is_same and self.token_ids == tuple(token_ids)

    def check(self, identity: Identity, token_ids: Sequence[int]) -> None:
        """Raise `EntryDamagedError` unless this is the entry asked for."""
        if not self.matches(identity, token_ids):
            raise EntryDamagedError(self.key, "its identity or tokens are not those asked for")

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
    def is_expected(self) -> bool:
        """Whether a neutral text stood before it, so that it is exact nowhere."""
        return bool(self.identity.neutral)

    @property
    def lossless(self) -> bool:
        """Whether reading returns every bit that was computed; a span of a lossy entry is never
        exact.
        """
        return codec_of(self.identity.codec).lossless

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
    """The KV of one run of tokens, without positions."""

    info: EntryInfo
    # (L, 2, G, T, D); [:, 0] is k_raw (before RoPE, after any k-norm), [:, 1] is v
    kv: torch.Tensor

    def __post_init__(self) -> None:
        info = self.info
        shape = (info.layers, *info.shape)
        if tuple(self.kv.shape) != shape or self.kv.dtype != info.dtype:
            found = f"{tuple(self.kv.shape)} {dtype_name(self.kv.dtype)}"
            raise ValueError(
                f"An entry's KV must be {shape} {info.identity.dtype} (L, 2, G, T, D), not {found}."
            )

    @property
    def size_bytes(self) -> int:
        """Bytes of keys and values."""
        return self.kv.nbytes


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An entry as tiers hold it: in host memory, its layers in a codec's form. Immutable."""

    info: EntryInfo
    codec: Codec  # of `layers`: the identity's, or `raw`
    # (L, ...) stored layers, contiguous; (L, 2, G, T, D) if raw
    layers: torch.Tensor

    @property
    def size_bytes(self) -> int:
        """Bytes of keys and values in this form."""
        return self.layers.nbytes

    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The slice (2, G, T, D): a view if the codec is `in_place`, else decoded into `out` or
        into a new tensor.
        """
        stored = self.layers[layer]
        if self.codec.in_place:
            return stored
        return self.codec.decode(
            stored, torch.empty(self.info.shape, dtype=self.info.dtype) if out is None else out
        )


def dtype_from_name(name: str) -> torch.dtype:
    """`"bfloat16"` -> `torch.bfloat16`; raises `ValueError` if no floating-point dtype has this
    name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{name!r} is not a floating torch dtype.")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")
