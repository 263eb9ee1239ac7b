"""The throughput benchmark's parts: an exact, bounded baseline, and a queue that agrees with theory."""

import pytest
import torch

from benchmarks.throughput_requests import ExactPrefix, Request, Service, mean_ttft, poisson_gaps
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
    def test_the_queue_agrees_with_theory_for_equal_service_times(self) -> None:
        load = 0.5  # M/D/1: s (1 + load / (2 (1 - load)))
        ttft_s = mean_ttft([Service(0.1, 0.0, 0.0)], load / 0.1, poisson_gaps(100_000, 0))
        assert ttft_s == pytest.approx(0.15, rel=0.03)
