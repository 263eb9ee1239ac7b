"""Hostile uploads: the attacker gets an error that names the limit, and nothing is stored."""

from collections.abc import Callable, Iterator

import httpx
import pytest
from starlette.testclient import TestClient

from ragkv.api.settings import ParsingConfig
from ragkv.config import MIB
from tests.api.whole import whole

from . import uploads

PATH = "/v1/collections/c/documents"
FORM = {"content-type": uploads.FORM_TYPE}
JSON = {"content-type": "application/json"}
SMALL = ParsingConfig(cpu_s=2, wait_s=20.0, memory_bytes=192 * MIB)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A client of a server with a small budget for parsing."""
    with whole(tmp_path_factory.mktemp("home"), parsing=SMALL) as client:
        client.post("/v1/collections", json={"name": "c"})
        yield client


def send(up: TestClient, body: bytes, headers: dict[str, str]) -> httpx.Response:
    return up.post(PATH, content=body, headers=headers)


def send_file(up: TestClient, name: str, data: bytes) -> httpx.Response:
    return send(up, uploads.form([(name, data)]), FORM)


# The name of each attack, what is sent, and the setting that the error names. Each body is small,
# but much more work than it is long. Those without a setting end before any limit of ours, by the
# parsers' own.
ATTACKS: dict[str, tuple[Callable[[TestClient], httpx.Response], str]] = {
    "stream-that-inflates": (
        lambda up: send_file(up, "a.pdf", uploads.inflating_pdf(20, 70_000_000)),
        "limits.inflated_bytes",
    ),
    "many-json-lines": (
        lambda up: send_file(up, "a.jsonl", uploads.many_lines(400_000)),
        "limits.documents",
    ),
    "long-text": (lambda up: send_file(up, "a.txt", b"word " * 5_000_000), "limits.document_chars"),
    "long-texts": (
        lambda up: send(
            up, uploads.form([(f"{n}.txt", b"word " * 390_000) for n in range(8)]), FORM
        ),
        "limits.upload_chars",
    ),
    "deep-metadata": (lambda up: send(up, uploads.deep_json(150), JSON), "limits.nesting"),
    "long-metadata": (
        lambda up: send(up, uploads.many_values(20_000), JSON),
        "limits.metadata_chars",
    ),
    "many-parts": (lambda up: send(up, uploads.many_parts(100_000), FORM), "limits.documents"),
    "deeper-json": (lambda up: send(up, uploads.deep_json(500_000), JSON), ""),
    "no-boundary": (lambda up: send(up, b"--x--", {"content-type": "multipart/form-data"}), ""),
    "a-field": (
        lambda up: send(up, uploads.form([("a.txt", b"x")]).replace(b"filename", b"other"), FORM),
        "",
    ),
    "half-a-form": (lambda up: send(up, uploads.form([("a.txt", b"x")])[:-8], FORM), ""),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_upload_gets_400_that_names_the_limit_and_stores_nothing(
    up: TestClient, name: str
) -> None:
    attack, setting = ATTACKS[name]
    response = attack(up)
    error = response.json()["error"]
    assert response.status_code == 400 and error["message"], response.text
    assert not setting or (error["code"] == "document_limit" and setting in error["message"]), (
        response.text
    )
    assert up.get("/v1/collections/c").json()["documents"] == 0
