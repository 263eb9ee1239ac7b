"""Many threads and tasks on one chat model: each gets the answer that it would get alone."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.messages import BaseMessage

from ragkv import EngineConfig, FusionConfig
from ragkv.integrations.langchain import ChatRagKV

from .helpers import A, B, C, chat

PROMPTS = [
    (
        f"Question {n}: who founded the mill?",
        ([A, B, C], [C, A], [B], [])[n % 4],
        ("invoke", "stream")[n % 2],
    )
    for n in range(32)
]


@pytest.fixture(scope="module")
def llm(tiny: str) -> ChatRagKV:
    # With KV alone the second answer is that of the first: no passage becomes exact between them.
    made = chat(tiny, temperature=0, config=EngineConfig(fusion=FusionConfig(stored_kv="alone")))
    made.ingest([A, B, C])
    return made


@pytest.fixture(scope="module")
def alone(llm: ChatRagKV) -> list[str]:
    return [str(llm.invoke(text, documents=documents).content) for text, documents, _ in PROMPTS]


def ask(llm: ChatRagKV, prompt: tuple[str, list[Any], str]) -> str:
    text, documents, method = prompt
    if method == "invoke":
        return str(llm.invoke(text, documents=documents).content)
    return "".join(str(chunk.content) for chunk in llm.stream(text, documents=documents))


def test_the_prompts_of_these_tests_have_different_answers(alone: list[str]) -> None:
    assert len(set(alone)) > 4, "else the tests below could not fail"


def test_32_threads_get_the_answers_of_sequential_calls(llm: ChatRagKV, alone: list[str]) -> None:
    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(lambda prompt: ask(llm, prompt), PROMPTS)) == alone


def test_threads_that_need_the_same_model_at_the_same_time_load_it_once(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ragkv import Engine, EngineConfig, FusionConfig

    loads = []
    original = Engine.from_pretrained.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        Engine,
        "from_pretrained",
        classmethod(lambda cls, *given: loads.append(given) or original(cls, *given)),
    )
    # used by no other test, so the model is not loaded yet
    config = EngineConfig(fusion=FusionConfig(seed=41))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: chat(tiny, config=config).invoke(f"{n}?"), range(8)))
    assert len(loads) == 1


async def test_40_streams_that_wait_for_one_session_do_not_deadlock(llm: ChatRagKV) -> None:
    """More streams than a default thread pool has threads: each waits until another releases the
    session.
    """

    async def one(number: int) -> str:
        return "".join([str(c.content) async for c in llm.astream(f"{number}?", session_id="busy")])

    answers = await asyncio.wait_for(asyncio.gather(*(one(n) for n in range(40))), 120)
    assert len(answers) == 40


async def test_a_stream_whose_reader_stops_frees_the_model(llm: ChatRagKV) -> None:
    async for _ in llm.astream("Who?", max_tokens=200, min_new_tokens=200):
        break
    answer: BaseMessage = await asyncio.wait_for(llm.ainvoke("Who?"), 60)
    assert answer.content
