"""With KCache, fused prompts, conversations and concurrent requests decode as they do
without it.
"""

from typing import Any

import pytest

from ragkv import Engine, KCacheConfig
from ragkv.model import PromptKV
from ragkv.model.kcache import OffloadedKV, Offloading
from tests import tiny_models

from .helpers import Q, engine_of

# six
CHUNKS = [tiny_models.tokens(count, seed) for seed, count in enumerate((9, 14, 8, 21, 7, 12), 20)]
# all keys, with `forced` by the top-N path all the same
FORCED = KCacheConfig(top_n=10_000, resident_layers=1)
FEW = KCacheConfig(top_n=4, resident_layers=0)


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The top-N path is used although N leaves no rows out, so that its results must be equal."""
    monkeypatch.setattr(Offloading, "refusal", lambda *_: None)


def answers(engine: Engine, **how: Any) -> tuple[int, ...]:
    return engine.answer(Q, CHUNKS, max_new_tokens=40, min_new_tokens=40, **how).token_ids


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "qwen3"])
@pytest.mark.parametrize("selector", ["attention", "hkvd-gradual"])
def test_a_fused_prompt_of_six_chunks_has_the_same_answer_with_kcache(
    family: str, selector: str
) -> None:
    said = []
    for kcache in (None, FORCED):
        with engine_of(family, kcache=kcache) as engine:
            engine.entries.encode(CHUNKS)
            prefill = engine.prefill(Q, CHUNKS, ratio=0.3, selector=selector)
            kv = prefill.kv  # whichever pass was the last
            assert type(kv) is (OffloadedKV if kcache else PromptKV)
            assert not isinstance(kv, OffloadedKV) or kv.host_bytes > 0
            assert prefill.reuse.fused > 0
            said.append(answers(engine, ratio=0.3, selector=selector))
    assert said[0] == said[1]


@pytest.mark.usefixtures("forced")
def test_a_conversation_of_five_turns_has_the_same_answers_and_history_with_kcache() -> None:
    turns = []
    for kcache in (None, FORCED):
        with engine_of(kcache=kcache) as engine:
            engine.entries.encode(CHUNKS)
            session = engine.session("s")
            talk = [
                engine.answer(
                    tiny_models.tokens(4, 50 + turn),
                    CHUNKS[turn : turn + 2],
                    session,
                    max_new_tokens=12,
                    ratio=0.3,
                )
                for turn in range(5)
            ]
            turns.append(
                [(answer.token_ids, answer.reuse.tokens, answer.reuse.exact) for answer in talk]
            )
            turns[-1].append(session.token_ids)
    assert turns[0] == turns[1]


def test_a_prompt_shorter_than_n_falls_back_bit_for_bit_and_the_report_says_so() -> None:
    said = []
    for kcache in (None, KCacheConfig(top_n=128)):
        with engine_of(kcache=kcache) as engine:
            engine.entries.encode(CHUNKS)
            answer = engine.answer(Q, CHUNKS, max_new_tokens=40, min_new_tokens=40)
            prefill = engine.prefill(Q, CHUNKS)
            assert type(prefill.kv) is PromptKV
            said.append((answer.token_ids, prefill.logits.tolist()))
            notes = [note for note in answer.reuse.notes if note.startswith("kcache")]
            assert notes == (
                [
                    f"kcache: top_n is 128, the prompt has {prefill.reuse.tokens} tokens: "
                    "attention is ordinary"
                ]
                if kcache
                else []
            )
    assert said[0] == said[1]


def test_fetching_too_few_values_changes_the_answer() -> None:
    with engine_of() as engine, engine_of(kcache=FEW) as other:
        assert answers(engine) != answers(other)
