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
from ragkv.config import ReuseMode
from ragkv.scheduling.encoding import neutral_ids
from ragkv.scheduling.encoding.encoder import NEUTRAL_TOKENS
from ragkv.store import CODECS, Identity
from tests import reference, tiny_models
from tests.engine.helpers import A, B, C, Q, close, counts, stored, text_engine
from tests.fixed import fixed
from tests.toy_tokenizers import byte_tokenizer

PREFIX = [1]
NEUTRAL = tiny_models.tokens(50, seed=77)  # longer than the sliding windows of tiny models


@pytest.fixture(autouse=True)
def neutral(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines without a tokenizer get token ids as their neutral text."""
    monkeypatch.setattr("ragkv.engine.neutral_ids", lambda _tokenizer: tuple(NEUTRAL))


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
            engine.warm([A])
            adapter = engine.model.adapter
            tables = engine.model.adapter.rope.tables(len(ids))
            kv = stored(engine, A)
        if adapter.rope.frequencies(start) != tables.frequencies:
            pytest.skip(
                "the text's KV is that of its own length, and this family's frequencies follow "
                "the length"
            )
        assert kv is not None
        for layer, theirs in enumerate(cache.layers):
            cos, sin = tables.span(adapter.rope_kind(layer), start, len(ids))
            close(adapter.rotate(layer, kv[layer, :1], cos, sin)[0], theirs.keys[0, :, -len(A) :])
            close(kv[layer, 1], theirs.values[0, :, -len(A) :])

    def test_ratio_one_equals_a_full_prefill_and_the_first_passage_becomes_exact(
        self, family: str
    ) -> None:
        logits, _ = reference.full_prefill(tiny_models.model(family), PREFIX + A + B + Q)
        with engine_of(family) as engine:
            engine.warm([A, B])
            first = engine.prefill(Q, [A, B], ratio=1.0)
            engine.flush()  # the first passage's entry alone is made now
            second = engine.prefill(Q, [A, B], ratio=1.0)
        assert (first.reuse.exact, second.reuse.exact) == (len(PREFIX), len(PREFIX) + len(A))
        for prefill in (first, second):
            close(prefill.logits, logits)


class TestWhichEntryIsUsed:
    def test_only_a_passage_that_stands_first_gets_an_entry_alone(self) -> None:
        with engine_of() as engine:
            engine.warm([A, B])
            engine.prefill(Q, [A, B])
            engine.flush()
            expected, alone = engine.entries.encoder.identities
            assert engine.entries.gc() == 0
            found = [
                [engine.store.contains(one.key(chunk)) for one in (expected, alone)]
                for chunk in (A, B)
            ]
        assert found == [[True, True], [True, False]]
        # what is exact nowhere may be rounded
        assert (expected.codec, alone.codec) == ("int8", "raw")

    @pytest.mark.parametrize("reuse", ["prefix", "fused"])
    def test_the_first_passage_is_computed_until_its_entry_alone_is_there(
        self, reuse: ReuseMode
    ) -> None:
        with engine_of() as engine:
            engine.warm([A])
            first = engine.prefill(Q, [A], reuse=reuse)
            engine.flush()
            second = engine.prefill(Q, [A], reuse=reuse)
        assert counts(first.reuse) == (len(PREFIX), 0, 0, len(A) + len(Q))
        assert "exact KV is stored for the next request" in first.spans[1].why
        assert counts(second.reuse) == (len(PREFIX) + len(A), 0, 0, len(Q))

    @pytest.mark.parametrize("selector", ["first-k", "attention"])
    def test_a_question_gets_one_answer_and_the_first_passage_is_computed_once(
        self, selector: str
    ) -> None:
        with engine_of() as engine:
            engine.warm([A, B])
            first = engine.prefill(Q, [A, B], ratio=0.5, selector=selector)
            engine.flush()
            second = engine.prefill(Q, [A, B], ratio=0.5, selector=selector)
        close(first.logits, second.logits)
        assert first.reuse.compute - second.reuse.compute == pytest.approx(
            len(A) / len(first.token_ids)
        )

    def test_a_long_first_passage_is_fused_at_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ragkv.prompt.planner.MOST_IN_PLACE", len(A) - 1)
        with engine_of() as engine:
            engine.warm([A])
            assert engine.prefill(Q, [A]).spans[1].state == "fused"

    @pytest.mark.parametrize("codec", [name for name in CODECS if name != "raw"])
    def test_with_a_codec_that_rounds_nothing_is_exact_and_no_entry_alone_is_made(
        self, codec: str
    ) -> None:
        with engine_of(store=StoreConfig(codec=codec)) as engine:
            engine.warm([A])
            engine.prefill(Q, [A])
            engine.flush()
            assert not CODECS[codec].lossless
            assert not engine.store.contains(engine.entries.encoder.alone.key(A))

    def test_entries_of_a_store_made_before_are_used_and_said_and_expected_ones_are_made(
        self, tmp_path: Path
    ) -> None:
        store = StoreConfig(directory=str(tmp_path))
        with engine_of(store=store, stored_kv="alone") as engine:
            engine.warm([A, B])
        with engine_of(store=store) as engine:
            reuse = engine.prefill(Q, [A, B]).reuse
            assert reuse.missed_chunks == 0 and reuse.exact == len(PREFIX) + len(A)
            assert any("1 chunks were fused from KV encoded alone" in note for note in reuse.notes)
            engine.flush()
            again = engine.prefill(Q, [A, B]).reuse
            assert not any("alone" in note for note in again.notes)

    def test_a_damaged_expected_entry_is_replaced_by_the_one_alone(self) -> None:
        with engine_of() as engine:
            engine.warm([A, B])
            engine.prefill(Q, [B])
            engine.flush()  # B has both entries now
            engine.store.delete(engine.entries.identity.key(B))
            reuse = engine.prefill(Q, [A, B]).reuse
            assert reuse.missed_chunks == 0


class TestDeletion:
    def test_deleting_a_chunk_drops_all_its_entries_and_counts_it_once(self) -> None:
        with engine_of() as engine:
            engine.warm([A])
            engine.prefill(Q, [A])
            engine.flush()
            assert engine.delete([A]) == 1
            assert not engine.entries.has(A)
            assert engine.delete([A]) == 0

    def test_clearing_up_keeps_both_kinds_and_drops_those_of_another_text(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = StoreConfig(directory=str(tmp_path))
        with monkeypatch.context() as patch:
            patch.setattr("ragkv.engine.neutral_ids", lambda _tokenizer: tuple(C))
            with engine_of(store=store) as engine:
                engine.warm([A])
        with engine_of(store=store) as engine:
            engine.warm([A, B])
            engine.prefill(Q, [A])
            engine.flush()
            assert engine.entries.retain([A, B]) == 0
            assert engine.entries.retain([A]) == 1  # B's
            assert engine.entries.gc() > 0
            assert all(
                engine.store.contains(one.key(A)) for one in engine.entries.encoder.identities
            )
            assert engine.entries.gc() == 0


def test_an_entry_is_the_same_whatever_was_encoded_with_it_or_before() -> None:
    secret = tiny_models.tokens(40, seed=99)
    found = []
    for others in ([], [secret], [secret, B, C]):
        with engine_of() as engine:
            if others:
                engine.warm([*others, A])
                engine.delete([A])
                engine.prefill(Q, [*others, A])  # A is missed behind them
                engine.flush()
            engine.warm([A])
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
        monkeypatch.setattr("ragkv.engine.neutral_ids", neutral_ids)
        with text_engine() as engine:
            limit = engine.model.adapter.context_length
            assert limit is not None
            chunk = engine.chunk("long " * ((limit - 40) // 5))
            engine.warm([chunk])
            assert engine.prefill("Q?", [chunk], ratio=0.1).reuse.missed_chunks == 0

    def test_engines_on_one_model_compute_it_once(self) -> None:
        with (
            engine_of() as engine,
            engine.with_config(EngineConfig(store=StoreConfig(tenant="other"))) as other,
        ):
            engine.warm([A])
            other.warm([A])
            assert len(engine.model.contexts) == 1
            assert other.model.contexts is engine.model.contexts


def test_the_identity_of_kv_alone_has_no_field_that_older_entries_lack() -> None:
    alone = Identity("w", "a", "r", "float32", "", "t", "c")
    assert '"behind"' not in alone.to_json()
    assert Identity.from_json(alone.to_json()) == alone
    expected = Identity("w", "a", "r", "float32", "", "t", "c", behind="text")
    assert Identity.from_json(expected.to_json()) == expected
    assert expected.key(A) != alone.key(A)
