"""The throughput benchmark's parts: an exact, bounded baseline, and a queue that agrees with theory."""

import math
import time
from pathlib import Path

import pytest
import torch

from benchmarks.throughput_requests import (
    ExactPrefix,
    Fused,
    Request,
    Served,
    Server,
    Service,
    highest_rate,
    load,
    mean_ttft,
    measured_ttfts,
    poisson_gaps,
    queue_ttfts,
    saturation,
    services,
)
from tests import reference, tiny_models

TOKENS = 8
A, B, C, D = (tuple(tiny_models.tokens(TOKENS, seed)) for seed in (1, 2, 3, 4))
Q = tuple(tiny_models.tokens(3, seed=5))
PIECE_BYTES = 4 * 2 * 2 * TOKENS * 16 * 4  # L x (K, V) x G x T x D x float32


def prefix_store(pieces: int) -> ExactPrefix:
    return ExactPrefix(tiny_models.model("llama"), pieces * PIECE_BYTES)


def reused(server: ExactPrefix, *chunks: tuple[int, ...]) -> int:
    """The number of chunks that a prompt of these chunks reuses."""
    return round(server.serve(Request(chunks, Q)).reused * (len(chunks) * TOKENS + len(Q)) / TOKENS)


class TestTheExactPrefixStore:
    def test_an_exact_prefix_store_reuses_the_longest_common_prefix_and_no_more(self) -> None:
        server = prefix_store(100)
        assert reused(server, A, B, C) == 0
        assert reused(server, A, B, D) == 2
        assert reused(server, A, B, C) == 3
        assert reused(server, B, A) == 0
        assert reused(server, A, D) == 1

    def test_an_exact_prefix_store_gives_the_logits_of_a_full_prefill(self) -> None:
        server = prefix_store(100)
        server.serve(Request((A, B, C), Q))
        logits, share, _ = server.prefill(Request((A, B, D), Q))
        wanted, _ = reference.full_prefill(tiny_models.model("llama"), [*A, *B, *D, *Q])
        assert share > 0.5
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)

    def test_an_exact_prefix_store_stays_in_its_budget_and_evicts_the_least_recently_used_leaf(self) -> None:
        server = prefix_store(4)
        server.serve(Request((A, B), Q))
        server.serve(Request((C, D), Q))
        assert server.size_bytes == 4 * PIECE_BYTES
        server.serve(Request((A,), Q))
        server.serve(Request((D,), Q))  # evicts B, which follows A
        assert server.size_bytes == 4 * PIECE_BYTES
        assert reused(server, C, D) == 2
        assert reused(server, A) == 1


class TestTheQueue:
    def test_the_queue_serves_first_come_first_served(self) -> None:
        times = [Service(2.0, 1.0, 0.0), Service(1.0, 0.0, 0.0)]
        assert queue_ttfts(times, [0.0, 0.5, 10.0, 10.0]) == [2.0, 3.5, 2.0, 4.0]

    def test_the_queue_agrees_with_theory_for_equal_service_times(self) -> None:
        load = 0.5  # M/D/1: s (1 + load / (2 (1 - load)))
        ttft_s = mean_ttft([Service(0.1, 0.0, 0.0)], load / 0.1, poisson_gaps(100_000, 0))
        assert ttft_s == pytest.approx(0.15, rel=0.03)

    def test_the_highest_rate_just_keeps_the_bound(self) -> None:
        times = [Service(0.1, 0.0, 0.0)]
        rate = highest_rate(times, 0.15, poisson_gaps(100_000, 0))
        assert rate == pytest.approx(5.0, rel=0.05)
        assert saturation(times) == pytest.approx(10.0)
        assert highest_rate(times, 0.09, poisson_gaps(1000, 0)) == 0.0


class RecordingServer(Server):
    """Serves in no time, and records the time of each request."""

    name = "recording"

    def __init__(self) -> None:
        self.asked: list[float] = []

    def serve(self, request: Request) -> Served:
        self.asked.append(time.perf_counter())
        return Served(time.perf_counter(), 0.0)

    def finish_background_work(self) -> None:
        return


def test_requests_of_the_real_run_are_sent_at_their_arrival_times() -> None:
    server, began = RecordingServer(), time.perf_counter()
    ttfts = measured_ttfts(server, [Request((A,), Q)] * 3, [0.1, 0.2, 0.3])
    assert all(at - began >= due for at, due in zip(sorted(server.asked), (0.1, 0.2, 0.3), strict=True))
    assert all(0.0 <= ttft < 20 for ttft in ttfts)


def test_a_load_without_a_trace_has_zipf_requests(tmp_path: Path) -> None:
    made = load(tmp_path / "absent", 3, TOKENS, tiny_models.VOCABULARY, before=5, measured=4, real=2)
    assert "synthetic" in made.name
    assert (len(made.before), len(made.measured), len(made.real)) == (5, 4, 2)
    requests = (*made.before, *made.measured, *made.real)
    assert all(len(set(request.chunks)) == 3 for request in requests)
    assert len({request.question for request in requests}) == 11
    assert len(made.corpus) < 33


def test_the_fused_server_reuses_the_ingested_chunks() -> None:
    model = tiny_models.model("llama")
    server = Fused(model, 10 * (PIECE_BYTES + 2 * TOKENS), 0.2, [A, B, C, D])
    requests = [Request((A, B, C), Q), Request((C, A), Q)]
    found = services([server], requests)[server.name]
    server.engine.close()
    recomputed = [
        math.ceil(0.2 * 2 * TOKENS),
        math.ceil(0.2 * TOKENS),
    ]  # the first chunk, if it is exact, is not recomputed
    for service, request, count in zip(found, requests, recomputed, strict=True):
        length = 1 + TOKENS * len(request.chunks) + len(Q)
        assert service.reused == pytest.approx((length - len(Q) - count) / length)
