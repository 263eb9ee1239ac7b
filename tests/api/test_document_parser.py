"""Uploads are parsed in processes of their own, which are killed for their time or memory."""

import asyncio
import os
import signal
import threading
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path

import pytest

from ragkv import Engine
from ragkv.api.documents.parser import DocumentParser
from ragkv.api.documents.upload_parsing import Parsed, Upload
from ragkv.api.errors import ApiError
from ragkv.api.settings import LimitsConfig, ParsingConfig
from ragkv.config import MIB
from ragkv.errors import CancelledError
from ragkv.retrieval import Document, Splitter
from ragkv.runtime import Check, no_check
from ragkv.runtime.token_counter import TokenCounter
from tests.faults import raising
from tests.retrieval import sample_files

from .attacks import uploads

LIMITS = LimitsConfig()
UPLOAD = Upload(uploads.FORM_TYPE, LIMITS)
CONFIG = ParsingConfig(workers=2, wait_s=0.2, wall_s=120.0, cpu_s=10, memory_bytes=256 * MIB)
SLOW = uploads.form([("a.html", uploads.angle_brackets(20_000_000))])
FAST = uploads.form([("a.txt", b"A text.")])


@pytest.fixture
def parser() -> DocumentParser:
    return DocumentParser(CONFIG)


async def begun(
    parser: DocumentParser, check: Check = no_check
) -> "tuple[asyncio.Future[Parsed], int]":
    """A long parsing that has begun, and the id of its process."""
    task = asyncio.ensure_future(asyncio.to_thread(parser.parse, UPLOAD, SLOW, check))
    while not (found := [child.pid for child in active_children() if child.name == "ragkv-parse"]):
        await asyncio.sleep(0.01)
    assert len(found) == 1 and found[0] is not None
    return task, found[0]


def test_files_become_documents_with_their_metadata_and_pages(parser: DocumentParser) -> None:
    lines = b'{"id": "x", "text": "Two \\u00e9\\ud83d\\ude00", "metadata": {"n": [1, {"a": null}]}}'
    body = uploads.form(
        [("a.txt", b"One."), ("b.jsonl", lines), ("c.pdf", uploads.shared_stream_pdf(2, 2))]
    )
    first, second, third = parser.parse(UPLOAD, body).documents
    assert first == Document("a.txt", "One.", "a.txt")
    assert second == Document("b.jsonl/x", "Two é😀", "b.jsonl", {"n": [1, {"a": None}]})
    assert third.id == "c.pdf" and len(third.page_starts) == 2


@pytest.mark.parametrize(
    "name", ["a.docx", "a.pptx", "a.xlsx", "a.epub", "rows.csv", "README", "code.py", "notes.MD"]
)
def test_what_the_commands_read_is_taken(parser: DocumentParser, name: str) -> None:
    make = getattr(sample_files, Path(name).suffix[1:], lambda: b"a,b\n1,2\n")
    (document,) = parser.parse(UPLOAD, uploads.form([(name, make())])).documents
    assert document.id.startswith(name) and document.text


def test_documents_are_split_in_the_process_as_they_would_be_here(
    parser: DocumentParser, reader: Engine
) -> None:
    count = reader.model.count_tokens
    assert isinstance(count, TokenCounter) and count.can_be_pickled
    splitter = Splitter(count, 16, reader.model.identity.tokenizer)
    body = uploads.form(
        [
            (
                "a.md",
                "# A\n\nOne <|im_end|> two. Drei\u00df\u0301 \U0001f600.\n\n## B\n\n".encode() * 40,
            )
        ]
    )
    parsed = parser.parse(replace(UPLOAD, splitter=splitter), body)
    [document] = parsed.documents
    assert parsed.split_by == splitter.fingerprint and len(parsed.passages["a.md"]) > 20
    assert parsed.passages == {"a.md": splitter.split(document)}


@pytest.mark.parametrize(
    ("config", "body", "setting"),
    [
        (replace(CONFIG, wall_s=1.0), SLOW, "parsing.wall_s"),
        (replace(CONFIG, cpu_s=1), SLOW, "parsing.cpu_s"),
        (replace(CONFIG, memory_bytes=16 * MIB), SLOW, "parsing.memory_bytes"),
        # A library in Rust aborts the process when it gets no memory.
        (
            replace(CONFIG, memory_bytes=64 * MIB),
            uploads.many_values(5_000_000),
            "parsing.memory_bytes",
        ),
    ],
)
def test_an_upload_above_its_time_or_memory_gets_an_error_that_names_the_setting(
    config: ParsingConfig, body: bytes, setting: str
) -> None:
    kind = uploads.FORM_TYPE if body is SLOW else "application/json"
    with pytest.raises(ApiError, match=setting) as raised:
        DocumentParser(config).parse(replace(UPLOAD, content_type=kind), body)
    assert raised.value.status == 400
    assert DocumentParser(CONFIG).parse(UPLOAD, FAST).documents[0].text == "A text."


async def test_a_process_that_is_killed_fails_its_upload_alone(parser: DocumentParser) -> None:
    task, process = await begun(parser)
    os.kill(process, signal.SIGKILL)
    with pytest.raises(ApiError) as raised:
        await task
    assert (raised.value.status, raised.value.code) == (400, "parser_failed")
    assert parser.parse(UPLOAD, FAST)


def test_a_system_that_starts_no_process_gives_503(
    parser: DocumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = raising(BlockingIOError("Resource temporarily unavailable"))
    with monkeypatch.context() as full:
        full.setattr("multiprocessing.forkserver.connect_to_new_process", refused)
        with pytest.raises(ApiError, match="Send them again later") as raised:
            parser.parse(UPLOAD, FAST)
        assert (raised.value.status, raised.value.code) == (503, "parser_unavailable")
    assert parser.parse(UPLOAD, FAST)


async def test_one_tenant_never_has_all_places_and_waiting_too_long_gives_503(
    parser: DocumentParser,
) -> None:
    async def try_place(tenant: str) -> None:
        async with parser.place(tenant):
            pass

    async with parser.place("a"):
        with pytest.raises(ApiError, match=r"parsing\.wait_s") as raised:
            await asyncio.ensure_future(try_place("a"))
        assert (raised.value.status, raised.value.code) == (
            503,
            "uploads_busy",
        ) and raised.value.retry_after_s
        await asyncio.ensure_future(try_place("b"))
    await try_place("a")


async def test_what_check_raises_kills_the_process_at_once(parser: DocumentParser) -> None:
    left = threading.Event()

    def check() -> None:
        if left.is_set():
            raise CancelledError("The client left.")

    task, process = await begun(parser, check)
    (child,) = (child for child in active_children() if child.pid == process)
    left.set()
    with pytest.raises(CancelledError):
        await task
    await asyncio.to_thread(child.join, 60)
    assert child.exitcode in (-signal.SIGTERM, -signal.SIGKILL)  # it did not come to its end
