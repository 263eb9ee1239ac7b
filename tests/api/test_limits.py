"""Rates and quotas: a key's requests and tokens per minute, a tenant's documents and sessions; slow
clients.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from ragkv import EngineConfig, StoreConfig
from ragkv.api import limits
from ragkv.api.errors import ApiError
from ragkv.api.keys import ANONYMOUS, KeyFile, Principal, Quota, RateLimit
from ragkv.api.limits import Held, check_quota
from ragkv.api.settings import QuotaConfig
from ragkv.config import MIB
from tests.api.whole import ingest, whole


def test_a_key_above_its_rate_gets_429_with_retry_after(small: TestClient, tmp_path: Path) -> None:
    secret, _ = KeyFile(tmp_path / "keys.json").add("alice", rate=RateLimit(requests_per_minute=2))
    headers = {"authorization": f"Bearer {secret}"}
    assert small.post("/v1/echo", json={}, headers=headers).status_code == 200
    small.get("/v1/nowhere", headers=headers)
    refused = small.post("/v1/echo", json={}, headers=headers)
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert small.get("/livez").status_code == 200


def test_answers_and_embeddings_use_up_the_tokens_of_their_key(
    small: TestClient, tmp_path: Path
) -> None:
    secret, _ = KeyFile(tmp_path / "keys.json").add("alice", rate=RateLimit(tokens_per_minute=80))
    headers = {"authorization": f"Bearer {secret}"}
    # 42 prompt tokens, 5 answer tokens
    assert small.post("/v1/answers", json={}, headers=headers).status_code == 200
    # 3 are left
    assert [small.post("/v1/embeds", headers=headers).status_code for _ in range(2)] == [200, 200]
    assert small.post("/v1/embeds", headers=headers).status_code == 429


@pytest.mark.parametrize("hours", [-1, 1, -24 * 365])
def test_the_rate_of_a_key_does_not_hear_of_the_time_of_day(
    monkeypatch: pytest.MonkeyPatch, hours: float
) -> None:
    now = 1000.0
    set_to = time.time() + 3600 * hours
    monkeypatch.setattr(limits.time, "monotonic", lambda: now)
    who = Principal("a", "a", "a", rate=RateLimit(requests_per_minute=2, tokens_per_minute=10))
    rates = limits.RateLimiter()
    rates.take_request(who)
    rates.take_request(who)
    monkeypatch.setattr(time, "time", lambda: set_to)
    with pytest.raises(ApiError) as refused:
        rates.take_request(who)
    assert 59 <= (refused.value.retry_after_s or 0) <= 61
    now += 61
    rates.charge_tokens(who, 25)  # an answer may take more than is left
    with pytest.raises(ApiError, match="10 tokens a minute"):
        rates.take_request(who)
    now += 61
    rates.take_request(who)


def test_a_window_says_when_enough_of_it_is_a_minute_old() -> None:
    window = limits.Window()
    for now in (0.0, 0.05, 10.0, 20.0):
        window.count(2, now)
    assert window.wait_s(9, 30.0) == 0
    assert window.wait_s(8, 30.0) == pytest.approx(30)  # the first two are one step
    assert window.wait_s(4, 30.0) == pytest.approx(40)
    assert window.wait_s(1, 85.0) == 0


@pytest.mark.parametrize("what", ["documents", "sessions", "collections"])
def test_a_request_above_a_quota_gets_403_that_names_the_limit_and_its_source(what: Held) -> None:
    own = Principal("a", "a", "a", Quota(3, 3, 3, 3, 3))
    default = QuotaConfig(3, 3, 3)
    for who, quotas, source in (
        (own, QuotaConfig(), "of this key's tenant"),
        (ANONYMOUS, default, "the setting quot"),
    ):
        check_quota(who, what, 2, 1, quotas)
        with pytest.raises(
            ApiError, match=rf"quota is 3 {what} \({source}.*; 3 are there"
        ) as caught:
            check_quota(who, what, 3, 1, quotas)
        assert (caught.value.status, caught.value.code) == (403, "quota_exceeded")


def test_only_one_of_concurrent_requests_gets_the_last_place_of_a_quota(tmp_path: Path) -> None:
    with whole(tmp_path, quotas=QuotaConfig(documents=1)) as client, ThreadPoolExecutor(4) as pool:
        client.post("/v1/collections", json={"name": "c"})
        statuses = list(
            pool.map(
                lambda n: ingest(client, [{"id": f"{n}", "text": f"Mill {n}."}]).status_code,
                range(4),
            )
        )
    assert sorted(statuses) == [201, 403, 403, 403]


def test_documents_and_kv_share_the_disk_and_above_it_documents_are_refused(tmp_path: Path) -> None:
    store = StoreConfig(memory_bytes=0, disk_bytes=2 * MIB)
    with whole(tmp_path, engine=EngineConfig(store=store)) as client:
        client.post("/v1/collections", json={"name": "c"})

        def kv() -> int:
            [disk] = client.get("/v1/stats").json()["tiers"]
            assert disk["used_bytes"] <= disk["capacity_bytes"]
            return int(disk["capacity_bytes"])

        empty = kv()
        text = " ".join(f"word{n}" for n in range(20_000))
        assert empty == 2 * MIB and ingest(client, [{"id": "a", "text": text}]).status_code == 201
        filled = kv()
        assert filled < empty - 2 * len(text)
        many = [ingest(client, [{"id": f"{n}", "text": f"{text} {n}"}]) for n in range(12)]
        assert many[-1].status_code == 403 and "disk_bytes" in many[-1].text and kv() == 0
        for name in ("a", *map(str, range(12))):
            client.delete(f"/v1/collections/c/documents/{name}")
        assert kv() > filled  # deleting has freed the disk
        assert ingest(client, [{"id": "b", "text": "The mill."}]).status_code == 201
