"""The parts of a request's prompt that are fused: its chunks, the runs between them, and the number
of tokens that vLLM is promised.

A request may name its chunks and how they are fused in `kv_transfer_params`:

    {"ragkv": {"chunks": [[1, 513], [513, 1025]],
               "ratio": 0.15, "selector": "hkvd", "reuse": "fused"}}

Each part may be left out. Without `chunks` the stored chunks are searched in the prompt; `reuse`
"none" lets vLLM compute everything. `keep` stores the prompt's KV for the next turn of its
conversation, which has the same `cache_salt`. `tenant` says whose entries are read, with a `proof`
(`salts.py`). `name` gives the report a name, by which a later request asks for it (`report_of`).
Unknown parameters never fail a request. Then vLLM computes it, and its report says why.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from ragkv.errors import InputError
from ragkv.runtime.body_errors import describe_errors
from ragkv.types import Piece, Text

from .chunk_index import ChunkIndex, Occurrence

Name = Annotated[str, Field(max_length=64)]


class Wish(BaseModel):
    """What a request says about fusing. What it leaves out of `ratio` and `selector` is the
    engine's setting.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    # None: searched
    chunks: list[Annotated[list[NonNegativeInt], Field(min_length=2, max_length=2)]] | None = None
    ratio: float | None = None
    selector: str | None = None
    reuse: Literal["fused", "none"] = "fused"  # "none": vLLM computes everything
    keep: bool = False  # the KV is stored for the conversation's next turn
    tenant: Name = ""  # whose entries are read
    proof: Name = ""  # that the request is the tenant's
    name: Name = ""  # of the report; "": it has none
    report_of: Name | None = None  # the name of the report that is asked for

    @classmethod
    def of(cls, params: Mapping[str, Any] | None, length: int) -> Self:
        """Read the `kv_transfer_params` of a prompt of `length` tokens. Raises `InputError`."""
        try:
            wish = cls.model_validate((params or {}).get("ragkv") or {})
        except ValidationError as error:
            raise InputError(
                f"kv_transfer_params.ragkv.{describe_errors(error.errors())[0]}"
            ) from error
        ends = [0, *itertools.chain(*sorted(wish.chunks or ())), length]
        if sorted(ends) != ends or any(start == stop for start, stop in wish.chunks or ()):
            raise InputError(
                "kv_transfer_params.ragkv.chunks: they must not be empty or overlap, and lie in "
                f"the {length} tokens."
            )
        return wish

    @property
    def options(self) -> dict[str, Any]:
        """How it is fused, as `Engine.prefill` takes it."""
        return self.model_dump(include={"ratio", "selector"}, exclude_unset=True)

    @property
    def method(self) -> str:
        """Requests that differ in this share no KV in vLLM's prefix cache."""
        return "exact" if self.reuse == "none" else f"fused {sorted(self.options.items())}"


@dataclass(frozen=True, slots=True)
class FusedLayout:
    """A prompt whose first `promised` tokens ragkv fuses."""

    token_ids: tuple[int, ...]  # (S,) the whole prompt
    runs: tuple[Piece, ...]  # the prefix, and behind the history chunks with `Text` between them
    held: int  # tokens of history between prefix and chunks
    # up to the end of the last chunk, or all that are kept, at most S - 1: vLLM computes the others
    promised: int
    options: Mapping[str, Any]  # for `Engine.prefill`

    def question(self, whole: bool) -> tuple[int, ...]:
        """The ids behind the runs that the fusor is given: one token, or with `whole` all of the
        prompt.
        """
        at = self.held + sum(map(len, self.runs))
        return self.token_ids[at:] if whole else self.token_ids[at : self.promised + 1]


def layout(
    token_ids: Sequence[int], wish: Wish, index: ChunkIndex, prefix: Sequence[int], held: int = 0
) -> FusedLayout | None:
    """The layout of a prompt; `None` if nothing of it is to be fused.

    `prefix` is the application's, behind which entries were encoded: if the prompt begins with it,
    a chunk right behind it is exact. Of the history behind the prefix `held` tokens have stored KV.
    """
    ids = tuple(token_ids)
    if wish.reuse == "none" or len(ids) < 2:
        return None
    named = (
        None
        if wish.chunks is None
        else sorted(Occurrence(start, stop) for start, stop in wish.chunks)
    )
    begins = bool(prefix) and ids[: len(prefix)] == tuple(prefix)
    runs: list[Piece] = [Text(tuple(prefix), opening=True)] if begins else []
    at = sum(map(len, runs)) + held
    found = [one for one in (index.find(ids) if named is None else named) if one.start >= at]
    if not found and not held:
        return None
    for one in found:
        if at < one.start:
            runs.append(Text(ids[at : one.start]))
        runs.append(one.chunk(ids))
        at = one.stop
    promised = len(ids) - 1 if wish.keep else min(at, len(ids) - 1)
    return FusedLayout(ids, tuple(runs), held, promised, wish.options)
