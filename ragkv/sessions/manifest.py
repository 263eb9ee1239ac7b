"""Manifests: what a conversation consists of, durable. The KV itself lies in the store, found by the blocks' keys.

One file a session, three lines of JSON: format, version and checksum; a summary, which alone is read at open; the
blocks with their ids, the turns and the history. It is written apart, synced and renamed, so a kill leaves the one
before or this one. Ids are in it, so a block the store lost costs computing its tokens, never the conversation. A file
that cannot be read is moved aside, never overwritten; that of another model has another name.
"""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from ragkv.history import Block, Conversation, History, Part, PartKind, PastTurn
from ragkv.store import Identity

log = logging.getLogger(__name__)

FORMAT = "ragkv-session"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Summary:
    """What is known of a session without reading its ids."""

    session_id: str
    turns: int
    tokens: int
    used_at: float  # seconds since the epoch
    ttl_s: float | None
    keys: tuple[str, ...]  # of the blocks of its history, each once
    key_tokens: tuple[int, ...]  # tokens of each

    @classmethod
    def of(cls, session_id: str, conversation: Conversation, base: Identity) -> "Summary":
        """The summary of a conversation; `base` is the engine's identity."""
        history = conversation.history
        keys = {block.key(base): len(block.token_ids) for block in history.blocks}
        turns, used_at, ttl_s = len(conversation.turns), conversation.used_at, conversation.ttl_s
        return cls(session_id, turns, len(history), used_at, ttl_s, tuple(keys), tuple(keys.values()))

    @classmethod
    def from_json(cls, line: str | bytes) -> "Summary":
        """Inverse of `to_json`; raises `ValueError`, `KeyError` or `TypeError` on anything else."""
        values = json.loads(line)
        return cls(**{**values, **{name: tuple(values[name]) for name in ("keys", "key_tokens")}})

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))


class Manifests:
    """The manifests of one engine, under `sessions/` of its store's directory."""

    def __init__(self, directory: str | Path, base: Identity) -> None:
        """`base` is the engine's identity, whatever its context: ids and KV of another model mean nothing here."""
        self._folder = Path(directory) / "sessions"
        self._base = base
        whose = replace(base, context="").to_json()
        self._whose = hashlib.blake2b(whose.encode(), digest_size=8).hexdigest()

    def summaries(self) -> Iterator[Summary]:
        """Those of all sessions of this engine, and what a killed writer left is swept."""
        with contextlib.suppress(OSError):
            for orphan in self._folder.glob("*.tmp"):
                orphan.unlink()
        for path in sorted(self._folder.glob(f"*-{self._whose}.json")):
            try:
                with path.open(encoding="utf-8") as file:
                    head, summary = json.loads(file.readline()), file.readline()
                if head["version"] == VERSION:
                    yield Summary.from_json(summary)
            except (OSError, ValueError, KeyError, TypeError):
                continue  # whoever asks for that session is told

    def load(self, session_id: str) -> tuple[Conversation | None, str | None]:
        """The conversation, or `None`, and what its next report should say."""
        path = self._path(session_id)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            others = list(self._folder.glob(f"{_name(session_id)}-*.json"))
            return None, "the conversation of that id is another model's: this one starts empty" if others else None
        except OSError as error:
            log.warning("The manifest %s cannot be read: %s. Its conversation starts empty.", path, error)
            return None, f"the conversation could not be read ({error.strerror}): it starts empty"
        try:
            return decoded(session_id, data), None
        except OtherVersionError as error:
            why, aside = f"is of version {error}", "other-version"
        except (ValueError, KeyError, TypeError, IndexError) as error:
            why, aside = f"is damaged ({error})", "damaged"
        log.warning("The manifest %s %s. It was moved aside; its conversation starts empty.", path, why)
        with contextlib.suppress(OSError):
            path.replace(path.with_suffix(f".{aside}"))
        return None, f"the conversation's manifest {why}: it starts empty"

    def save(self, session_id: str, conversation: Conversation) -> None:
        """Write a conversation down, durably. Raises `OSError`, leaving the one before."""
        data = encoded(Summary.of(session_id, conversation, self._base), conversation, self._base)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        path = self._path(session_id)
        draft = path.with_suffix(".tmp")
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
                os.fsync(fd)
            finally:
                os.close(fd)
            draft.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise
        self._sync()

    def delete(self, session_id: str) -> None:
        """Remove a conversation's manifest, if there is one. Raises `OSError` if refused."""
        with contextlib.suppress(FileNotFoundError):
            self._path(session_id).unlink()
            self._sync()

    def _path(self, session_id: str) -> Path:
        return self._folder / f"{_name(session_id)}-{self._whose}.json"

    def _sync(self) -> None:
        fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class OtherVersionError(Exception):
    """A manifest is of a version that this code does not read; its argument."""


def _name(session_id: str) -> str:
    return hashlib.blake2b(session_id.encode(), digest_size=16).hexdigest()


def encoded(summary: Summary, conversation: Conversation, base: Identity, secret: str | None = None) -> bytes:
    """A manifest's three lines; with a `secret`, only who knows it can have written them."""
    blocks: dict[str, int] = {}  # each entry once, by its key
    table: list[Any] = []
    histories: list[Any] = []
    before = History()
    for history in (*(turn.began for turn in conversation.turns), conversation.history):
        same = _common(before.blocks, history.blocks)
        places = []
        for block in history.blocks[same:]:
            key = block.key(base)
            if key not in blocks:
                blocks[key] = len(table)
                table.append([block.context, block.behind, block.frequencies, block.token_ids, block.index])
            places.append([blocks[key], block.start, block.stop, block.rotated_from])
        parts = _common(before.parts, history.parts)
        said = [[part.kind.value, part.tokens, part.turn, part.source] for part in history.parts[parts:]]
        histories.append([same, places, history.tail, parts, said])
        before = history
    body = {
        "identity": replace(base, context="").to_json(),
        "created_at": conversation.created_at,
        "turns": [turn.at for turn in conversation.turns],
        "blocks": table,
        "histories": histories,  # what each turn began with, then the current one; each beside the one before
    }
    rest = f"{summary.to_json()}\n{json.dumps(body, separators=(',', ':'))}\n".encode()
    head = {"format": FORMAT, "version": VERSION, "checksum": _checksum(rest, secret)}
    return f"{json.dumps(head)}\n".encode() + rest


def decoded(session_id: str, data: bytes, secret: str | None = None) -> Conversation:
    """Inverse of `encoded`.

    Raises `OtherVersionError`, or `ValueError` and its like for anything that is no manifest of this session.
    """
    first, _, rest = data.partition(b"\n")
    head = json.loads(first)
    if head["format"] != FORMAT:
        raise ValueError("it is no manifest")
    if head["version"] != VERSION:
        raise OtherVersionError(head["version"])
    if head["checksum"] != _checksum(rest, secret):
        raise ValueError("its checksum does not match")
    summary, body = map(json.loads, rest.splitlines())
    if summary["session_id"] != session_id:
        raise ValueError("it is of another session")
    table: list[Any] = [(saw, behind, turns, tuple(ids), index) for saw, behind, turns, ids, index in body["blocks"]]
    histories, before = [], History()
    for same, places, tail, parts, said in body["histories"]:
        blocks = (Block(*table[place[0]], *place[1:]) for place in places)  # as `encoded` laid them down
        kinds = (Part(PartKind(kind), tokens, turn, source) for kind, tokens, turn, source in said)
        before = History((*before.blocks[:same], *blocks), tuple(tail), (*before.parts[:parts], *kinds))
        histories.append(before)
    turns = tuple(PastTurn(began, at) for began, at in zip(histories[:-1], body["turns"], strict=True))
    return Conversation(turns, histories[-1], body["created_at"], summary["used_at"], summary["ttl_s"])


def _common(one: tuple[Any, ...], other: tuple[Any, ...]) -> int:
    """How many elements both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _checksum(data: bytes, secret: str | None = None) -> str:
    key = b"" if secret is None else hashlib.blake2b(secret.encode(), digest_size=32).digest()
    return hashlib.blake2b(data, digest_size=16, key=key).hexdigest()


__all__ = ["Manifests", "OtherVersionError", "Summary", "decoded", "encoded"]
