"""Manifests: what a conversation consists of, saved durably. Its KV is in the store, found by the blocks' keys.

A session has one file of three lines of JSON: format, version and checksum; a summary, the only line that is read when
an engine opens; the blocks with their token ids, the turns and the history. The file is written under another name,
synced and renamed, so a kill leaves either the previous manifest or this one. It has the token ids, so a block that the
store lost costs computing its tokens and never the conversation. A file that cannot be read is moved aside and never
overwritten. The manifest of another model has another name.
"""

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from ragkv.prompt.history import Block, Conversation, History, Part, PartKind, PastTurn
from ragkv.runtime import make_private_folder, replace_file, sync
from ragkv.store import EntryKey, Identity

log = logging.getLogger(__name__)

FORMAT = "ragkv-session"
VERSION = 1
# What `decode` and `Summary.from_json` raise for bytes that are no manifest.
NOT_A_MANIFEST = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True)
class Summary:
    """What is known of a session without reading its token ids."""

    session_id: str
    turns: int
    tokens: int
    used_at: float  # seconds since the epoch
    ttl_s: float | None
    keys: tuple[EntryKey, ...]  # of the blocks of its history, each once
    key_tokens: tuple[int, ...]  # tokens of each block
    title: str = ""

    @classmethod
    def of(cls, session_id: str, conversation: Conversation, base: Identity) -> "Summary":
        """The summary of a conversation; `base` is the engine's identity."""
        history = conversation.history
        keys = {block.key(base): len(block.token_ids) for block in history.blocks}
        turns, used_at, ttl_s = len(conversation.turns), conversation.used_at, conversation.ttl_s
        sizes, title = tuple(keys.values()), conversation.title
        return cls(session_id, turns, len(history), used_at, ttl_s, tuple(keys), sizes, title)

    @classmethod
    def from_json(cls, line: str | bytes) -> "Summary":
        """Inverse of `to_json`; raises one of `NOT_A_MANIFEST` on anything else."""
        values = json.loads(line)
        keys = tuple(EntryKey.from_text(text) for text in values["keys"])
        found = cls(**{**values, "keys": keys, "key_tokens": tuple(values["key_tokens"])})
        numbers = (found.turns, found.tokens, found.used_at, *found.key_tokens)
        found.session_id.encode()  # half of a surrogate pair could not be sent to anyone
        is_one = isinstance(found.session_id, str) and None not in keys
        if not is_one or not all(isinstance(number, int | float) for number in numbers):
            raise ValueError("its fields have other types")
        if len(found.keys) != len(found.key_tokens):
            raise ValueError("its keys and their tokens differ in number")
        return found

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps({**asdict(self), "keys": [key.to_text() for key in self.keys]})


class Manifests:
    """The manifests of one engine, under `conversations/` of its store's directory."""

    def __init__(self, directory: str | Path, base: Identity) -> None:
        """`base` is the engine's identity. Its context does not count: only another model makes ids and KV useless."""
        self._folder = Path(directory) / "sessions"
        self._base = base
        model = replace(base, context="").to_json()
        self._other_models: set[str] = set()  # hashed ids of other models' conversations, as `summaries` found them
        self._model_digest = hashlib.blake2b(model.encode(), digest_size=8).hexdigest()

    def summaries(self) -> Iterator[Summary]:
        """The summaries of all sessions of this engine. Temporary files of a killed process are deleted."""
        with contextlib.suppress(OSError):
            for orphan in self._folder.glob("*.tmp"):
                orphan.unlink()
        self._other_models.clear()
        for path in sorted(self._folder.glob("*-*.json")):
            hashed, _, digest = path.stem.partition("-")
            if digest != self._model_digest:
                self._other_models.add(hashed)
                continue
            try:
                with path.open(encoding="utf-8") as file:
                    header, summary = json.loads(file.readline()), file.readline()
                if header["version"] == VERSION:
                    yield Summary.from_json(summary)
            except (OSError, *NOT_A_MANIFEST):
                continue  # `load` reports it to the caller that asks for this session

    def load(self, session_id: str) -> tuple[Conversation | None, str | None]:
        """The conversation, or `None`; and a note for its next report, or `None`."""
        path = self._path(session_id)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            other = _hashed(session_id) in self._other_models
            return None, "the conversation of that id is another model's: this one starts empty" if other else None
        except OSError as error:
            log.warning("The manifest %s cannot be read: %s. Its conversation starts empty.", path, error)
            return None, f"the conversation could not be read ({error.strerror}): it starts empty"
        try:
            return decode(session_id, data, self._base), None
        except ManifestVersionError as error:
            why, suffix = f"is of version {error}", "other-version"
        except NOT_A_MANIFEST as error:
            why, suffix = f"is damaged ({error})", "damaged"
        log.warning("The manifest %s %s. It was moved aside; its conversation starts empty.", path, why)
        with contextlib.suppress(OSError):
            path.replace(path.with_suffix(f".{suffix}"))
        return None, f"the conversation's manifest {why}: it starts empty"

    def save(self, session_id: str, conversation: Conversation) -> None:
        """Save a conversation durably. Raises `OSError` and leaves the previous manifest if that fails."""
        data = encode(Summary.of(session_id, conversation, self._base), conversation, self._base)
        make_private_folder(self._folder)
        replace_file(self._path(session_id), data)

    def delete(self, session_id: str) -> None:
        """Delete a conversation's manifest, if there is one. Raises `OSError` if the system refuses."""
        with contextlib.suppress(FileNotFoundError):
            self._path(session_id).unlink()
            sync(self._folder)

    def _path(self, session_id: str) -> Path:
        return self._folder / f"{_hashed(session_id)}-{self._model_digest}.json"


class ManifestVersionError(Exception):
    """A manifest has a version that this code does not read. The argument is that version."""


def encode(summary: Summary, conversation: Conversation, base: Identity, secret: str | None = None) -> bytes:
    """A manifest's three lines. With a `secret` the checksum proves that the writer knows it."""
    rows: dict[EntryKey, int] = {}  # row in the table, by the block's key: each entry is written once
    table: list[Any] = []
    histories: list[Any] = []
    before = History()
    for history in (*(turn.began for turn in conversation.turns), conversation.history):
        same_blocks = _common(before.blocks, history.blocks)
        new_blocks = []
        for block in history.blocks[same_blocks:]:
            key = block.key(base)
            if key not in rows:
                rows[key] = len(table)
                row = [block.context, block.prefix_digest, block.frequencies, block.token_ids, block.index]
                table.append([*row, True] if block.fused else row)
            new_blocks.append([rows[key], block.start, block.stop, block.rotated_from])
        same_parts = _common(before.parts, history.parts)
        new_parts = [[part.kind.value, part.tokens, part.turn, part.source] for part in history.parts[same_parts:]]
        histories.append([same_blocks, new_blocks, history.tail, same_parts, new_parts])
        before = history
    body = {
        "identity": replace(base, context="").to_json(),
        "created_at": conversation.created_at,
        "turns": [turn.at for turn in conversation.turns],
        "blocks": table,
        "histories": histories,  # at the start of each turn, then the current one; each as a change of the previous one
    }
    rest = f"{summary.to_json()}\n{json.dumps(body, separators=(',', ':'))}\n".encode()
    header = {"format": FORMAT, "version": VERSION, "checksum": _checksum(rest, secret)}
    return f"{json.dumps(header)}\n".encode() + rest


def decode(session_id: str, data: bytes, base: Identity, secret: str | None = None) -> Conversation:
    """Inverse of `encode`.

    Raises `ManifestVersionError`; and one of `NOT_A_MANIFEST` if `data` is no manifest of this session, of this model
    and of this tenant.
    """
    first, _, rest = data.partition(b"\n")
    header = json.loads(first)
    if header["format"] != FORMAT:
        raise ValueError("it is no manifest")
    if header["version"] != VERSION:
        raise ManifestVersionError(header["version"])
    if header["checksum"] != _checksum(rest, secret):
        raise ValueError("its checksum does not match")
    summary, body = map(json.loads, rest.splitlines())
    if summary["session_id"] != session_id:
        raise ValueError("it is of another session")
    if body["identity"] != replace(base, context="").to_json():
        raise ValueError("it is of another tenant or model")
    table: list[Any] = [
        ((context, prefix, frequencies, tuple(ids), index), bool(fused))
        for context, prefix, frequencies, ids, index, *fused in body["blocks"]
    ]
    histories, before = [], History()
    for same_blocks, new_blocks, tail, same_parts, new_parts in body["histories"]:
        blocks = (replace(Block(*table[row][0], *place), fused=table[row][1]) for row, *place in new_blocks)
        parts = (Part(PartKind(kind), tokens, turn, source) for kind, tokens, turn, source in new_parts)
        before = History((*before.blocks[:same_blocks], *blocks), tuple(tail), (*before.parts[:same_parts], *parts))
        histories.append(before)
    turns = tuple(PastTurn(began, at) for began, at in zip(histories[:-1], body["turns"], strict=True))
    created_at, used_at, ttl_s, title = (
        body["created_at"],
        summary["used_at"],
        summary["ttl_s"],
        summary.get("title", ""),
    )
    return Conversation(turns, histories[-1], created_at, used_at, ttl_s, title)


def _common(one: tuple[Any, ...], other: tuple[Any, ...]) -> int:
    """How many elements both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _hashed(session_id: str) -> str:
    return hashlib.blake2b(session_id.encode(), digest_size=16).hexdigest()


def _checksum(data: bytes, secret: str | None = None) -> str:
    key = b"" if secret is None else hashlib.blake2b(secret.encode(), digest_size=32).digest()
    return hashlib.blake2b(data, digest_size=16, key=key).hexdigest()


__all__ = ["NOT_A_MANIFEST", "Manifests", "ManifestVersionError", "Summary", "decode", "encode"]
