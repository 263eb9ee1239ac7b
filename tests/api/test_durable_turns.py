"""The last event of a turn of a named conversation is sent when the turn is on disk, for a bounded
time.
"""

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from ragkv import Engine
from ragkv.api import answers
from ragkv.runtime import replace_file
from ragkv.sessions import folder_storage
from tests.faults import os_error, raising
from tests.scheduling.helpers import begin

from .helpers import app_on, events, filled, on_port, plain

pytestmark = pytest.mark.enable_socket
QUESTION = {"question": "Who built the harbour of Oro?", "collection": "facts", "session_id": "s"}


class HeldDisk:
    """Manifests are written only while `free` is set."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.asked = threading.Event()
        self.free.set()

    def write(self, path: Path, *data: bytes) -> None:
        self.asked.set()
        assert self.free.wait(30)
        replace_file(path, *data)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldDisk]:
    disk = HeldDisk()
    monkeypatch.setattr(folder_storage, "replace_file", disk.write)
    yield disk
    disk.free.set()


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_when_its_turn_is_on_disk_and_delays_no_other_request(
    reader: Engine, tmp_path: Path, disk: HeldDisk, stream: bool
) -> None:
    with on_port(app_on(reader, tmp_path)) as url, plain(url) as client, plain(url) as other:
        filled(client)  # type: ignore[arg-type]
        disk.free.clear()
        seen: list[str] = []
        on_disk: list[bool] = []

        def ask() -> None:
            with client.stream("POST", "/v1/ask", json={**QUESTION, "stream": stream}) as response:
                for line in response.iter_lines():
                    seen.append(line)
            on_disk.append(disk.free.is_set())

        thread = begin(ask)
        assert disk.asked.wait(30)  # the turn is complete
        assert other.post("/v1/ask", json={**QUESTION, "session_id": None}).status_code == 200
        again = begin(lambda: other.post("/v1/ask", json=QUESTION))  # the conversation's next turn
        assert ("event: token" in seen) == stream and "event: answer" not in seen and not on_disk
        disk.free.set()
        thread.join()
        again.join()
        assert on_disk == [True] and (not stream or "event: answer" in seen)
        assert client.get("/v1/sessions/s").json()["turns"] == 2


def test_an_answer_waits_for_a_slow_disk_no_longer_than_the_limit_and_says_so(
    client: TestClient, disk: HeldDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(client)
    disk.free.clear()
    with monkeypatch.context() as patch:
        patch.setattr(answers, "SAVE_S", 0.2)
        notes = client.post("/v1/ask", json=QUESTION).json()["reuse"]["notes"]
    assert any("was not written to disk within 0.2 s" in note for note in notes)
    disk.free.set()
    notes = client.post("/v1/ask", json=QUESTION).json()["reuse"]["notes"]
    assert not any("written" in note for note in notes)


@pytest.mark.parametrize("path", ["/v1/ask", "/v1/chat/completions"])
def test_an_answer_whose_turn_could_not_be_written_says_so(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    filled(client)
    monkeypatch.setattr(folder_storage, "replace_file", raising(os_error(errno.ENOSPC)))
    message = {"role": "user", "content": QUESTION["question"]}
    chat = {"model": "reader", "messages": [message], "session_id": "s", "stream": True}
    response = client.post(path, json=QUESTION if path == "/v1/ask" else chat)
    report = response.json() if path == "/v1/ask" else events(response.text)[-2][1]["ragkv"]
    assert any("No space left" in note for note in report["reuse"]["notes"])


def test_a_copied_conversation_is_on_disk_when_the_response_comes(
    client: TestClient, tmp_path: Path
) -> None:
    filled(client)
    client.post("/v1/ask", json=QUESTION)
    (folder,) = tmp_path.rglob("sessions")
    before = list(folder.iterdir())
    assert client.post("/v1/sessions/s/fork", json={"to": "copy"}).status_code == 201
    assert len(list(folder.iterdir())) == len(before) + 1
