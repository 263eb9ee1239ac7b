"""The same rules hold for every shape of prompt. A call that cannot be served is refused before any
work.
"""

import itertools
from typing import Any

import pytest
import torch

from ragkv import Chunk, Engine
from ragkv.errors import ConfigError, InputError, PromptTooLongError, RagKVError
from tests import reference, tiny_models
from tests.engine.helpers import (
    PREFIX,
    A,
    B,
    C,
    Q,
    close,
    counts,
    engine_of,
    full_prefill,
    ids,
    llama,
    stored,
    text_engine,
)


def concatenated(
    chunks: list[list[int]], question: list[int], family: str = "llama"
) -> torch.Tensor:
    """Logits of position-aligned concatenation, from the naive reference."""
    return reference.concatenation(lambda: tiny_models.model(family), PREFIX, chunks, question)[0]


@pytest.fixture(scope="module")
def engine() -> Any:
    """An engine for refused calls: nothing is ever stored in it."""
    with engine_of() as engine:
        yield engine


class TestMisses:
    @pytest.mark.parametrize(
        "missed", [c for n in (1, 2, 3) for c in itertools.combinations(range(3), n)], ids=str
    )
    def test_a_missed_chunk_is_computed_in_place_and_found_by_the_next_request(
        self, missed: tuple[int, ...]
    ) -> None:
        chunks = [A, B, C]
        with engine_of() as engine:
            engine.entries.encode(
                [chunk for index, chunk in enumerate(chunks) if index not in missed]
            )
            prefill = engine.prefill(Q, chunks, ratio=0.0)

            missing = sum(len(chunks[index]) for index in missed)
            assert prefill.reuse.computed == missing + len(Q)
            assert (prefill.reuse.missed_chunks, prefill.reuse.missed_tokens) == (
                len(missed),
                missing,
            )
            _, joined = reference.concatenation(llama, PREFIX, chunks, Q)
            starts = [1, 1 + len(A), 1 + len(A) + len(B)]
            rows = [range(starts[index], starts[index] + len(chunks[index])) for index in missed]
            computed = torch.tensor([*itertools.chain(*rows), *range(25, 29)])
            close(prefill.logits, reference.selective(llama, ids(chunks), joined, computed)[0])

            engine.flush()
            again = engine.prefill(Q, chunks, ratio=0.0)
            assert (again.reuse.missed_chunks, again.reuse.computed) == (0, len(Q))
            close(again.logits, concatenated(chunks, Q))

    def test_missed_and_warmed_chunks_get_the_same_kv(self) -> None:
        """Up to rounding: on some processors a product's last bits depend on how many chunks are
        encoded together.
        """
        with engine_of() as missed, engine_of() as warmed:
            missed.prefill(Q, [A, B, A, C])
            missed.flush()
            warmed.entries.encode([A, B, C])
            for chunk in (A, B, C):
                close(stored(missed, chunk), stored(warmed, chunk))
            assert missed.stats().store.tiers[0].entries == 3

    def test_a_request_with_misses_at_ratio_one_equals_a_full_prefill(self) -> None:
        with engine_of() as engine:
            engine.entries.encode([B])
            close(engine.prefill(Q, [A, B, C], ratio=1.0).logits, full_prefill(ids([A, B, C]))[0])


class TestShapes:
    @pytest.mark.parametrize(
        "chunks",
        [
            [],
            [A],
            [A, A],
            [A, A, A],
            [A, B, A],
            [B, A, C],
            [C, B, A],
            [[7]],
            [[7], A, [7], [8]],
            [A + B, A, B],
        ],
    )
    def test_ratio_zero_equals_concatenation_and_ratio_one_a_full_prefill(
        self, chunks: list[list[int]]
    ) -> None:
        joined = concatenated(chunks, Q)
        full = full_prefill(ids(chunks))[0]
        with engine_of() as engine:
            engine.entries.encode(chunks)
            for selector in ("hkvd", "first-k"):
                fused = engine.prefill(Q, chunks, ratio=0.0, selector=selector)
                assert fused.reuse.missed_chunks == 0
                assert fused.token_ids.tolist() == ids(chunks)
                close(fused.logits, joined)
                close(engine.prefill(Q, chunks, ratio=1.0, selector=selector).logits, full)

    @pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
    def test_a_chunk_may_be_longer_than_the_window(self, family: str) -> None:
        chunks = [tiny_models.tokens(3 * tiny_models.WINDOW, seed) for seed in (5, 6)]
        with engine_of(family) as engine:
            engine.entries.encode(chunks)
            close(engine.prefill(Q, chunks, ratio=0.0).logits, concatenated(chunks, Q, family))
            close(engine.prefill(Q, chunks, ratio=1.0).logits, full_prefill(ids(chunks), family)[0])

    @pytest.mark.parametrize("chunks", [[], [A], [A, B]], ids=["no chunk", "one", "two"])
    def test_only_the_last_token_is_computed_without_a_question(
        self, chunks: list[list[int]]
    ) -> None:
        with engine_of() as engine:
            engine.entries.encode(chunks)
            prefill = engine.prefill([], chunks, ratio=0.5)
            assert prefill.reuse.computed == 1
            assert prefill.reuse.tokens == len(ids(chunks, []))
            whole = engine.prefill([], chunks, ratio=1.0)
            close(whole.logits, full_prefill(ids(chunks, []))[0])
            assert len(engine.answer([], chunks, max_new_tokens=2, min_new_tokens=2).token_ids) == 2

    def test_the_first_chunk_is_exact_at_position_zero_without_a_prefix(self) -> None:
        model = llama()
        model.config.bos_token_id = None
        with Engine(model) as engine:
            engine.entries.encode([A, B])
            prefill = engine.prefill(Q, [A, B], ratio=0.0)
            assert counts(prefill.reuse) == (len(A), len(B), 0, len(Q))
            close(engine.prefill(Q, [A], ratio=0.0).logits, full_prefill(A + Q)[0])
            with pytest.raises(InputError, match="empty"):
                engine.prefill([], [])

    def test_chunks_may_be_given_as_text_ids_or_chunks(self) -> None:
        with text_engine() as engine:
            ready = engine.chunk("ab", {"source": "x"})
            assert ready.metadata == {"source": "x"}
            forms = ["ab", ready, list(ready.token_ids), torch.tensor(ready.token_ids)]
            assert {tuple(engine.prefill("c", [form]).token_ids.tolist()) for form in forms} == {
                (1, *engine.token_ids("ab\n\nc"))
            }


class TestRefusals:
    """Every refusal is one sentence, raised before anything is computed or stored."""

    @pytest.mark.parametrize(
        ("how", "error", "says"),
        [
            (dict(question=[-1]), InputError, "-1 is not in the model's vocabulary of 199"),
            (dict(question=[5, 2**70]), InputError, "vocabulary"),
            (dict(question="text"), InputError, "no tokenizer"),
            (dict(question=[1.5]), InputError, "token ids"),
            (dict(question=None), InputError, "token ids"),
            (dict(chunks=["text"]), InputError, "no tokenizer"),
            (dict(chunks=[Chunk(())]), InputError, "no tokens"),
            (dict(chunks=[Chunk((5, 300))]), InputError, "300"),
            (dict(chunks=[5, 6]), InputError, "token ids"),
            (dict(chunks="text"), InputError, "in a list"),
            (dict(chunks=Chunk((5,))), InputError, "a list"),
            (dict(ratio=-0.1), InputError, "ratio is -0.1"),
            (dict(ratio=float("nan")), InputError, "ratio is nan"),
            (dict(ratio="much"), InputError, "ratio is 'much'"),
            (dict(selector="bogus"), ConfigError, "hkvd-gradual"),
            (dict(selector=""), ConfigError, "Known"),
            (dict(reuse="bogus"), InputError, "'fused', 'prefix', 'none'"),
            (dict(reuse=None), InputError, "'fused'"),
            (dict(question=[5] * 512), PromptTooLongError, "513 tokens .* context is 512"),
            (dict(chunks=[[5] * 300, [6] * 300]), PromptTooLongError, "605 tokens"),
        ],
        ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
    )
    def test_a_wrong_prefill_call_is_refused_and_stores_nothing(
        self, engine: Engine, how: dict[str, Any], error: type[Exception], says: str
    ) -> None:
        how = {"question": Q, "chunks": [], **how}
        with pytest.raises(error, match=says):
            engine.prefill(**how)
        with pytest.raises(error, match=says):
            engine.answer(**how)
        engine.flush()
        assert engine.stats().store.tiers[0].entries == 0

    @pytest.mark.parametrize(
        ("how", "says"),
        [
            (dict(max_new_tokens=0), "max_new_tokens is 0"),
            (dict(max_new_tokens=-1), "max_new_tokens is -1"),
            (dict(stop=["x"]), "no tokenizer"),
            (dict(num_beams=2), "Unknown option 'num_beams'"),
            (dict(temprature=2), "Did you mean 'temperature'"),
            (dict(temperature=-1.0), r"temperature is -1.0; it must be a number, in \[0.0, 2.0\]"),
            (dict(logit_bias={199: 1.0}), "Token id 199 is not in the model's vocabulary"),
        ],
        ids=str,
    )
    def test_a_wrong_answer_call_is_refused_and_stores_nothing(
        self, engine: Engine, how: dict[str, Any], says: str
    ) -> None:
        with pytest.raises(InputError, match=says):
            engine.answer(Q, [A], **how)
        engine.flush()
        assert engine.stats().store.tiers[0].entries == 0

    @pytest.mark.parametrize(
        "wrong", [[], [-1], [199], [5] * 512], ids=["empty", "negative", "unknown", "too long"]
    )
    def test_warming_a_wrong_chunk_is_refused_and_stores_nothing(
        self, engine: Engine, wrong: list[int]
    ) -> None:
        with pytest.raises(InputError):
            engine.entries.encode([A, wrong])
        assert engine.stats().store.tiers[0].entries == 0

    def test_a_prompt_that_fills_the_context_is_accepted(self, engine: Engine) -> None:
        question = tiny_models.tokens(507)
        assert len(engine.answer(question, max_new_tokens=4, min_new_tokens=4).token_ids) == 4
        assert engine.prefill(tiny_models.tokens(511)).reuse.tokens == 512

    def test_a_closed_engine_refuses_every_call(self) -> None:
        engine = engine_of()
        engine.entries.encode([A])
        engine.close()
        engine.close()
        for call in (
            lambda: engine.prefill(Q, [A]),
            lambda: engine.answer(Q, [A]),
            lambda: engine.entries.encode([B]),
            lambda: engine.entries.delete([A]),
        ):
            with pytest.raises(RagKVError, match="closed"):
                call()
