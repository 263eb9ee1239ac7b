"""One tenant sends all the work it may: the others are served as before, and the server still ends in time."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from ragkv import Engine
from ragkv.api import create_app
from ragkv.api.settings import LimitsConfig, QueueConfig, ServeConfig
from ragkv.runtime import Check, no_check
from tests.api.helpers import BARE, on_port, plain, service_of, wait_until
from tests.api.whole import key, needs_reader
from tests.retrieval.fakes import HashEmbedder

from .helpers import Target, Watch, at_once, target

pytestmark = pytest.mark.enable_socket
BATCH_S = 0.05
LITTLE_KV = {"RAGKV_STORE__MEMORY_BYTES": "20000000"}  # stored KV is not what a test of memory looks for
WORDS = "harbour mill orchard lantern glacier copper sparrow thunder velvet compass"


class SlowEmbedder(HashEmbedder):
    """Needs a while for each text, and records when it began one."""

    def __init__(self, batch_s: float = BATCH_S) -> None:
        super().__init__()
        self.batch_s = batch_s
        self.began: list[float] = []

    def embed_texts(self, texts: Sequence[str], check: Check = no_check) -> list[Any]:
        found = []
        for text in texts:
            check()
            self.began.append(time.monotonic())
            time.sleep(self.batch_s)
            found += super().embed_texts([text])
        return found


class Flooded:
    """An app with two keys and a slow embedder."""

    def __init__(self, loaded: Engine, home: Path, **config: Any) -> None:
        self.embedder = SlowEmbedder()
        self._headers = {name: key(home, name) for name in ("attacker", "bystander")}
        self.app: FastAPI = create_app(
            ServeConfig(home=str(home), **config), engine=loaded.with_config(BARE), embedder=self.embedder
        )

    def client(self, url: str, name: str) -> httpx.Client:
        return plain(url, headers=self._headers[name])

    def working(self) -> int:
        return service_of(self.app).task_pool.running


def embed(client: httpx.Client, texts: int = 200) -> httpx.Response:
    return client.post("/v1/embeddings", json={"model": "hash", "input": ["some text"] * texts})


def in_threads(count: int, work: Callable[[], httpx.Response]) -> tuple[list[threading.Thread], list[Any]]:
    """Start `count` calls; their responses, or the errors of broken connections, are added to the list."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except httpx.HTTPError as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads, results


@pytest.fixture
def flooded(reader: Engine, tmp_path: Path) -> Flooded:
    return Flooded(reader, tmp_path, queue=QueueConfig(tasks=4, tenant_tasks=2, tenant_limit=3))


def test_a_tenants_tasks_leave_threads_to_other_tenants_and_above_its_limit_get_429(flooded: Flooded) -> None:
    with on_port(flooded.app) as url, flooded.client(url, "attacker") as attacker:
        threads, results = in_threads(3, lambda: embed(attacker))
        wait_until(lambda: flooded.working() == 3)
        refused = embed(attacker)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tenant_queue_full")
        assert "queue.tenant_limit" in refused.text and refused.headers["retry-after"]
        with flooded.client(url, "bystander") as bystander:
            began = time.monotonic()
            assert embed(bystander, texts=3).status_code == 200
            assert bystander.get("/v1/collections").status_code == 200
            assert time.monotonic() - began < 10  # the attacker's three requests take 20 s
        service_of(flooded.app).cut()
        for thread in threads:
            thread.join()
    assert [(one.status_code, one.json()["error"]["code"]) for one in results] == [(503, "shutting_down")] * 3


def test_abandoned_embeddings_stop_within_one_batch(flooded: Flooded) -> None:
    with on_port(flooded.app) as url:
        with flooded.client(url, "attacker") as attacker:
            attacker.timeout = httpx.Timeout(0.5)
            threads, results = in_threads(3, lambda: embed(attacker))
            for thread in threads:
                thread.join()
        assert all(isinstance(one, httpx.ReadTimeout) for one in results)
        left = time.monotonic()
        wait_until(lambda: flooded.working() == 0)
        assert time.monotonic() - left < 8  # the requests take 20 s
        later = [began for began in flooded.embedder.began if began > left + 0.3]
        assert later == []


def store(client: httpx.Client, count: int) -> httpx.Response:
    documents = [{"id": str(number), "text": f"{number} {WORDS}"} for number in range(count)]
    return client.post("/v1/collections/c/documents", json={"documents": documents})


def test_documents_whose_embedding_is_cut_are_not_stored_and_their_vectors_are_kept(
    reader: Engine, tmp_path: Path
) -> None:
    flooded = Flooded(reader, tmp_path, limits=LimitsConfig(documents=100), queue=QueueConfig(task_deadline_s=4.5))
    with on_port(flooded.app) as url, flooded.client(url, "attacker") as attacker:
        attacker.post("/v1/collections", json={"name": "c"})
        late = store(attacker, 100)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert attacker.get("/v1/collections/c").json()["documents"] == 0
        embedded = len(flooded.embedder.embedded)
        flooded.embedder.batch_s = 0.0
        assert store(attacker, 100).status_code == 201
        assert len(flooded.embedder.embedded) - embedded == 100 - 64  # the first batch was committed


def test_documents_are_stored_before_their_kv_and_the_answer_says_how_much_kv_is_left(
    reader: Engine, tmp_path: Path
) -> None:
    flooded = Flooded(reader, tmp_path)
    flooded.embedder.batch_s = 0.0
    with on_port(flooded.app) as url, flooded.client(url, "attacker") as attacker:
        attacker.post("/v1/collections", json={"name": "c"})
        (tenant,) = service_of(flooded.app).tenants.opened().values()
        with tenant.engine.scheduler.turn():  # no chunk can be computed
            threads, results = in_threads(1, lambda: store(attacker, 60))
            wait_until(lambda: attacker.get("/v1/collections/c").json()["documents"] == 60)
            service_of(flooded.app).cut()
        threads[0].join()
    assert results[0].status_code == 201
    body = results[0].json()
    assert len(body["added"]) == 60 and body["chunks"]["left"] > 0
    assert body["chunks"]["encoded"] + body["chunks"]["left"] == 60


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with target(tmp_path_factory.mktemp("floods"), {"RAGKV_SERVE__GRACEFUL_S": "2", **LITTLE_KV}) as found:
        yield found


def embeddings(client: httpx.Client) -> httpx.Response:
    return client.post("/v1/embeddings", json={"model": "all-MiniLM-L6-v2", "input": [f"{WORDS} " * 1000] * 12})


def documents(client: httpx.Client) -> httpx.Response:
    texts = [f"{number} {time.monotonic()} " + f"{WORDS} " * 1000 for number in range(12)]
    return client.post("/v1/collections/c/documents", json={"documents": [{"text": text} for text in texts]})


def searches(client: httpx.Client) -> httpx.Response:
    return client.post("/v1/collections/c/search", json={"query": f"{WORDS} " * 1000, "k": 10})


def answers(client: httpx.Client) -> httpx.Response:
    """A long question over documents, or a streamed chat with a long message; each is new, so nothing is reused."""
    number = time.monotonic_ns()
    if number // 1000 % 2:
        question = f"{number} " + f"{WORDS} " * 15
        return client.post("/v1/ask", json={"question": question, "collection": "c", "max_tokens": 256})
    messages = [{"role": "user", "content": f"{number} " + f"{WORDS} " * 40}]
    body = {"model": "reader", "messages": messages, "max_tokens": 256, "stream": True}
    return client.post("/v1/chat/completions", json=body)


FLOODS = {"embeddings": embeddings, "documents": documents, "searches": searches, "answers": answers}
CLIENTS = {"answers": 32}  # at once, as many as queue.tenant_limit allows; of the others 6


def flood(up: Target, kind: str, seconds: float) -> list[int]:
    """Send requests of one kind with many clients at once, which leave after `seconds`; returns the statuses."""
    ends, statuses = time.monotonic() + seconds, list[int]()

    def run() -> None:
        with up.attacker() as client:
            while (left_s := ends - time.monotonic()) > 0.1:
                client.timeout = httpx.Timeout(left_s)
                try:
                    statuses.append(FLOODS[kind](client).status_code)
                except httpx.HTTPError:
                    statuses.append(0)

    at_once([run] * CLIENTS.get(kind, 6))
    return statuses


@needs_reader
@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_of_one_tenant_refuses_no_one_else_and_leaves_no_memory_behind(up: Target, kind: str) -> None:
    with Watch(up) as watch:
        statuses = flood(up, kind, 4.0)
    assert set(statuses) <= {0, 200, 201, 429, 503, 504}
    watch.assert_unharmed()
