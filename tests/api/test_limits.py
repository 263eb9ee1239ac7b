"""Rates and quotas: a key's requests and tokens per minute, a tenant's documents and sessions; slow clients."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from ragkv.api.errors import ApiError
from ragkv.api.keys import ANONYMOUS, KeyFile, Principal, Quota, RateLimit
from ragkv.api.limits import Held, QuotaGuard, RateLimiter
from ragkv.api.settings import QuotaConfig


def _who(requests: int | None = None, tokens: int | None = None, key_id: str = "a") -> Principal:
    return Principal(key_id, key_id, key_id, Quota(), RateLimit(requests, tokens))


def test_a_rate_is_restored_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    limiter, who = RateLimiter(), _who(requests=1, tokens=10)
    limiter.take_request(who)
    limiter.charge_tokens(who, 50)
    monkeypatch.setattr(time, "time", lambda: now + 61)
    limiter.take_request(who)


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


def test_answers_and_embeddings_use_up_the_tokens_of_their_key(small: TestClient, tmp_path: Path) -> None:
    secret, _ = KeyFile(tmp_path / "keys.json").add("alice", rate=RateLimit(tokens_per_minute=80))
    headers = {"authorization": f"Bearer {secret}"}
    assert small.post("/v1/answers", json={}, headers=headers).status_code == 200  # 42 prompt tokens, 5 answer tokens
    assert [small.post("/v1/embeds", headers=headers).status_code for _ in range(2)] == [200, 200]  # 3 are left
    assert small.post("/v1/embeds", headers=headers).status_code == 429


@pytest.mark.parametrize("what", ["documents", "sessions", "collections"])
def test_a_request_above_a_quota_gets_403_that_names_the_limit_and_its_source(what: Held) -> None:
    own, default = Principal("a", "a", "a", Quota(3, 3, 3, 3, 3)), QuotaConfig(3, 3, 3)
    for who, quotas, source in ((own, QuotaConfig(), "of this key's tenant"), (ANONYMOUS, default, "the setting quot")):
        QuotaGuard(quotas).check(who, what, held=2, more=1)
        with pytest.raises(ApiError, match=rf"quota is 3 {what} \({source}.*; 3 are there") as caught:
            QuotaGuard(quotas).check(who, what, held=3, more=1)
        assert (caught.value.status, caught.value.code) == (403, "quota_exceeded")


def test_only_one_of_concurrent_requests_gets_the_last_place_of_a_quota() -> None:
    quotas, who = QuotaGuard(QuotaConfig()), Principal("a", "a", "a", Quota(documents=1))
    stored: list[int] = []

    def store(number: int) -> bool:
        try:
            with quotas.documents(who, lambda: len(stored), lambda: 1):
                time.sleep(0.1)
                stored.append(number)
        except ApiError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(store, range(4))) == len(stored) == 1
