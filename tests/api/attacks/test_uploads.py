"""Hostile uploads: the attacker gets an error that names the limit, and the bystander notices nothing."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from ragkv.config import MIB
from tests.api.whole import needs_reader

from . import uploads
from .helpers import Target, Watch, bare_target, runs, target, wait_until

pytestmark = [needs_reader, pytest.mark.enable_socket]

PATH = "/v1/collections/c/documents"
FORM = {"content-type": uploads.FORM_TYPE}
JSON = {"content-type": "application/json"}
SMALL = {
    "RAGKV_SERVE__PARSING__CPU_S": "2",
    "RAGKV_SERVE__PARSING__WAIT_S": "20",
    "RAGKV_SERVE__PARSING__MEMORY_BYTES": str(192 * MIB),
}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A server with a small budget for parsing."""
    import pytest_socket

    pytest_socket.enable_socket()
    with target(tmp_path_factory.mktemp("home"), SMALL) as up:
        yield up


def send_file(up: Target, name: str, data: bytes) -> httpx.Response:
    with up.attacker() as client:
        return client.post(PATH, content=uploads.form([(name, data)]), headers=FORM)


def send(up: Target, body: bytes, headers: dict[str, str]) -> httpx.Response:
    with up.attacker() as client:
        return client.post(PATH, content=body, headers=headers)


def stored(up: Target) -> int:
    with up.attacker() as client:
        return int(client.get("/v1/collections/c").json()["documents"])


# The name of each attack, what is sent, and the setting that the error names. Sizes are small: each is a form or a JSON
# body that is much more work than it is long.
Attack = Callable[[Target], httpx.Response]
ATTACKS: dict[str, tuple[Attack, str]] = {
    "pages-share-a-stream": (
        lambda up: send_file(up, "a.pdf", uploads.shared_stream_pdf(400, 8_000)),
        "parsing.cpu_s",
    ),
    "stream-that-inflates": (
        lambda up: send_file(up, "a.pdf", uploads.inflating_pdf(20, 70_000_000)),
        "limits.inflated_bytes",
    ),
    "angle-brackets": (lambda up: send_file(up, "a.html", uploads.angle_brackets(8_000_000)), "parsing.cpu_s"),
    "many-json-lines": (lambda up: send_file(up, "a.jsonl", uploads.many_lines(400_000)), "limits.documents"),
    "long-text": (lambda up: send_file(up, "a.txt", b"word " * 5_000_000), "limits.document_chars"),
    "long-texts": (
        lambda up: send(up, uploads.form([(f"{n}.txt", b"word " * 390_000) for n in range(8)]), FORM),
        "limits.upload_chars",
    ),
    "many-values": (lambda up: send(up, uploads.many_values(5_000_000), JSON), "parsing."),
    "deep-metadata": (lambda up: send(up, uploads.deep_json(150), JSON), "limits.nesting"),
    "long-metadata": (lambda up: send(up, uploads.many_values(20_000), JSON), "limits.metadata_chars"),
    "many-parts": (lambda up: send(up, uploads.many_parts(100_000), FORM), "limits.documents"),
}
# These end by themselves before any limit of ours: the parsers have their own.
REFUSED: dict[str, Attack] = {
    "deeper-json": lambda up: send(up, uploads.deep_json(500_000), JSON),
    "no-boundary": lambda up: send(up, b"--x--", {"content-type": "multipart/form-data"}),
    "half-a-form": lambda up: send(up, uploads.form([("a.txt", b"x")])[:-8], FORM),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_upload_gets_400_that_names_the_limit_and_stores_nothing(up: Target, name: str) -> None:
    attack, setting = ATTACKS[name]
    response = attack(up)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "document_limit"), response.text
    assert setting in error["message"], response.text
    assert stored(up) == 0


@pytest.mark.parametrize("name", REFUSED)
def test_an_upload_that_parsers_refuse_gets_400_and_stores_nothing(up: Target, name: str) -> None:
    response = REFUSED[name](up)
    assert response.status_code == 400 and response.json()["error"]["message"], response.text
    assert stored(up) == 0


def test_hostile_uploads_harm_no_bystander(up: Target) -> None:
    with Watch(up) as watch:
        for name in ("pages-share-a-stream", "angle-brackets", "many-values"):
            ATTACKS[name][0](up)
    watch.assert_unharmed()


def test_sigterm_ends_the_server_in_time_while_uploads_are_parsed(tmp_path: Path) -> None:
    settings = {"RAGKV_SERVE__GRACEFUL_S": "1", "RAGKV_SERVE__PARSING__CPU_S": "60"}
    with bare_target(tmp_path, settings) as up:
        slow = uploads.form([("a.html", uploads.angle_brackets(30_000_000))])
        threads = [threading.Thread(target=_send_quietly, args=[up, slow]) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert wait_until(lambda: bool(up.children()))
        children = up.children()
        began = time.monotonic()
        up.process.signal(signal.SIGTERM)
        assert up.process.ended(30) == 0
        assert time.monotonic() - began < 30.0  # 1 s for answers, 5 s until they are cut, and the end of the process
        assert wait_until(lambda: not any(map(runs, children)), 30.0)
        for thread in threads:
            thread.join()


def _send_quietly(up: Target, body: bytes) -> None:
    with contextlib.suppress(httpx.HTTPError):
        send(up, body, FORM)
