"""Passages in the order that reuses most: `order="reuse"` of the live system, replayed on requests made of parts.

A prompt's passages are put in the order of the longest stored chain behind what precedes them, and duplicates are
dropped (the idea of ContextPilot). What is behind the chain is computed, or, with fusion, found by content. Both kinds
of entries are held by one tier, so they compete for its capacity.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from ragkv.store.policies import Policy

from .chunks import STORED, ChunkTier, Read
from .readers.ragpulse import Part, RagRequest


@dataclass(frozen=True)
class ReuseReplay:
    """The result of one policy at one capacity. All counts are tokens."""

    tokens: int  # of all prompts, duplicates included
    exact: int  # found in stored chains
    fused: int  # found by content, behind the chain
    dropped: int  # duplicates
    stored: int  # that were computed and handed to the tier

    @property
    def found(self) -> float:
        """The share of all prompt tokens that is not computed."""
        return (self.exact + self.fused + self.dropped) / self.tokens


def replay_reuse_order(
    requests: Iterable[RagRequest],
    policy: Policy,
    capacity_tokens: int,
    *,
    fusion: bool = False,
    unseen_behind: bool = False,
) -> ReuseReplay:
    """Run requests through `policy`, each in the order that reuses most of what the tier holds then.

    `fusion`: stored parts behind the chain are found by content. `unseen_behind`: a part of the system text that no
    earlier request had stands behind the passages, as an application can lay out its prompt.
    """
    tier, seen, counts = ChunkTier(policy, capacity_tokens), set[int](), [0] * 5
    for request in requests:
        parts, dropped = _laid_out(request, seen if unseen_behind else None)
        seen.update(part.number for part in request.parts if part.kind == "sys_prompt")
        chain, others = _in_order(parts, tier)
        exact, fused, stored = _read(request.at, chain, others, tier, fusion)
        for place, count in enumerate((request.tokens, exact, fused, dropped, stored)):
            counts[place] += count
    return ReuseReplay(*counts)


def _laid_out(request: RagRequest, seen: set[int] | None) -> tuple[list[Part], int]:
    """The parts without duplicate passages, and the tokens dropped; with `seen`, unseen system text comes later."""
    passages = list(dict.fromkeys(part for part in request.parts if part.kind == "passages_ids"))
    system = [part for part in request.parts if part.kind == "sys_prompt"]
    rest = [part for part in request.parts if part.kind not in ("sys_prompt", "passages_ids")]
    behind = [] if seen is None else [part for part in system if part.number not in seen]
    parts = [*(part for part in system if part not in behind), *passages, *behind, *rest]
    return parts, request.tokens - sum(part.tokens for part in parts)


def _in_order(parts: Sequence[Part], tier: ChunkTier) -> tuple[list[tuple[str, Part]], list[Part]]:
    """The parts that are chained, with their keys, and the others behind the first one that is not stored.

    The passages that are held as the longest chain come first.
    """
    first = next((place for place, part in enumerate(parts) if part.kind == "passages_ids"), len(parts))
    before = list(_keyed("", parts[:first]))
    passages = [part for part in parts if part.kind == "passages_ids"]
    key = before[-1][0] if before else ""
    best = max(_held_chains(key, passages, tier), key=lambda run: sum(part.tokens for part in run))
    rest = [part for part in parts[first:] if part not in best]
    keyed = list(_keyed("", [*parts[:first], *best, *rest]))
    stop = next((place for place, (_, part) in enumerate(keyed) if part.kind not in STORED), len(keyed))
    return keyed[:stop], [part for _, part in keyed[stop:]]


def _held_chains(key: str, passages: Sequence[Part], tier: ChunkTier) -> Iterator[tuple[Part, ...]]:
    """Every chain of passages that is held behind `key`, the empty one last."""
    for part in passages:
        behind = _behind(key, part)
        if behind in tier.held:
            rest = [other for other in passages if other is not part]
            for run in _held_chains(behind, rest, tier):
                yield (part, *run)
    yield ()


def _read(
    at: float, chain: Sequence[tuple[str, Part]], others: Sequence[Part], tier: ChunkTier, fusion: bool
) -> tuple[int, int, int]:
    """The exact, fused and stored tokens of one request.

    The last part of a chain is read first, so that a part never outlives what it is chained to under LRU.
    """
    exact_until = next((place for place, (key, _) in enumerate(chain) if key not in tier.held), len(chain))
    exact = fused = stored = 0
    for place in reversed(range(len(chain))):
        key, part = chain[place]
        if tier.read(Read(at, key, part.tokens)):
            exact += part.tokens if place < exact_until else 0
        else:
            stored += part.tokens
    if fusion:
        for part in (*(part for _, part in chain[exact_until:]), *(part for part in others if part.kind in STORED)):
            if tier.read(Read(at, f"{part.kind}:{part.number}", part.tokens)):
                fused += part.tokens
            else:
                stored += part.tokens
    return exact, fused, stored


def _keyed(key: str, parts: Iterable[Part]) -> Iterator[tuple[str, Part]]:
    for part in parts:
        key = _behind(key, part)
        yield key, part


def _behind(key: str, part: Part) -> str:
    """The key of a part behind what has the key `key`."""
    return blake2b(f"{key}/{part.kind}:{part.number}".encode(), digest_size=12).hexdigest()
