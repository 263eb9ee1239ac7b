"""What of a request's prompt is fused: its chunks, the runs between them, and how many tokens vLLM is promised.

A request may name its chunks and how they are fused in `kv_transfer_params`:

    {"ragkv": {"chunks": [[1, 513], [513, 1025]], "ratio": 0.15, "selector": "sensitivity", "reuse": "fused"}}

Each part may be left out. Without `chunks` the stored chunks are searched in the prompt; `reuse` "none" lets vLLM
compute everything. `keep` stores the prompt's KV for the next turn of its conversation, which has the same
`cache_salt`. `tenant` names whose entries are read, with a `proof` (`ragkv/api/vllm_backend/salts.py`). `name` gives the
report a name, by which a later request asks for it (`report_of`). Parameters that are not understood never fail a
request: vLLM computes it, and its report says why.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ragkv.errors import InputError
from ragkv.types import Chunk, Text

from .chunk_index import ChunkIndex, Occurrence

# `KNOWN` are the names in `kv_transfer_params.ragkv`.
KNOWN = ("chunks", "ratio", "selector", "reuse", "keep", "tenant", "proof", "name", "report_of")
MOST_NAME_CHARS = 64  # `MOST_NAME_CHARS` is how long a name or a proof may be.


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request says about fusing."""

    chunks: tuple[Occurrence, ...] | None = None  # None: stored chunks are searched
    options: Mapping[str, Any] = field(default_factory=dict)  # ratio and selector, as `Engine.prefill` takes them
    exact: bool = False  # vLLM computes everything
    keep: bool = False  # the KV is stored for the conversation's next turn
    tenant: str = ""  # whose entries are read
    proof: str = ""  # that the request is the tenant's
    name: str = ""  # of the report; "": it has none
    report_of: str | None = None  # the name of the report that is asked for

    @classmethod
    def of(cls, params: Mapping[str, Any] | None, length: int) -> "Wish":
        """Read the `kv_transfer_params` of a prompt of `length` tokens. Raises `InputError`."""
        given = (params or {}).get("ragkv") or {}
        if not isinstance(given, Mapping):
            raise InputError(f"kv_transfer_params.ragkv is {given!r:.80}; it must be an object.")
        if unknown := sorted(set(map(str, given)) - set(KNOWN)):
            raise InputError(
                f"kv_transfer_params.ragkv has the unknown name {unknown[0]!r}; known: {', '.join(KNOWN)}."
            )
        reuse = given.get("reuse", "fused")
        if reuse not in ("fused", "none"):
            raise InputError(f"kv_transfer_params.ragkv.reuse is {reuse!r}; it must be 'fused' or 'none'.")
        options = {name: given[name] for name in ("ratio", "selector") if name in given}
        chunks = None if "chunks" not in given else _occurrences(given["chunks"], length)
        names = [_name(given, key) or "" for key in ("tenant", "proof", "name")]
        keep = given.get("keep", False)
        if not isinstance(keep, bool):
            raise InputError(f"kv_transfer_params.ragkv.keep is {keep!r:.80}; it must be true or false.")
        return cls(chunks, options, reuse == "none", keep, *names, _name(given, "report_of"))

    @property
    def method(self) -> str:
        """How it is fused: requests that differ in this share no KV in vLLM's prefix cache."""
        return "exact" if self.exact else f"fused {sorted(self.options.items())}"


@dataclass(frozen=True, slots=True)
class FusedLayout:
    """A prompt whose first `promised` tokens ragkv fuses."""

    token_ids: tuple[int, ...]  # (S,) the whole prompt
    runs: tuple[Chunk, ...]  # the prefix, and behind the history chunks with `Text` between them
    held: int  # tokens of history between prefix and chunks
    promised: int  # tokens up to the end of the last chunk, or all that are kept, at most S - 1: vLLM computes the others
    options: Mapping[str, Any]  # for `Engine.prefill`

    def question(self, whole: bool) -> tuple[int, ...]:
        """The ids behind the runs that the fusor is given: one token, or with `whole` all of the prompt."""
        at = self.held + sum(map(len, self.runs))
        return self.token_ids[at:] if whole else self.token_ids[at : self.promised + 1]


def layout(
    token_ids: Sequence[int], wish: Wish, index: ChunkIndex, prefix: Sequence[int], held: int = 0, only_exact: bool = False
) -> FusedLayout | None:
    """The layout of a prompt; `None` if nothing of it is to be fused.

    `prefix` is the application's, behind which entries were encoded: if the prompt begins with it, a chunk right behind
    it is exact; with `only_exact` nothing else is used. Of the history behind the prefix `held` tokens have stored KV.
    """
    ids, options = tuple(token_ids), wish.options
    if wish.exact or len(ids) < 2:
        return None
    at = len(prefix) if ids[: len(prefix)] == tuple(prefix) else 0
    behind = at + held
    found = [one for one in (index.find(ids) if wish.chunks is None else wish.chunks) if one.start >= behind]
    if only_exact:
        found, options = [one for one in found[:1] if prefix and one.start == at], {**options, "reuse": "prefix"}
    if not found and not held:
        return None
    runs = [Text(tuple(prefix), opening=True)] if at else list[Chunk]()
    at = behind
    for one in found:
        if at < one.start:
            runs.append(Text(ids[at : one.start]))
        runs.append(one.chunk(ids))
        at = one.stop
    return FusedLayout(ids, tuple(runs), held, len(ids) - 1 if wish.keep else min(at, len(ids) - 1), options)


def _name(given: Mapping[str, Any], key: str) -> str | None:
    name = given.get(key)
    if name is not None and (not isinstance(name, str) or len(name) > MOST_NAME_CHARS):
        raise InputError(f"kv_transfer_params.ragkv.{key} must be a text of at most {MOST_NAME_CHARS} characters.")
    return name


def _occurrences(given: Any, length: int) -> tuple[Occurrence, ...]:
    """Positions of chunks from [[start, stop], ...]. Raises `InputError`."""
    try:
        found = tuple(sorted(Occurrence(_whole(start), _whole(stop)) for start, stop in given))
    except (TypeError, ValueError) as error:
        raise InputError("kv_transfer_params.ragkv.chunks must be a list of [start, stop] positions.") from error
    at = 0
    for one in found:
        if not at <= one.start < one.stop <= length:
            raise InputError(
                f"kv_transfer_params.ragkv.chunks has [{one.start}, {one.stop}]; chunks must not be empty or overlap, "
                f"and must lie in the prompt of {length} tokens."
            )
        at = one.stop
    return found


def _whole(number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError
    return number
