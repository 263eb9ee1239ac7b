"""The texts that one engine knows as chunks: ingested texts and passages of collections.

A known text is also found in a prompt that writes it in another way (`passage_matcher.py`). Texts
that come with a request are looked for in the request's own prompt only.

A *form* is a known passage as a prompt wrote it, stored as a chunk of its own. The passage that a
form came from is not recorded. So the deletion of any passage deletes all forms, which cost little
to encode again.
"""

import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ragkv.config import MIB
from ragkv.engine import Engine
from ragkv.entries import EncodeReport
from ragkv.errors import RagKVError
from ragkv.runtime import DAMAGED, ByteCache, begun, replace_file
from ragkv.types import Chunk

from .passage_matcher import MAX_FOUND, PassageMatcher, TextMatch, joined, key_of

log = logging.getLogger(__name__)

KEPT_BYTES = 8 * MIB  # of chunks that were found lately, which are not tokenized again
# When there are forms of more tokens, their KV is deleted with the next one.
MAX_TOKENS = 1_000_000
TOKEN_BYTES = 40  # what a token takes: its id in a tuple, and its characters
MAX_ALIKE = 100  # the most documents of one text that are remembered


@dataclass(frozen=True, slots=True)
class ChatDocument:
    """A document that came with a request or was ingested."""

    text: str
    metadata: Mapping[str, Any]
    token_ids: tuple[int, ...] = ()  # of a passage that was retrieved; (): not known


class ChunkCatalogue:
    """Chunks by their text."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.passages = PassageMatcher()
        self._forms = Forms(engine)
        self._chunks = ByteCache[str, Chunk](KEPT_BYTES)
        self._lock = threading.Lock()
        # by the words of their texts, the last registered at the end
        self._ingested: dict[str, list[ChatDocument]] = {}

    def ingest(self, documents: Iterable[ChatDocument], encode: bool = True) -> EncodeReport:
        """Register `documents` and, with `encode`, compute and store their KV. Returns when it is
        durable.
        """
        by_text = {document.text: document for document in documents if document.text}
        # raises before an invalid text is registered
        chunks = [self._engine.chunk(text) for text in by_text]
        report = self._engine.entries.encode(chunks) if encode else EncodeReport(0, 0, 0)
        self.register(by_text.values())
        return report

    def register(self, documents: Iterable[ChatDocument]) -> None:
        """Know `documents` until they are deleted. Their KV is stored already, or after the first
        cache miss.
        """
        added = _by_key(documents)
        self.passages.add(alike[-1].text for alike in added.values())
        with self._lock:
            for key, alike in added.items():
                known = [one for one in self._ingested.get(key, ()) if one not in alike]
                self._ingested[key] = [*known, *alike][-MAX_ALIKE:]

    def delete(self, texts: Iterable[str]) -> int:
        """Delete `texts` here, and their KV from every tier. Returns how many of them had KV
        stored.
        """
        gone = [text for text in dict.fromkeys(texts) if text]
        keys = [key_of(text) for text in gone]
        self.passages.forget(keys)
        self.delete_forms()
        with self._lock:
            for key in keys:
                self._ingested.pop(key, None)
        chunks = [self._engine.chunk(text) for text in gone]
        return self._engine.entries.delete(chunks) if chunks else 0

    def find(self, prompt: str, given: Iterable[str] = ()) -> list[TextMatch]:
        """The texts that are `given` with `prompt`, and the known ones between them, in order."""
        of_request = PassageMatcher()
        of_request.add(given)
        return joined(of_request.find(prompt), self.passages.find(prompt))[:MAX_FOUND]

    def encode_ingested(self) -> None:
        """Compute the KV of all ingested and registered texts that is not stored, between
        requests.
        """
        with self._lock:
            texts = {key: alike[-1].text for key, alike in self._ingested.items()}
        chunks = {key: self._engine.chunk(text) for key, text in texts.items()}
        with self._lock:  # a deletion deletes the text first, and then cancels what waits
            known = [chunk for key, chunk in chunks.items() if key in self._ingested]
            self._engine.entries.encode_soon(known, last=True)

    def documents_of(
        self, matches: Sequence[TextMatch], given: Iterable[ChatDocument]
    ) -> list[ChatDocument | None]:
        """The document of each match: one that is `given`, else a known one; `None`: a passage of
        which no more is known.

        Several documents may have the same text. The prompt's matches of that text then go to these
        documents in order. If there are fewer matches than documents, the last documents get them.
        """
        documents = _by_key(given)
        with self._lock:
            for match in matches:
                if match.key not in documents:
                    documents[match.key] = list(self._ingested.get(match.key, ()))
        found = list[ChatDocument | None]()
        for match in reversed(matches):
            alike = documents[match.key]
            found.append(alike.pop() if len(alike) > 1 else next(iter(alike), None))
        return found[::-1]

    def chunk(self, match: TextMatch, document: ChatDocument | None) -> Chunk:
        """The chunk of a text that was found in a prompt, and is of this document.

        If it is not the known text word for word, it is a form, whose KV is deleted with other
        forms.
        """
        metadata = {} if document is None else dict(document.metadata)
        if document is not None and document.token_ids and document.text == match.text:
            return Chunk(document.token_ids, match.text, metadata)
        if (chunk := self._chunks.get(match.text)) is None:
            chunk = self._engine.chunk(match.text)
            self._chunks.put(match.text, chunk, len(match.text) + TOKEN_BYTES * len(chunk))
        if not match.word_for_word:
            self._forms.add(chunk.token_ids)
        return Chunk(chunk.token_ids, match.text, metadata)

    def delete_forms(self) -> None:
        """Delete the KV of the forms in which passages stood in prompts."""
        self._forms.delete()
        self._chunks.clear()


class Forms:
    """The token ids of all forms, in a file next to the store, so that a restart forgets none."""

    def __init__(self, engine: Engine) -> None:
        store = engine.config.store
        directory = None if store.read_only else store.directory
        self._engine = engine
        self._path = None if directory is None else Path(directory) / forms_file(engine)
        self._lock = threading.Lock()  # never held while KV is deleted
        self._uses = 0  # of forms, since the start
        self._forms = dict.fromkeys(self._read(), 0)  # and the number of the last use of each
        self._tokens = sum(map(len, self._forms))
        self._trimming = False  # whether a thread deletes forms because they are too many

    def add(self, token_ids: tuple[int, ...]) -> None:
        """Remember a form before it is used. If there are too many, all others are deleted soon: no
        question waits for that.
        """
        with self._lock:
            others = dict(self._forms) if self._tokens > MAX_TOKENS and not self._trimming else {}
            is_new = token_ids not in self._forms
            self._uses += 1
            self._forms[token_ids] = self._uses
            if is_new:
                self._tokens += len(token_ids)
                if self._path is not None:
                    self._append(self._path, token_ids)
            others.pop(token_ids, None)
            self._trimming |= bool(others)
        if others:
            later = "the next form tries again"
            if begun(partial(self._trim, others), "ragkv-forms", later) is None:
                self._trimming = False

    def delete(self) -> None:
        """Delete the KV of all forms from every tier. An error leaves their names."""
        with self._lock:
            forms = dict(self._forms)
        self._delete(forms)

    def _delete(self, forms: Mapping[tuple[int, ...], int]) -> None:
        """Delete these forms; one that is used meanwhile keeps its name."""
        if not forms:
            return
        self._engine.entries.delete(list(forms))
        with self._lock:
            for token_ids, use in forms.items():
                if self._forms.get(token_ids) == use:
                    del self._forms[token_ids]
                    self._tokens -= len(token_ids)
            if self._path is not None:
                replace_file(self._path, *map(_line, self._forms))

    def _trim(self, forms: Mapping[tuple[int, ...], int]) -> None:
        try:
            self._delete(forms)
        except (RagKVError, OSError) as error:
            log.warning(
                "The KV of %d forms was not deleted (%s): the next form tries again.",
                len(forms),
                error,
            )
        finally:
            self._trimming = False

    @staticmethod
    def _append(path: Path, token_ids: tuple[int, ...]) -> None:
        try:
            with open(path, "ab+", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.seek(0, os.SEEK_END)
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":  # a kill or a full disk cut the last line
                        file.write(b"\n")
                file.write(_line(token_ids))
        except OSError as error:
            log.warning(
                "A form is not noted in %s (%s): after a restart its KV outlives its passage.",
                path,
                error,
            )

    def _read(self) -> list[tuple[int, ...]]:
        if self._path is None or not self._path.is_file():
            return []
        found = []
        for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(*DAMAGED):  # a kill may have cut the last line
                found.append(tuple(int(token) for token in json.loads(line)))
        return [ids for ids in found if ids]


def forms_file(engine: Engine) -> str:
    """The name of an engine's file: ids mean nothing to another model, tokenizer or prefix."""
    return f"forms-{engine.entries.encoder.identity.key(()).digest[:16]}.jsonl"


def _line(token_ids: tuple[int, ...]) -> bytes:
    """A form as the file has it."""
    return json.dumps(token_ids).encode() + b"\n"


def _by_key(documents: Iterable[ChatDocument]) -> dict[str, list[ChatDocument]]:
    """Documents by the words of their texts. Documents of the same text keep their order."""
    found: dict[str, list[ChatDocument]] = {}
    for document in documents:
        if document.text:
            found.setdefault(key_of(document.text), []).append(document)
    return found
