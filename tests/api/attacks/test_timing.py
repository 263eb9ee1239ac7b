"""What a key learns by reuse and by times of first tokens: nothing of another tenant (SpliceLeak,
arXiv 2606.21842).
"""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.api.whole import ingest, key, whole

PROBES = 2_000


class Two:
    """A service with two tenants: the victim stores passages, and the attacker sends some in
    messages.
    """

    def __init__(self, client: TestClient, home: Path) -> None:
        self._client = client
        self._random = random.Random(7)
        self.victim = key(home, "victim")
        self.attacker = key(home, "attacker")

    def passage(self) -> str:
        return " ".join(
            f"{self._random.choice('bdfklmnprst')}{self._random.randrange(10**4)}"
            for _ in range(30)
        )

    def store(self, who: dict[str, str], texts: list[str]) -> None:
        for start in range(0, len(texts), 50):
            docs = [
                {"id": f"{start + n}", "text": text}
                for n, text in enumerate(texts[start : start + 50])
            ]
            assert ingest(self._client, docs, headers=who).status_code == 201

    def probe(self, who: dict[str, str], text: str) -> tuple[dict[str, Any], float]:
        """What the report says of a message with the text, and the seconds to its answer of one
        token.
        """
        body = {
            "model": "reader",
            "messages": [{"role": "user", "content": f"{text}\n\nWho?"}],
            "max_tokens": 1,
        }
        began = time.perf_counter()
        answered = self._client.post("/v1/chat/completions", json=body, headers=who)
        took = time.perf_counter() - began
        assert answered.status_code == 200, answered.text
        return answered.json()["ragkv"]["reuse"], took


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    with whole(tmp_path) as client:
        yield Two(client, tmp_path)


def test_a_passage_of_another_tenant_is_not_reused_and_one_of_the_own_tenant_is(two: Two) -> None:
    stored = two.passage()
    unknown = two.passage()
    two.store(two.victim, [stored])
    assert (
        two.probe(two.victim, stored)[0]["fused"] + two.probe(two.victim, stored)[0]["exact"] > 30
    )
    for text in (stored, unknown):
        reuse, _ = two.probe(two.attacker, text)
        assert (reuse["fused"], reuse["recomputed"], reuse["missed_chunks"]) == (0, 0, 0)
        assert reuse["computed"] > 30
    # what its own tenant holds, a key can tell: it may read it, too
    two.store(two.attacker, [unknown])
    assert (
        two.probe(two.attacker, unknown)[0]["fused"] + two.probe(two.attacker, unknown)[0]["exact"]
        > 30
    )


@pytest.mark.slow
def test_first_tokens_do_not_tell_whether_another_tenant_has_a_passage(two: Two) -> None:
    texts = [two.passage() for _ in range(PROBES)]
    stored = set(texts[::2])
    two.store(two.victim, texts[::2])
    random.Random(1).shuffle(texts)
    times = sorted((two.probe(two.attacker, text)[1], text in stored) for text in texts)
    ranks = sum(rank for rank, (_, is_stored) in enumerate(times, 1) if is_stored)
    half = PROBES // 2
    # the area under the curve: .5 is chance, deviation .013
    told_apart = (ranks - half * (half + 1) / 2) / half**2
    print(f"{PROBES} requests: told apart {told_apart:.3f}")
    assert abs(told_apart - 0.5) < 0.05
