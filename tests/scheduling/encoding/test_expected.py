"""Expected KV: what is stored of a chunk to be fused stood behind the neutral text, and behind
nothing else.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.scheduling.encoding.contexts import KEPT_CONTEXTS, NEUTRAL_TOKENS, neutral_ids
from ragkv.store.entry import Identity
from tests import reference, tiny_models
from tests.engine.helpers import A, B, C, Q, close, counts, stored, text_engine
from tests.fixed import fixed
from tests.toy_tokenizers import byte_tokenizer

PREFIX = [1]
NEUTRAL = tiny_models.tokens(50, seed=77)  # longer than the sliding windows of tiny models


@pytest.fixture(autouse=True)
def neutral(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines without a tokenizer get token ids as their neutral text."""
    monkeypatch.setattr("ragkv.assembly.neutral_ids", lambda _tokenizer: tuple(NEUTRAL))


def engine_of(family: str = "llama", store: StoreConfig | None = None, **fusion: Any) -> Engine:
    config = EngineConfig(store=store or StoreConfig(), fusion=fixed(**fusion))
    return Engine(tiny_models.model(family), config=config)


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
class TestEveryFamily:
    def test_an_entry_is_the_chunks_kv_behind_prefix_and_neutral_text(self, family: str) -> None:
        ids = PREFIX + NEUTRAL + A
        _, cache = reference.full_prefill(tiny_models.model(family), ids)
        start = len(ids) - len(A)
        with engine_of(family, StoreConfig(codec="raw")) as engine:
            engine.entries.encode([A])
            adapter = engine.model.adapter
            tables = engine.model.adapter.rope.tables(len(ids))
            kv = stored(engine, A)
        if adapter.rope.digest(start) != tables.rope_digest:
            pytest.skip(
                "the text's KV is that of its own length, and this family's frequencies follow "
                "the length"
            )
        assert kv is not None
        for layer, theirs in enumerate(cache.layers):
            cos, sin = tables.span(adapter.rope_kind(layer), start, len(ids))
            close(adapter.rotate(layer, kv[layer, :1], cos, sin)[0], theirs.keys[0, :, -len(A) :])
            close(kv[layer, 1], theirs.values[0, :, -len(A) :])

    def test_ratio_one_equals_a_full_prefill(self, family: str) -> None:
        logits, _ = reference.full_prefill(tiny_models.model(family), PREFIX + A + B + Q)
        with engine_of(family) as engine:
            engine.entries.encode([A, B])
            prefill = engine.prefill(Q, [A, B], ratio=1.0)
        assert prefill.reuse.exact == len(PREFIX)
        close(prefill.logits, logits)


class TestOneEntry:
    @pytest.mark.parametrize("selector", ["first-k", "attention"])
    def test_a_question_asked_twice_has_one_answer_and_one_cost(self, selector: str) -> None:
        with engine_of() as engine:
            engine.entries.encode([A, B])
            first = engine.prefill(Q, [A, B], ratio=0.5, selector=selector)
            engine.flush()
            second = engine.prefill(Q, [A, B], ratio=0.5, selector=selector)
            assert sum(tier.entries for tier in engine.stats().store.tiers) == 2
        close(first.logits, second.logits)
        assert first.reuse == second.reuse

    def test_a_leading_passage_is_fused_but_for_its_first_tokens(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ragkv.prompt.planning.LEADING_TOKENS", 4)
        with engine_of() as engine:
            engine.entries.encode([A, B])
            spans = engine.prefill(Q, [A, B], ratio=0.0).spans
        assert [(one.kind, one.tokens, one.state) for one in spans] == [
            ("prefix", len(PREFIX), "exact"),
            ("chunk", 4, "computed"),
            ("chunk", len(A) - 4, "fused"),
            ("chunk", len(B), "fused"),
            ("question", len(Q), "computed"),
        ]

    def test_without_a_neutral_text_a_leading_passage_is_exact(self) -> None:
        """As in the papers: its entry saw just what precedes it here."""
        with engine_of(stored_kv="alone") as engine:
            engine.entries.encode([A])
            assert counts(engine.prefill(Q, [A]).reuse) == (len(PREFIX) + len(A), 0, 0, len(Q))
            assert engine.entries.identity.codec == "raw"

    def test_entries_made_behind_another_text_are_misses_and_cleared_up(
        self, tmp_path: Path
    ) -> None:
        store = StoreConfig(directory=str(tmp_path))
        with engine_of(store=store, stored_kv="alone") as engine:
            engine.entries.encode([A, B])
        with engine_of(store=store) as engine:
            assert engine.prefill(Q, [B]).reuse.missed_chunks == 1
            engine.flush()
            assert engine.prefill(Q, [B]).reuse.missed_chunks == 0
            assert engine.entries.gc() > 0
            assert engine.prefill(Q, [B]).reuse.missed_chunks == 0
            assert engine.entries.gc() == 0


def test_an_entry_is_the_same_whatever_was_encoded_with_it_or_before() -> None:
    secret = tiny_models.tokens(40, seed=99)
    found = []
    for others in ([], [secret], [secret, B, C]):
        with engine_of() as engine:
            if others:
                engine.entries.encode([*others, A])
                engine.entries.delete([A])
                engine.prefill(Q, [*others, A])  # A is missed behind them
                engine.flush()
            engine.entries.encode([A])
            found.append(stored(engine, A))
    for kv in found[1:]:
        torch.testing.assert_close(kv, found[0], atol=1e-5, rtol=1e-4)


class TestNeutralText:
    def test_it_is_the_end_of_the_shipped_text_and_of_limited_length(self) -> None:
        ids = neutral_ids(byte_tokenizer())
        assert len(ids) == NEUTRAL_TOKENS
        assert byte_tokenizer().decode(ids).endswith("mobile one.\n\n")

    def test_without_a_tokenizer_that_knows_its_words_chunks_are_encoded_alone(self) -> None:
        assert neutral_ids(None) == ()
        words = Tokenizer(WordLevel({"[UNK]": 0, "the": 1, "of": 2}, unk_token="[UNK]"))
        words.pre_tokenizer = Whitespace()
        assert neutral_ids(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")) == ()

    def test_it_leaves_room_for_the_chunk_in_a_short_context(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ragkv.assembly.neutral_ids", neutral_ids)
        with text_engine() as engine:
            limit = engine.model.adapter.context_length
            assert limit is not None
            chunk = engine.chunk("long " * ((limit - 40) // 5))
            engine.entries.encode([chunk])
            assert engine.prefill("Q?", [chunk], ratio=0.1).reuse.missed_chunks == 0

    def test_engines_on_one_model_compute_it_once(self) -> None:
        with (
            engine_of() as engine,
            engine.with_config(EngineConfig(store=StoreConfig(tenant="other"))) as other,
        ):
            engine.entries.encode([A])
            other.entries.encode([A])
            assert len(engine.model.contexts) == 2  # the prefix, and the prefix with the text
            assert other.model.contexts is engine.model.contexts


def test_the_contexts_of_a_model_that_were_not_used_for_longest_are_dropped() -> None:
    with engine_of() as engine:
        contexts = engine.model.contexts

        def encode_behind(token: int) -> None:
            contexts.of((token,))

        for token in range(10, 10 + KEPT_CONTEXTS):
            encode_behind(token)
        encode_behind(10)
        encode_behind(30)
        assert len(contexts) == KEPT_CONTEXTS
        assert (10,) in contexts and (30,) in contexts and (11,) not in contexts


def test_the_identity_of_kv_alone_has_no_field_that_older_entries_lack() -> None:
    alone = Identity("w", "a", "r", "float32", "", "t", "c")
    assert '"behind"' not in alone.to_json()
    assert Identity.from_json(alone.to_json()) == alone
    expected = Identity("w", "a", "r", "float32", "", "t", "c", neutral="text")
    assert '"behind":"text"' in expected.to_json() and "neutral" not in expected.to_json()
    assert Identity.from_json(expected.to_json()) == expected
    assert expected.key(A) != alone.key(A)
