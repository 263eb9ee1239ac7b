"""Prometheus metrics: their values, and labels with a bounded set of values."""

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ragkv.api.keys import KeyFile
from ragkv.api.metrics import Metrics, TenantStats
from ragkv.api.settings import AuthConfig, ServeConfig
from ragkv.engine_stats import EngineStats
from ragkv.scheduling import QueueStats
from ragkv.store.tiers import StoreStats, TierKind, TierStats

from .small_app import REUSE, TIMING, small_client

KNOWN_LABELS = {
    "part",
    "state",
    "tenant",
    "tier",
    "le",
    "http_route",
    "http_request_method",
    "version",
}
KNOWN_LABELS |= {"replica", "remote", "reason"}
KNOWN_LABELS |= {"http_response_status_code", "implementation", "major", "minor", "patchlevel"}


def _tenant(name: str, hits: int = 0, served: int = 0, sessions: int = 0) -> TenantStats:
    tier = TierStats(TierKind.MEMORY, 3, 1000, 5000, hits, 2, 1, 0, 64, 32)
    queue = QueueStats(waiting=4, admitted=1, served=served, refused=0, expired=0, cancelled=0)
    engine = EngineStats("llama", 2, 8, "float32", "", StoreStats((tier,), 7, 1, 2), queue)
    return TenantStats(name, engine, sessions)


def _samples(text: str | bytes) -> dict[tuple[str, ...], float]:
    text = text.decode() if isinstance(text, bytes) else text
    families = list(text_string_to_metric_families(text))
    return {
        (sample.name, *(v for k, v in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_an_answer_is_recorded_as_a_whole_and_in_its_parts() -> None:
    metrics = Metrics(lambda: ())
    metrics.record_answer(TIMING, REUSE, 5)
    metrics.record_answer(TIMING, REUSE, 1)
    found = _samples(generate_latest(metrics.registry))
    assert found["gen_ai_server_time_to_first_token_seconds_count",] == 2
    assert found["gen_ai_server_time_to_first_token_seconds_sum",] == pytest.approx(0.2)
    assert found["ragkv_time_to_first_token_part_seconds_sum", "queue"] == pytest.approx(0.02)
    assert found["ragkv_time_to_first_token_part_seconds_sum", "prefill"] == pytest.approx(0.1)
    assert found["ragkv_time_to_first_token_part_seconds_count", "fuse"] == 2
    # one token has no token after the first
    assert found["gen_ai_server_time_per_output_token_seconds_count",] == 1
    assert found["gen_ai_server_time_per_output_token_seconds_sum",] == pytest.approx(0.1)
    states = [
        found["ragkv_prompt_tokens_total", state]
        for state in ("exact", "fused", "recomputed", "computed")
    ]
    assert states == [20, 40, 10, 14]
    assert found["ragkv_answer_tokens_total",] == 6
    assert found["ragkv_missed_chunks_total",] == 2
    assert found["ragkv_recompute_ratio_bucket", "0.2"] == 2
    assert found["ragkv_recompute_ratio_bucket", "0.15"] == 0


def test_requests_are_recorded_by_route_template_not_by_path(tmp_path: Path) -> None:
    with small_client(ServeConfig(home=str(tmp_path)), tenants=[_tenant("a")]) as it:
        for number in range(20):
            it.get(f"/v1/fails/{number}")
            it.get(f"/v1/nowhere/{number}")
            it.get(f"/static/{number}")
            it.request(f"ODD{number}", "/v1/echo")
        it.post("/v1/answers", json={})
        text = it.get("/metrics").text
    found = _samples(text)
    name = "http_server_request_duration_seconds_count"
    assert found[name, "GET", "500", "/v1/fails/{word}"] == 20
    assert found[name, "GET", "404", "none"] == 20
    assert found[name, "GET", "404", "/static/"] == 20
    assert sum(value for key, value in found.items() if key[:2] == (name, "other")) == 20
    assert found[name, "POST", "200", "/v1/answers"] == 1
    assert found["ragkv_requests_running",] == 1  # the request for the metrics
    assert found["ragkv_ready",] == 1
    families = text_string_to_metric_families(text)
    labels = {label for family in families for sample in family.samples for label in sample.labels}
    assert labels <= KNOWN_LABELS


@pytest.mark.parametrize(
    ("config", "headers", "status"),
    [
        ({}, {}, 200),
        ({}, {"x-forwarded-for": "10.0.0.1"}, 403),
        ({}, {"forwarded": "for=10.0.0.1"}, 403),
        ({"host": "0.0.0.0"}, {}, 403),
        ({"auth": AuthConfig(metrics_token="t0ken")}, {}, 401),
        ({"auth": AuthConfig(metrics_token="t0ken")}, {"authorization": "Bearer t0ke"}, 401),
        ({"auth": AuthConfig(metrics_token="t0ken")}, {"authorization": "Bearer t0ken"}, 200),
        (
            {"host": "0.0.0.0", "auth": AuthConfig(metrics_token="t0ken")},
            {"authorization": "Bearer t0ken"},
            200,
        ),
    ],
)
def test_metrics_are_for_this_machine_or_holders_of_the_token(
    tmp_path: Path, config: dict[str, Any], headers: dict[str, str], status: int
) -> None:
    secret, _ = KeyFile(tmp_path / "keys.json").add("alice")
    with small_client(ServeConfig(home=str(tmp_path), **config)) as it:
        assert it.get("/metrics", headers=headers).status_code == status
        if "auth" in config:
            assert (
                it.get("/metrics", headers={"authorization": f"Bearer {secret}"}).status_code == 401
            )
