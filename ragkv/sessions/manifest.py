"""A manifest is the durable state of a conversation. Its KV is in the store, under the keys of its
blocks.

A manifest is three lines of JSON. The first has format, version and checksum. The second is a
summary, the only line that is read when an engine opens. The third has the turns, the history, and
the blocks with their token ids. So if the store loses a block, its tokens are computed again, and
the conversation is kept. `folder_storage.py` has one file a session.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Any

from ragkv.prompt.history import Block, History, Part, PartKind, PastTurn, SessionState
from ragkv.store.entry import EntryKey, Identity

FORMAT = "ragkv-session"  # what every manifest says of itself
VERSION = 1  # the only one that is read
# What `state_of` and `Summary.from_json` raise for bytes that are no manifest.
NOT_A_MANIFEST = (
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
)


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
    title: str  # "": it has none

    @classmethod
    def of(cls, session_id: str, state: SessionState, base: Identity) -> "Summary":
        """The summary of a conversation; `base` is the engine's identity."""
        history = state.history
        keys = {block.key(base): len(block.token_ids) for block in history.blocks}
        turns = len(state.turns)
        used_at = state.used_at
        ttl_s = state.ttl_s
        sizes = tuple(keys.values())
        title = state.title
        return cls(session_id, turns, len(history), used_at, ttl_s, tuple(keys), sizes, title)

    @classmethod
    def from_json(cls, line: str | bytes) -> "Summary":
        """Inverse of `to_json`; raises one of `NOT_A_MANIFEST` on anything else."""
        values = json.loads(line)
        keys = tuple(EntryKey.from_text(text) for text in values["keys"])
        found = cls(**{**values, "keys": keys, "key_tokens": tuple(values["key_tokens"])})
        numbers = (found.turns, found.tokens, found.used_at, found.ttl_s or 0, *found.key_tokens)
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


class ManifestVersionError(Exception):
    """A manifest has a version that this code does not read. The argument is that version."""


def manifest_of(
    summary: Summary, state: SessionState, base: Identity, secret: str | None = None
) -> bytes:
    """A manifest's three lines. With a `secret` the checksum proves that the writer knows it."""
    # row in the table, by the block's key: each entry is written once
    rows: dict[EntryKey, int] = {}
    table: list[Any] = []
    histories: list[Any] = []
    before = History()
    kept = [turn.began for turn in state.turns if turn.began is not None]
    for history in (*kept, state.history):
        same_blocks = _common(before.blocks, history.blocks)
        new_blocks = []
        for block in history.blocks[same_blocks:]:
            key = block.key(base)
            if key not in rows:
                rows[key] = len(table)
                row = [
                    block.seen_digest,
                    block.prefix_digest,
                    block.rope_digest,
                    block.token_ids,
                    block.index,
                ]
                table.append([*row, True] if block.fused else row)
            new_blocks.append([rows[key], block.start, block.stop])
        same_parts = _common(before.parts, history.parts)
        new_parts = [
            # the fourth was a document, which nothing reads
            [part.kind.value, part.tokens, part.turn, ""]
            for part in history.parts[same_parts:]
        ]
        histories.append([same_blocks, new_blocks, history.tail, same_parts, new_parts])
        before = history
    body = {
        "identity": replace(base, seen_digest="").to_json(),
        "created_at": state.created_at,
        "turns": [turn.at for turn in state.turns],
        "blocks": table,
        # at the start of each of the last turns, then the current one; each as a change of the
        # previous one
        "histories": histories,
    }
    rest = f"{summary.to_json()}\n{json.dumps(body, separators=(',', ':'))}\n".encode()
    header = {"format": FORMAT, "version": VERSION, "checksum": _checksum(rest, secret)}
    return f"{json.dumps(header)}\n".encode() + rest


def state_of(
    session_id: str, data: bytes, base: Identity, secret: str | None = None
) -> SessionState:
    """Inverse of `manifest_of`.

    Raises `ManifestVersionError`; and one of `NOT_A_MANIFEST` if `data` is no manifest of this
    session, of this model and of this tenant.
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
    if body["identity"] != replace(base, seen_digest="").to_json():
        raise ValueError("it is of another tenant or model")
    table: list[Any] = [
        ((seen_digest, prefix, rope_digest, tuple(ids), index), bool(fused))
        for seen_digest, prefix, rope_digest, ids, index, *fused in body["blocks"]
    ]
    histories = []
    before = History()
    for same_blocks, new_blocks, tail, same_parts, new_parts in body["histories"]:
        # An earlier version wrote a fourth number.
        blocks = [
            replace(Block(*table[row][0], *place[:2]), fused=table[row][1])
            for row, *place in new_blocks
        ]
        if any(not 0 <= one.start <= one.stop <= len(one.token_ids) for one in blocks):
            raise ValueError("a block lies outside its entry")
        parts = (Part(PartKind(kind), tokens, turn) for kind, tokens, turn, _ in new_parts)
        before = History(
            (*before.blocks[:same_blocks], *blocks),
            tuple(tail),
            (*before.parts[:same_parts], *parts),
        )
        histories.append(before)
    # The oldest turns have no history any more.
    forgotten = [None] * (len(body["turns"]) - len(histories[:-1]))
    began = (*forgotten, *histories[:-1])
    turns = tuple(PastTurn(*turn) for turn in zip(began, body["turns"], strict=True))
    used_at = summary["used_at"]
    ttl_s = summary["ttl_s"]
    title = summary["title"]
    return SessionState(turns, histories[-1], body["created_at"], used_at, ttl_s, title)


def _common(one: tuple[Any, ...], other: tuple[Any, ...]) -> int:
    """How many elements both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _checksum(data: bytes, secret: str | None = None) -> str:
    key = b"" if secret is None else hashlib.blake2b(secret.encode(), digest_size=32).digest()
    return hashlib.blake2b(data, digest_size=16, key=key).hexdigest()
