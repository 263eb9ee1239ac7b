"""A loaded model, and what all engines on it share: the compute lock, the tokenizer, the identity,
and the KV of prefixes.
"""

import logging
import os
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Self

from ragkv.config import EXPECTED_CODEC, EngineConfig
from ragkv.errors import InputError
from ragkv.model import Adapter, Context, adapt, full_pass
from ragkv.model.decode.stopping import end_tokens
from ragkv.model.fingerprint import (
    architecture_digest,
    rope_digest,
    tokenizer_digest,
    weights_digest,
)
from ragkv.model.loading import DtypeChoice, load
from ragkv.model.rows import Pause
from ragkv.runtime import limit_kernel_caches, no_check
from ragkv.runtime.arguments import check_kind
from ragkv.runtime.token_counter import TokenCounter
from ragkv.scheduling import SharedCompute
from ragkv.store import (
    Entry,
    EntryInfo,
    Identity,
    MemoryLease,
    dtype_name,
    ids_digest,
)

if TYPE_CHECKING:
    from .constraints.grammar import Grammars

log = logging.getLogger(__name__)

# The end of the text is used. A longer text is a little better, and slower to encode with.
NEUTRAL_TOKENS = 1_280
# the share of the text's tokens that a tokenizer may not know; beyond it there is no neutral text
MOST_UNKNOWN = 0.02
# Each engine uses two: its prefix when it is built, and then the prefix with the text.
KEPT_CONTEXTS = 8


@dataclass(frozen=True)
class SharedModel:
    """A loaded model. All engines on it compute one after another and decode together."""

    adapter: Adapter
    tokenizer: Any | None
    identity: Identity  # of every entry this model makes; an engine adds its application's part
    compute: SharedCompute
    dtype_choice: DtypeChoice
    # by ids: the KV of prefixes, alone and with the neutral text; those used last
    contexts: dict[tuple[int, ...], Context] = field(default_factory=dict)

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

    def identity_for(self, config: EngineConfig) -> Identity:
        """The identity of what an engine with these settings stores, without codec and context."""
        return replace(self.identity, adapter=config.adapter_id, tenant=config.store.tenant)

    def chunk_identity(
        self, config: EngineConfig, prefix_ids: tuple[int, ...], neutral: tuple[int, ...]
    ) -> Identity:
        """The identity of chunks that an engine with these settings encodes behind its prefix and the
        `neutral` text.
        """
        return replace(
            self.identity_for(config),
            codec=config.store.codec or (EXPECTED_CODEC if neutral else "raw"),
            context=ids_digest(prefix_ids),
            behind=ids_digest(neutral) if neutral else "",
        )

    def context(self, token_ids: tuple[int, ...], between: Pause = no_check) -> Context:
        """The KV of what stands before chunks, computed once for all engines while it is one of the
        `KEPT_CONTEXTS` used last.

        The caller holds the compute lock; `between` is called between layers.
        """
        context = self.contexts.pop(token_ids, None)
        if context is None:
            length = len(token_ids)
            record = self.adapter.new_recording(0, length)
            kv = self.adapter.new_kv(length)
            full_pass(self.adapter, token_ids, kv, record=record, between=between)
            context = Context((record.kv,))
        self.contexts[token_ids] = context  # at the end: it was used last
        while len(self.contexts) > KEPT_CONTEXTS:
            self.contexts.pop(next(iter(self.contexts)), None)
        return context

    def prefix(
        self, prefix_ids: tuple[int, ...], chunks: Identity, between: Pause = no_check
    ) -> MemoryLease | None:
        """An application's prefix with the RoPE frequencies of its own length, to be read like a
        stored entry; `None` if there is no prefix, or no room behind it.

        `chunks` is the identity that entries of its chunks have. The caller holds the compute lock.
        """
        limit = self.adapter.context_length
        if not prefix_ids or (limit is not None and len(prefix_ids) >= limit):
            return None
        (kv,) = self.context(prefix_ids, between).pieces
        identity = replace(chunks, context=ids_digest(()), behind="")
        frequencies = self.adapter.rope.frequencies(len(prefix_ids))
        key = identity.key(prefix_ids)
        info = EntryInfo(key, identity, prefix_ids, frequencies, *self.adapter.kv_shape)
        return MemoryLease(Entry(info, kv.cpu()))

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


def neutral_ids(tokenizer: Any | None) -> tuple[int, ...]:
    """The text's token ids; none without a tokenizer, or with one that does not know its words.

    Without them chunks are encoded directly after the prefix, and the log says so.
    """
    if tokenizer is None:
        log.info("Without a tokenizer there is no neutral text: chunks are encoded alone.")
        return ()
    text = files(__package__).joinpath("neutral_text.txt").read_text("utf-8").strip() + "\n\n"
    ids = tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    unknown = 0 if tokenizer.unk_token_id is None else ids.count(tokenizer.unk_token_id)
    if unknown > MOST_UNKNOWN * len(ids):
        log.info(
            "The tokenizer does not know %d of %d neutral tokens: chunks are encoded alone.",
            unknown,
            len(ids),
        )
        return ()
    return ids[-NEUTRAL_TOKENS:]
