"""Truncation: which tokens of a history are dropped when a prompt would overflow the context (CachedAttention 3.4).

A token discarding list (TDL) chooses ranges of tokens; `History.without` edits the history. Nothing is loaded or
computed here: the KV that is kept is rotated to its new positions when it is read.
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
    parts: tuple[Part, ...]  # the same tokens, by kind, in order
    needed: int  # tokens that must be dropped for the prompt to fit
    target: int  # tokens to drop by the truncation ratio
    sink_tokens: int  # the first tokens, the attention sinks, which should stay

    def spans(self) -> Iterator[tuple[int, int, Part]]:
        """Start, stop and part, in order."""
        at = 0
        for part in self.parts:
            yield at, at + len(part), part
            at += len(part)


Discard = Callable[[Discardable], Iterable[tuple[int, int]]]


def oldest(view: Discardable) -> list[tuple[int, int]]:
    """The oldest `target` tokens behind the sinks; of the sinks only if nothing else is left."""
    return list(_oldest_behind((), view, view.target))


def keep_dialogue(view: Discardable) -> list[tuple[int, int]]:
    """The documents of past turns, oldest turn first, up to `target` tokens; then the oldest tokens."""
    ranges: list[tuple[int, int]] = []
    dropped, turn = 0, -1
    for start, stop, part in view.spans():
        if part.kind is not PartKind.CHUNK or stop <= view.sink_tokens:
            continue
        if dropped >= view.target and part.turn != turn:  # the documents of one turn are dropped together
            break
        turn = part.turn
        ranges.append((max(start, view.sink_tokens), stop))
        dropped += stop - max(start, view.sink_tokens)
    if dropped >= view.needed:
        return ranges
    left = len(view.token_ids) - dropped
    share = view.target / max(1, len(view.token_ids))
    return ranges + list(_oldest_behind(ranges, view, max(1, int(share * left))))


def _oldest_behind(dropped: Ranges, view: Discardable, count: int) -> Iterator[tuple[int, int]]:
    """The oldest `count` tokens behind the sinks that are not in `dropped`."""
    at = view.sink_tokens if len(view.token_ids) > view.sink_tokens else 0
    for start, stop in (*dropped, (len(view.token_ids),) * 2):
        take = min(count, max(0, start - at))
        if take:
            yield at, at + take
        count, at = count - take, max(at, stop)


TDLS: dict[str, Discard] = {"oldest": oldest, "keep-dialogue": keep_dialogue}


def find(discard: str | Discard) -> Discard:
    """A TDL by its name, or the callable itself. Raises `ConfigError` for an unknown name."""
    if callable(discard):
        return discard
    if discard not in TDLS:
        raise ConfigError(f"Unknown discarding list {discard!r}. Known: {', '.join(TDLS)}, or a callable.")
    return TDLS[discard]


def merged(ranges: Iterable[tuple[int, int]], length: int) -> Ranges:
    """The ranges, ascending and disjoint. Raises `InputError` for a range outside a history of `length` tokens."""
    checked = []
    for given in ranges:
        try:
            start, stop = given
            valid = int(start) == start and int(stop) == stop and 0 <= start <= stop <= length
        except (TypeError, ValueError):
            valid = False
        if not valid:
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


def discardable(history: History, needed: int, settings: SessionConfig) -> Discardable:
    """What a TDL sees of `history` when `needed` tokens must be dropped."""
    target = max(int(settings.truncation_ratio * len(history)), 1 if needed else 0)
    sinks = min(settings.sink_tokens, len(history))
    return Discardable(history.token_ids, history.parts, needed, target, sinks)


def fitted(
    history: History, headroom: int, settings: SessionConfig, discard: str | Discard
) -> tuple[History, str | None]:
    """The history cut to at most `headroom` tokens, or to none, and a note for the report if it was cut."""
    whole, chosen, fallback = len(history), find(discard), False
    while (length := len(history)) > max(0, headroom):
        view = discardable(history, length - max(0, headroom), settings)
        ranges = merged(chosen(view), length)
        if not ranges:  # the list drops nothing, so the prompt would never fit
            ranges, fallback = oldest(view), True
        history = history.without(ranges, settings.truncation)
    if len(history) == whole:
        return history, None
    note = f"history truncated: {whole - len(history)} of {whole} tokens dropped"
    return history, note + ("; the discarding list dropped too few, so the oldest were dropped" if fallback else "")
