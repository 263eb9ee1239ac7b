"""Truncation: which tokens of a history go when a prompt would overflow the context (CachedAttention section 3.4).

A token discarding list (TDL) names ranges of tokens; the edit itself is `History.without`. Nothing is loaded here and
nothing computed: what is kept is turned to its new places when it is read.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ragkv.config import SessionConfig
from ragkv.errors import ConfigError, InputError

from .history import History, Part, PartKind, Ranges


@dataclass(frozen=True, slots=True)
class Discardable:
    """A history as a TDL sees it."""

    token_ids: tuple[int, ...]
    parts: tuple[Part, ...]  # the same tokens by what they were, in order
    needed: int  # tokens that must go for the prompt to fit
    target: int  # tokens the truncation ratio would have go
    sink_tokens: int  # the first ones, which are to stay

    def spans(self) -> Iterator[tuple[int, int, Part]]:
        """Start, stop and part, in order."""
        at = 0
        for part in self.parts:
            yield at, at + len(part), part
            at += len(part)


Discard = Callable[[Discardable], Iterable[tuple[int, int]]]


def oldest(view: Discardable) -> list[tuple[int, int]]:
    """The oldest tokens behind the sinks, as many as the ratio says; the sinks if nothing else is left."""
    return _first(view.sink_tokens, len(view.token_ids), view.target)


def keep_dialogue(view: Discardable) -> list[tuple[int, int]]:
    """The documents of past turns, oldest turn first, as many as the ratio says; then the oldest tokens."""
    ranges: list[tuple[int, int]] = []
    dropped, turn = 0, -1
    for start, stop, part in view.spans():
        if part.kind is not PartKind.CHUNK or stop <= view.sink_tokens:
            continue
        if dropped >= view.target and part.turn != turn:  # a turn's documents go together
            break
        turn = part.turn
        ranges.append((max(start, view.sink_tokens), stop))
        dropped += stop - max(start, view.sink_tokens)
    if dropped >= view.needed:
        return ranges
    left = len(view.token_ids) - dropped
    share = view.target / max(1, len(view.token_ids))
    return ranges + list(_behind(ranges, view, max(1, int(share * left))))


def _behind(gone: Ranges, view: Discardable, count: int) -> Iterator[tuple[int, int]]:
    """The oldest `count` tokens behind the sinks that have not gone."""
    at = view.sink_tokens if len(view.token_ids) > view.sink_tokens else 0
    for start, stop in (*gone, (len(view.token_ids),) * 2):
        take = min(count, max(0, start - at))
        if take:
            yield at, at + take
        count, at = count - take, max(at, stop)


def _first(sinks: int, length: int, count: int) -> list[tuple[int, int]]:
    start = sinks if length > sinks else 0
    return [(start, min(length, start + count))]


TDLS: dict[str, Discard] = {"oldest": oldest, "keep-dialogue": keep_dialogue}


def find(discard: str | Discard) -> Discard:
    """A TDL by its name, or the callable itself; raises `ConfigError` for a name nobody has."""
    if callable(discard):
        return discard
    if discard not in TDLS:
        raise ConfigError(f"Unknown discarding list {discard!r}. Known: {', '.join(TDLS)}, or a callable.")
    return TDLS[discard]


def merged(ranges: Iterable[tuple[int, int]], length: int) -> Ranges:
    """The ranges ascending and apart; raises `InputError` for what is no range of a history of `length` tokens."""
    checked = []
    for given in ranges:
        try:
            start, stop = given
            sound = int(start) == start and int(stop) == stop and 0 <= start <= stop <= length
        except (TypeError, ValueError):
            sound = False
        if not sound:
            raise InputError(f"{given!r:.80} is no range (start, stop) of a history of {length} tokens.")
        if start < stop:
            checked.append((int(start), int(stop)))
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(checked):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def fitted(
    history: History, room: int, settings: SessionConfig, discard: str | Discard, prefix_tokens: int
) -> tuple[History, str | None]:
    """The history cut until it has at most `room` tokens, or none, and what to say of it."""
    whole, chosen, fallback = len(history), find(discard), False
    while (length := len(history)) > max(0, room):
        target = max(1, int(settings.truncation_ratio * length))
        sinks = min(settings.sink_tokens, length)
        view = Discardable(history.token_ids, history.parts, length - max(0, room), target, sinks)
        ranges = merged(chosen(view), length)
        if not ranges:  # it would drop nothing, and nothing would ever fit
            ranges, fallback = oldest(view), True
        history = history.without(ranges, settings.truncation, prefix_tokens)
    if len(history) == whole:
        return history, None
    note = f"history truncated: {whole - len(history)} of {whole} tokens dropped"
    return history, note + ("; the discarding list dropped too few, so the oldest went" if fallback else "")


__all__ = ["Discard", "Discardable", "TDLS", "find", "fitted", "keep_dialogue", "merged", "oldest"]
