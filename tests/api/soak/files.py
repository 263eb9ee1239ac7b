"""Documents to upload: each holds one word that no other text holds, as text, HTML, PDF, JSON lines or JSON."""

import json
import random
from dataclasses import dataclass
from typing import Any

from tests.api.attacks.uploads import FORM_TYPE, form, pages_pdf, stream

LETTERS = "bcdfghjklmnpqrstvz"  # of the words
KINDS = ("txt", "md", "html", "pdf", "jsonl", "json")
FILLER = "the harbour was built by people of the town and every visitor of the festival travels over the old bridge"


@dataclass(frozen=True, slots=True)
class Stored:
    """A document, and the word that only its text holds."""

    id: str
    name: str  # in the text and in questions about it
    word: str

    @property
    def text(self) -> str:
        return f"The code word of {self.name} is {self.word}. {FILLER.capitalize()}."

    @property
    def question(self) -> str:
        return f"What is the code word of {self.name}?"


def new_document(rng: random.Random, name: str, kind: str) -> Stored:
    """A document of that kind with a new word."""
    return Stored(f"{name}.{kind}", f"{name}x", "w" + "".join(rng.choices(LETTERS, k=12)))


def upload(documents: list[Stored], kind: str) -> dict[str, Any]:
    """The request's arguments that upload documents of one kind."""
    if kind == "json":
        return {"json": {"documents": [{"id": one.id, "text": one.text} for one in documents]}}
    if kind == "jsonl":
        lines = [json.dumps({"id": one.id, "text": one.text}) for one in documents]
        files = [("lines.jsonl", "\n".join(lines).encode())]
    else:
        files = [(one.id, _file(one.text, kind)) for one in documents]
    return {"content": form(files), "headers": {"content-type": FORM_TYPE}}


def _file(text: str, kind: str) -> bytes:
    if kind == "html":
        return f"<html><body><h1>Words</h1><p>{text}</p></body></html>".encode()
    if kind == "pdf":
        return pages_pdf(1, stream(b"BT /F1 9 Tf 1 0 0 1 20 700 Tm (%s) Tj ET" % text.encode()))
    return text.encode()
