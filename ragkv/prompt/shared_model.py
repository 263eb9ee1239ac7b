"""A loaded model, and what all engines on it share: the compute lock, the tokenizer, the identity,
and the KV of prefixes.
"""

import logging
import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from ragkv.config import EXPECTED_CODEC, EngineConfig
from ragkv.errors import InputError
from ragkv.model import Adapter, adapt
from ragkv.model.decode.stopping import end_tokens
from ragkv.model.fingerprint import (
    architecture_digest,
    rope_parameters_digest,
    tokenizer_digest,
    weights_digest,
)
from ragkv.model.loading import DtypeChoice, load
from ragkv.runtime import limit_kernel_caches
from ragkv.runtime.outside import check_kind
from ragkv.runtime.token_counter import TokenCounter
from ragkv.scheduling import SharedCompute
from ragkv.scheduling.encoding import Contexts
from ragkv.store.entry import Identity, dtype_name, ids_digest

if TYPE_CHECKING:
    from .constraints.grammar import Grammars

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SharedModel:
    """A loaded model. All engines on it compute one after another and decode together."""

    adapter: Adapter
    tokenizer: Any | None
    identity: Identity  # that of this model's entries; an engine adds its application's part
    compute: SharedCompute
    dtype_choice: DtypeChoice
    contexts: Contexts  # the KV of the text before chunks

    @classmethod
    def from_pretrained(
        cls, name: str | os.PathLike[str], config: EngineConfig, *, brief: bool = False
    ) -> Self:
        """Load a model folder, a GGUF file, a hub id or `"smollm2"` as the config says.

        On a CPU the dtype "auto" is the one in which this processor computes the model fastest
        (`model/dtype_choice.py`). A `brief` process copies no weights where that does not pay.
        """
        from ragkv.model.dtype_choice import choose_dtype, copies_pay_at_once

        check_kind("name", name, str, os.PathLike)
        limit_kernel_caches()  # before the first product, by which the dtype is chosen
        room = config.store.memory_bytes
        device = config.device
        choice = choose_dtype(name, device, config.dtype, room, config.packed_bytes, config.weights)
        packed_bytes = config.packed_bytes
        if brief and not copies_pay_at_once(choice.name):
            packed_bytes = 0
        model, tokenizer = load(
            name, device, choice.name, config.adapter, config.weights, packed_bytes
        )
        return cls.of(model, tokenizer, replace(config, packed_bytes=packed_bytes), choice)

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
            rope_parameters=rope_parameters_digest(adapter),
            dtype=dtype_name(adapter.dtype),
            lora="",
            tokenizer=tokenizer_digest(tokenizer),
            seen_digest="",
        )
        choice = choice or DtypeChoice(
            identity.dtype, f"{identity.dtype}, in which the model was given"
        )
        log.info("The model computes in %s.", choice.why)
        compute = SharedCompute(adapter)
        return cls(adapter, tokenizer, identity, compute, choice, Contexts(adapter))

    def identity_for(self, config: EngineConfig) -> Identity:
        """The identity of what an engine with these settings stores, without codec and
        `seen_digest`.
        """
        return replace(self.identity, lora=config.adapter_id, tenant=config.store.tenant)

    def chunk_identity(
        self, config: EngineConfig, prefix_ids: tuple[int, ...], neutral: tuple[int, ...]
    ) -> Identity:
        """The identity of chunks that an engine with these settings encodes behind its prefix and
        the `neutral` text.
        """
        return replace(
            self.identity_for(config),
            codec=config.store.codec or (EXPECTED_CODEC if neutral else "raw"),
            seen_digest=ids_digest(prefix_ids),
            neutral=ids_digest(neutral) if neutral else "",
        )

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
