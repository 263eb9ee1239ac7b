"""A loaded model, and what every engine on it shares: whose turn it is, tokenizer and identity."""

import logging
import os
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from ragkv.config import EngineConfig
from ragkv.errors import InputError
from ragkv.model import Adapter, Context, adapt
from ragkv.model.decode.stopping import end_tokens
from ragkv.model.fingerprint import (
    architecture_digest,
    rope_digest,
    tokenizer_digest,
    weights_digest,
)
from ragkv.model.loading import DtypeChoice
from ragkv.runtime import limit_kernel_caches
from ragkv.runtime.token_counter import TokenCounter
from ragkv.scheduling import SharedCompute
from ragkv.store import Identity, dtype_name

if TYPE_CHECKING:
    from .constraints.grammar import Grammars

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SharedModel:
    """A loaded model. All engines on it compute one after another and decode together."""

    adapter: Adapter
    tokenizer: Any | None
    identity: Identity  # of every entry this model makes; an engine adds its application's part
    compute: SharedCompute
    dtype_choice: DtypeChoice
    # KV of prefixes with the neutral text, which the encoders of all engines share: those used last.
    contexts: dict[tuple[int, ...], Context] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: Any,
        tokenizer: Any | None,
        config: EngineConfig,
        choice: DtypeChoice | None = None,
    ) -> Self:
        """Adapt a loaded transformers model. Raises `UnsupportedModelError` if its KV cannot be
        fused exactly.

        `choice` says why it was loaded in its dtype; `None`: the caller loaded it. Raises
        `InputError` for a name.
        """
        if isinstance(model, str | os.PathLike):
            raise InputError(
                f"Engine takes a loaded model, not the name {str(model)!r}. Load it by name with "
                f"Engine.from_pretrained({str(model)!r}), or with transformers, and pass model "
                "and tokenizer."
            )
        limit_kernel_caches()
        adapter = adapt(model, config.packed_bytes)
        identity = Identity(
            weights=weights_digest(adapter.model),
            architecture=architecture_digest(adapter),
            rope=rope_digest(adapter),
            dtype=dtype_name(adapter.dtype),
            adapter="",
            tokenizer=tokenizer_digest(tokenizer),
            context="",
        )
        choice = choice or DtypeChoice(
            identity.dtype, f"{identity.dtype}, in which the model was given"
        )
        log.info("The model computes in %s.", choice.why)
        compute = SharedCompute(adapter)
        return cls(adapter, tokenizer, identity, compute, choice)

    @cached_property
    def grammars(self) -> "Grammars":
        """The compiler of answer forms; it is made when a form is first asked for."""
        from .constraints.grammar import ConstraintTokenizer, Grammars

        ends = end_tokens(self.adapter.model, self.tokenizer)
        return Grammars(ConstraintTokenizer(self.tokenizer, self.adapter.vocabulary, ends))

    @cached_property
    def count_tokens(self) -> TokenCounter:
        """Tells how many tokens a text has, without special tokens. Raises `InputError` without a
        tokenizer.
        """
        return TokenCounter(self.tokenizer)
