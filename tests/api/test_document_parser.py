"""Slots shared fairly between tenants; uploads parsed in processes that are killed, replaced and bounded."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from ragkv.api.documents import parser as document_parser
from ragkv.api.documents.parser import DocumentParser
from ragkv.api.documents.upload_parsing import Upload, UploadError
from ragkv.api.errors import ApiError
from ragkv.api.settings import LimitsConfig, ParsingConfig
from ragkv.api.work.fair_slots import FairSlots, NoSlotError
from ragkv.config import MIB
from ragkv.retrieval import Document, ParseLimits
from ragkv.runtime import worker_process
from ragkv.runtime.worker_process import WorkerEndedError

from .attacks import uploads

LIMITS = LimitsConfig()
UPLOAD = Upload(uploads.FORM_TYPE, None, LIMITS.upload_types, LIMITS.documents, LIMITS.upload_chars, ParseLimits())
CONFIG = ParsingConfig(
    workers=1, uploads=2, tenant_uploads=1, wait_s=0.2, wall_s=20.0, cpu_s=5.0, memory_bytes=256 * MIB
)
SLOW = uploads.form([("a.html", uploads.angle_brackets(20_000_000))])
FAST = uploads.form([("a.txt", b"A text.")])


@pytest.fixture
async def parser() -> AsyncIterator[DocumentParser]:
    with DocumentParser(CONFIG, LIMITS) as parser:
        yield parser


async def hold(slots: FairSlots, tenant: str, order: list[str], until: asyncio.Event, wait_s: float = 5.0) -> None:
    async with slots.hold(tenant, wait_s):
        order.append(tenant)
        await until.wait()


async def start() -> None:
    """Let tasks run until they wait."""
    for _ in range(3):
        await asyncio.sleep(0)


class TestFairSlots:
    async def test_one_tenant_never_holds_more_than_its_share(self) -> None:
        slots, order, until = FairSlots(3, 2), list[str](), asyncio.Event()
        tasks = [asyncio.ensure_future(hold(slots, tenant, order, until)) for tenant in "aaaab"]
        await start()
        assert order == ["a", "a", "b"] and slots.waiting == 2
        until.set()
        await asyncio.gather(*tasks)
        assert slots.held == slots.waiting == 0

    async def test_waiting_tenants_are_served_in_turn(self) -> None:
        slots, order = FairSlots(1, 1), list[str]()
        first, rest = asyncio.Event(), asyncio.Event()
        rest.set()
        tasks = [asyncio.ensure_future(hold(slots, "a", order, first))]
        await start()
        tasks += [asyncio.ensure_future(hold(slots, tenant, order, rest)) for tenant in "aaabc"]
        await start()
        first.set()
        await asyncio.gather(*tasks)
        assert order[:4] in (["a", "a", "b", "c"], ["a", "b", "c", "a"])

    async def test_waiting_longer_than_allowed_raises_and_leaves_the_queue(self) -> None:
        slots, until = FairSlots(1, 1), asyncio.Event()
        holder = asyncio.ensure_future(hold(slots, "a", [], until))
        await start()
        with pytest.raises(NoSlotError):
            await hold(slots, "b", [], until, 0.01)
        assert slots.waiting == 0
        until.set()
        await holder

    async def test_a_waiter_whose_time_ended_takes_no_slot(self) -> None:
        slots, until = FairSlots(1, 1), asyncio.Event()
        holder = asyncio.ensure_future(hold(slots, "a", [], until))
        await start()
        slots._waiting.add("b", cancelled := asyncio.get_running_loop().create_future())
        cancelled.cancel()  # as its timeout does, before its task runs again
        until.set()
        await holder
        assert slots.held == slots.waiting == 0

    async def test_a_cancelled_waiter_leaves_the_queue(self) -> None:
        slots, until = FairSlots(1, 1), asyncio.Event()
        holder = asyncio.ensure_future(hold(slots, "a", [], until))
        waiter = asyncio.ensure_future(hold(slots, "b", [], until))
        await start()
        waiter.cancel()
        await asyncio.wait({waiter})
        assert slots.waiting == 0
        until.set()
        await holder
        assert slots.held == 0


async def test_files_become_documents_with_their_metadata_and_pages(parser: DocumentParser) -> None:
    lines = b'{"id": "x", "text": "Two \\u00e9\\ud83d\\ude00", "metadata": {"n": [1, {"a": null}]}}'
    body = uploads.form([("a.txt", b"One."), ("b.jsonl", lines), ("c.pdf", uploads.shared_stream_pdf(2, 2))])
    first, second, third = await parser.parse("t", UPLOAD, body)
    assert first == Document("a.txt", "One.", "a.txt")
    assert second == Document("x", "Two é😀", "b.jsonl", {"n": [1, {"a": None}]})
    assert third.id == "c.pdf" and len(third.page_starts) == 2


async def test_a_form_with_a_field_is_refused(parser: DocumentParser) -> None:
    body = b'--x\r\ncontent-disposition: form-data; name="a"\r\n\r\nno file\r\n--x--\r\n'
    with pytest.raises(UploadError, match="nothing else"):
        await parser.parse("t", UPLOAD, body)


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (replace(CONFIG, cpu_s=0.2), "parsing.cpu_s"),
        (replace(CONFIG, wall_s=1.0), "parsing.wall_s"),
        (replace(CONFIG, memory_bytes=16 * MIB), "parsing.memory_bytes"),
    ],
)
async def test_an_exhausted_budget_is_an_error_that_names_the_setting_and_the_next_upload_is_parsed(
    config: ParsingConfig, setting: str
) -> None:
    with DocumentParser(config, LIMITS) as parser:
        with pytest.raises(ApiError, match=setting) as raised:
            await parser.parse("t", UPLOAD, SLOW)
        assert raised.value.status == 400
    with DocumentParser(replace(CONFIG, wall_s=30.0), LIMITS) as parser:
        assert await parser.parse("t", UPLOAD, FAST)


async def test_a_parser_that_aborts_for_want_of_memory_is_an_error_that_names_the_setting() -> None:
    upload = replace(UPLOAD, content_type="application/json")
    with DocumentParser(replace(CONFIG, memory_bytes=64 * MIB, cpu_s=20.0), LIMITS) as parser:
        with pytest.raises(ApiError, match=r"parsing\.memory_bytes") as raised:
            await parser.parse("t", upload, uploads.many_values(5_000_000))
        cause = raised.value.__cause__
        assert isinstance(cause, WorkerEndedError) and cause.status == -signal.SIGABRT
        assert raised.value.status == 400
        assert await parser.parse("t", UPLOAD, FAST)


async def test_a_killed_process_is_replaced_for_the_next_upload(parser: DocumentParser) -> None:
    await parser.parse("t", UPLOAD, FAST)
    (worker,) = parser._idle
    worker.kill()
    worker._popen.wait()
    assert (await parser.parse("t", UPLOAD, FAST))[0].text == "A text."


@pytest.mark.parametrize(
    "module", ["no_such_module", "this"]
)  # one ends with an error, the other says what no parser does
async def test_a_parser_that_does_not_start_gives_503(
    parser: DocumentParser, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(document_parser, "MODULE", module)
        for _ in range(2):
            with pytest.raises(ApiError, match="Send them again later") as raised:
                await parser.parse("t", UPLOAD, FAST)
            assert (raised.value.status, raised.value.code) == (503, "parser_unavailable")
            assert raised.value.retry_after_s and not parser._idle
    assert await parser.parse("t", UPLOAD, FAST)


async def test_a_parser_that_is_never_ready_gives_503(parser: DocumentParser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_START_S", 0.01)  # shorter than Python takes to start
    with pytest.raises(ApiError, match="Send them again later"):
        await parser.parse("t", UPLOAD, FAST)


async def test_a_system_that_starts_no_process_gives_503(
    parser: DocumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    with monkeypatch.context() as full:
        full.setattr(worker_process.subprocess, "Popen", refused)
        with pytest.raises(ApiError, match="Send them again later"):
            await parser.parse("t", UPLOAD, FAST)
    assert await parser.parse("t", UPLOAD, FAST)


async def test_an_upload_that_waits_too_long_for_a_process_gets_503(parser: DocumentParser) -> None:
    slow = asyncio.ensure_future(parser.parse("a", UPLOAD, SLOW))
    await asyncio.sleep(0.05)
    with pytest.raises(ApiError, match=r"parsing\.wait_s") as raised:
        await parser.parse("b", UPLOAD, FAST)
    assert raised.value.status == 503 and raised.value.retry_after_s
    slow.cancel()
    await asyncio.wait({slow})


async def test_an_upload_above_the_tenants_share_waits_before_its_body_is_read(parser: DocumentParser) -> None:
    reading = asyncio.Event()

    async def forever() -> list[Document]:
        reading.set()
        await asyncio.Event().wait()
        return []

    first = asyncio.ensure_future(parser.receive("a", forever))
    await reading.wait()
    reading.clear()
    with pytest.raises(ApiError, match=r"parsing\.wait_s"):
        await parser.receive("a", forever)
    assert not reading.is_set()
    first.cancel()
    await asyncio.wait({first})


async def test_cancelling_kills_the_process_and_frees_its_slot(parser: DocumentParser) -> None:
    slow = asyncio.ensure_future(parser.parse("a", UPLOAD, SLOW))
    await asyncio.sleep(0.5)
    (worker,) = parser._busy
    slow.cancel()
    began = time.monotonic()
    await asyncio.wait({slow})
    assert worker.ended and time.monotonic() - began < 4.0
    assert await parser.parse("b", UPLOAD, FAST)


async def test_closing_kills_running_processes_at_once() -> None:
    parser = DocumentParser(CONFIG, LIMITS)
    slow = asyncio.ensure_future(parser.parse("a", UPLOAD, SLOW))
    await asyncio.sleep(0.5)
    began = time.monotonic()
    await asyncio.to_thread(parser.close)
    assert time.monotonic() - began < 3.0
    with pytest.raises(ApiError):
        await slow
    with pytest.raises(ApiError, match="shutting down"):
        await parser.parse("a", UPLOAD, FAST)
