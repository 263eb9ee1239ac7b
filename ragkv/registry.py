"""Everything that a setting or a request may name, and where it is: one table for each contract.

A row is a name and the place of what it names, "module:object". `pkgutil.resolve_name` imports it
at its first use, so that the names cost nothing, and a package above the one that asks is loaded
only where it is used. Defaults, the gate's candidates and the profiler name single rows; everything
else reads these tables. The endings of documents have a table of the same kind, next to their
loaders (`retrieval/documents/formats.py`).
"""

from typing import NamedTuple

# Which fused tokens are recomputed: classes of `Selector`.
SELECTORS = {
    "attention": "ragkv.fusion.selectors:Attention",
    "first-k": "ragkv.fusion.static_selectors:FirstK",
    "hkvd": "ragkv.fusion.hkvd:HKVD",
    "hkvd-gradual": "ragkv.fusion.hkvd:GradualHKVD",
    "random": "ragkv.fusion.static_selectors:Random",
}

# How a layer is stored: classes of `Codec`.
CODECS = {
    "bfloat16": "ragkv.store.codecs.plain:BFloat16Codec",
    "int8": "ragkv.store.codecs.int8:Int8Codec",
    "raw": "ragkv.store.codecs.plain:RawCodec",
}

# What a full memory or disk tier evicts: classes of `Policy`.
POLICIES = {
    "lookahead": "ragkv.store.policies.lru:LookAhead",
    "lru": "ragkv.store.policies.lru:LRU",
    "t-lru": "ragkv.store.policies.t_lru:TLRU",
    "t-lru-guarded": "ragkv.store.policies.t_lru:GuardedTLRU",
}

# What is dropped of a history that is too long: functions of a `View` that return ranges of tokens.
DISCARDING_LISTS = {
    "keep-dialogue": "ragkv.prompt.history.truncation:keep_dialogue",
    "oldest": "ragkv.prompt.history.truncation:oldest",
}

# How passages are ranked: tuples of rankings, which are merged if there are several.
RETRIEVERS = {
    "bm25": "ragkv.retrieval.retrievers:BM25",
    "dense": "ragkv.retrieval.retrievers:DENSE",
    "hybrid": "ragkv.retrieval.retrievers:HYBRID",
}


class TierRow(NamedTuple):
    """A place for stored KV."""

    setting: str  # of `StoreConfig`; the tier is there if it is neither 0 nor None
    opener: str  # "module:function", which is given a `TierRequest`


# By the kind of tier, fastest first: promotions go up, writes go down.
TIERS = {
    "memory": TierRow("memory_bytes", "ragkv.store.tiers.memory:open_memory"),
    "disk": TierRow("directory", "ragkv.store.tiers.disk:open_disk"),
    "redis": TierRow("redis", "ragkv.cluster:open_redis"),
    "s3": TierRow("s3", "ragkv.cluster:open_s3"),
}
