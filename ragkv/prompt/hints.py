"""What a waiting request will look up in the store, so that it can be fetched meanwhile
(CachedAttention section 3.3.1).
"""

from ragkv.fusion import SpanState
from ragkv.store.codecs import stored_bytes
from ragkv.store.entry import Identity, conversation_group
from ragkv.store.prefetch import HintedEntry, PrefetchHint

from .lookup import Lookup
from .planning import wanted_spans
from .prompt import Task, stored_ids


def hint_of(lookup: Lookup, task: Task) -> PrefetchHint:
    """The entries that `lookup.plan` will read: history in order, then chunks."""
    prompt = task.prompt
    adapter = lookup.adapter

    def hinted(identity: Identity, ids: tuple[int, ...], group: str = "") -> HintedEntry:
        size = stored_bytes(identity.codec, len(ids), *adapter.kv_shape, adapter.dtype)
        return HintedEntry(identity, ids, size, group)

    rope_digest = adapter.rope.digest(len(prompt.token_ids))
    entries = []
    for span in wanted_spans(prompt, task.request.method, rope_digest):
        if span.state is SpanState.COMPUTED:
            continue
        if span.block is not None:
            block = prompt.blocks[span.block]
            identity = block.identity(lookup.block_writer.base)
            group = conversation_group(task.session_id)
            entries.append(hinted(identity, block.token_ids, group))
        elif span.chunk is not None:
            entries.append(hinted(lookup.identity, stored_ids(prompt.chunks[span.chunk])))
    return PrefetchHint(tuple(entries))
