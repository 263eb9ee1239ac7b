"""Truncation: which tokens of a history are dropped when a prompt would overflow the context
(CachedAttention 3.4).

A token discarding list (TDL) chooses ranges of tokens; `History.without` edits the history. Nothing
is loaded or computed here: the KV that is kept is rotated to its new positions when it is read.
"""

from collections.abc import Iterable, Iterator
from pkgutil import resolve_name
from typing import NamedTuple

from ragkv.config import SessionConfig
from ragkv.errors import ConfigError, InputError
from ragkv.registry import DISCARDING_LISTS

from .history import History, PartKind, Ranges

# the share of a history that is dropped at a time when a prompt would overflow the context
TRUNCATION_RATIO = 0.5


class View(NamedTuple):
    """A history as a TDL sees it."""

    history: History
    needed: int  # tokens that must be dropped for the prompt to fit
    target: int  # tokens to drop by the truncation ratio
    sink_tokens: int  # the first tokens, the attention sinks, which should stay


def oldest(view: View) -> list[tuple[int, int]]:
    """The oldest `target` tokens behind the sinks; of the sinks only if nothing else is left."""
    return list(_oldest_behind((), view, view.target))


def keep_dialogue(view: View) -> list[tuple[int, int]]:
    """The documents of past turns, oldest turn first, up to `target` tokens; then the oldest
    tokens.
    """
    ranges: list[tuple[int, int]] = []
    dropped = 0
    turn = -1
    stop = 0
    for part in view.history.parts:
        start = stop
        stop = stop + len(part)
        if part.kind is not PartKind.CHUNK or stop <= view.sink_tokens:
            continue
        # the documents of one turn are dropped together
        if dropped >= view.target and part.turn != turn:
            break
        turn = part.turn
        ranges.append((max(start, view.sink_tokens), stop))
        dropped += stop - max(start, view.sink_tokens)
    if dropped >= view.needed:
        return ranges
    left = len(view.history) - dropped
    share = view.target / max(1, len(view.history))
    return ranges + list(_oldest_behind(ranges, view, max(1, int(share * left))))


def _oldest_behind(dropped: Ranges, view: View, count: int) -> Iterator[tuple[int, int]]:
    """The oldest `count` tokens behind the sinks that are not in `dropped`."""
    at = view.sink_tokens if len(view.history) > view.sink_tokens else 0
    for start, stop in (*dropped, (len(view.history),) * 2):
        take = min(count, max(0, start - at))
        if take:
            yield at, at + take
        count = count - take
        at = max(at, stop)


def _discarded(history: History, needed: int, settings: SessionConfig) -> Ranges:
    """What the settings' TDL drops of `history` when `needed` tokens must go."""
    target = max(int(TRUNCATION_RATIO * len(history)), 1 if needed else 0)
    sinks = min(settings.sink_tokens, len(history))
    discard = resolve_name(DISCARDING_LISTS[settings.discard])
    return merged(discard(View(history, needed, target, sinks)), len(history))


def merged(ranges: Iterable[tuple[int, int]], length: int) -> Ranges:
    """The ranges, ascending and disjoint. Raises `InputError` for a range outside a history of
    `length` tokens.
    """
    checked = []
    for given in ranges:
        try:
            start, stop = given
            valid = int(start) == start and int(stop) == stop and 0 <= start <= stop <= length
        except (TypeError, ValueError):
            valid = False
        if not valid:
            raise InputError(
                f"{given!r:.80} is no range (start, stop) of a history of {length} tokens."
            )
        if start < stop:
            checked.append((int(start), int(stop)))
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(checked):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def fitted(history: History, room: int, settings: SessionConfig) -> tuple[History, str | None]:
    """The history cut to at most `room` tokens, or to none, and a note for the report if it was
    cut.

    Raises `ConfigError` for a discarding list that drops nothing.
    """
    whole = len(history)
    room = max(0, room)
    while (length := len(history)) > room:
        history = history.without(_discarded(history, length - room, settings))
        if len(history) == length:
            raise ConfigError(
                f"The discarding list {settings.discard!r} dropped nothing of a history of {length} "
                f"tokens, of which at most {room} fit. It must drop at least one."
            )
    if len(history) == whole:
        return history, None
    return history, f"history truncated: {whole - len(history)} of {whole} tokens dropped"
