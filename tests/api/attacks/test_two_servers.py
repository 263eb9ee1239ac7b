"""Two servers that share a home and Redis, behind nginx, as docs/scale.md sets them up."""

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import pytest_socket

from ragkv.api.keys import KeyFile
from tests.api import serving
from tests.api.serving import small
from tests.api.whole import documents, ingest, key, server
from tests.cluster.servers import RedisServer

from .front import BEHIND, SECOND, needs_nginx, nginx
from .replicas import process_settings

pytestmark = [needs_nginx, pytest.mark.enable_socket, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[3]
ANSWERED_BY = "x-replica"


def client(port: int, **headers: str) -> httpx.Client:
    return httpx.Client(
        base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60, trust_env=False
    )


def answered_by(port: int, senders: list[dict[str, str]]) -> list[str]:
    """The server that answers each sender."""
    found = list[str]()
    for headers in senders:
        with client(port, **headers) as one:
            response = one.post("/v1/echo", json={})
            assert response.status_code == 200
            found.append(response.headers[ANSWERED_BY])
    return found


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[int, list[serving.Process]]]:
    """nginx's port, and two small servers behind it."""
    (tmp_path / "nginx").mkdir()
    key(tmp_path, "first")  # a server behind a proxy starts with one
    with (
        small(tmp_path, BEHIND) as first,
        small(tmp_path, BEHIND) as second,
        nginx(tmp_path / "nginx", first.port, second.port) as port,
    ):
        yield port, [first, second]


def test_a_key_stays_with_its_server_and_moves_only_if_that_one_is_away(
    tmp_path: Path, two: tuple[int, list[serving.Process]]
) -> None:
    port, servers = two
    keys = KeyFile(tmp_path / "keys.json")
    senders = [{"authorization": f"Bearer {keys.add(f'sender-{n}')[0]}"} for n in range(12)]
    before = answered_by(port, senders)
    assert len(set(before)) == 2
    assert answered_by(port, senders[::-1]) == before[::-1]
    with servers[0].client(headers=senders[0]) as one:
        gone = one.post("/v1/echo", json={}).headers[ANSWERED_BY]
    servers[0].signal(signal.SIGKILL)
    servers[0].ended()
    after = answered_by(port, senders)
    assert gone not in after
    assert [now for was, now in zip(before, after, strict=True) if was != gone] == [
        was for was in before if was != gone
    ]


def test_an_application_with_one_key_spreads_its_conversations_by_a_header(
    tmp_path: Path, two: tuple[int, list[serving.Process]]
) -> None:
    port, _ = two
    headers = key(tmp_path, "application")
    senders = [{**headers, "x-conversation": f"of person {n}"} for n in range(12)]
    found = answered_by(port, senders)
    assert len(set(found)) == 2 and answered_by(port, senders) == found


def test_a_server_that_shares_redis_continues_the_conversation_of_one_that_was_killed(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    headers = key(home, "asker")
    (tmp_path / "nginx").mkdir()
    pytest_socket.enable_socket()
    with RedisServer() as redis:
        url = f"redis://127.0.0.1:{redis.port}"
        settings = [
            {**BEHIND, **process_settings(tmp_path / name, url, 10.0)} for name in ("kv-0", "kv-1")
        ]
        with (
            server(home, settings[0]) as first,
            server(home, settings[1]) as second,
            nginx(tmp_path / "nginx", first.port, second.port) as port,
            client(port, **headers) as asker,
        ):
            assert ingest(asker, documents(2), name="c").status_code == 201

            def turn(number: int) -> httpx.Response:
                message = {"role": "user", "content": f"Who built the bridge {number}?"}
                body = {"model": "reader", "messages": [message], "max_tokens": 8}
                return asker.post(
                    "/v1/chat/completions",
                    json={**body, "session_id": "s", "rag": {"collection": "c", "k": 2}},
                )

            asked = turn(1)
            assert asked.status_code == 200, asked.text
            with first.client(headers=headers) as one:
                is_first = one.get("/v1/stats").headers[ANSWERED_BY] == asked.headers[ANSWERED_BY]
            killed = first if is_first else second
            killed.signal(signal.SIGKILL)
            killed.ended()
            while (again := turn(2)).status_code == 503:  # its connection broke with the server
                assert again.json()["error"]["code"] == "away"
            assert again.status_code == 200, again.text
            assert again.headers[ANSWERED_BY] != asked.headers[ANSWERED_BY]
            assert asker.get("/v1/sessions/s").json()["turns"] == 2


def test_the_page_takes_the_second_server_in_as_these_tests_do() -> None:
    page = (ROOT / "docs" / "scale.md").read_text("utf-8")
    assert f"sed 's/{SECOND[0]}/{SECOND[1]}/' deploy/nginx.conf" in page
