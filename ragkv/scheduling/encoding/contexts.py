"""The text before a chunk while the chunk is encoded, and the KV of that text: the application's
prefix, and a neutral text.

Prompts reuse the same KV of the prefix.
"""

import logging
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

from ragkv.model import Adapter, Context, full_pass
from ragkv.model.rows import Pause
from ragkv.runtime import no_check
from ragkv.store.entry import Entry, EntryInfo, Identity, ids_digest
from ragkv.store.tiers import MemoryLease

log = logging.getLogger(__name__)

# The end of the text is used. A longer text is a little better, and slower to encode with.
NEUTRAL_TOKENS = 1_280
# the share of the text's tokens that a tokenizer may not know; beyond it there is no neutral text
MOST_UNKNOWN = 0.02
# Each engine uses two: its prefix when it is built, and then the prefix with the text.
KEPT_CONTEXTS = 8


@dataclass(frozen=True, eq=False)
class Contexts:
    """The KV of prefixes, alone and with the neutral text, for all engines on one model. Those used
    last are kept.
    """

    adapter: Adapter
    _kept: dict[tuple[int, ...], Context] = field(default_factory=dict, init=False)  # by ids

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, token_ids: tuple[int, ...]) -> bool:
        return token_ids in self._kept

    def of(self, token_ids: tuple[int, ...], between: Pause = no_check) -> Context:
        """The KV of these tokens, computed unless it is one of the `KEPT_CONTEXTS` used last.

        The caller holds the compute lock; `between` is called between layers.
        """
        context = self._kept.pop(token_ids, None)
        if context is None:
            length = len(token_ids)
            record = self.adapter.new_recording(0, length)
            kv = self.adapter.new_kv(length)
            full_pass(self.adapter, token_ids, kv, record=record, between=between)
            context = Context((record.kv,))
        self._kept[token_ids] = context  # at the end: it was used last
        while len(self._kept) > KEPT_CONTEXTS:
            self._kept.pop(next(iter(self._kept)), None)
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
        (kv,) = self.of(prefix_ids, between).pieces
        identity = replace(chunks, seen_digest=ids_digest(()), neutral="")
        rope_digest = self.adapter.rope.digest(len(prefix_ids))
        key = identity.key(prefix_ids)
        info = EntryInfo(key, identity, prefix_ids, rope_digest, *self.adapter.kv_shape)
        return MemoryLease(Entry(info, kv.cpu()))


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
