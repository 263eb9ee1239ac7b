"""OpenMP thread pools: no thread leaves workers behind, which would slow the operations of all
others.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers

from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.runtime import ThreadChoice, openmp
from ragkv.vllm.fusing import FusingQueue
from ragkv.vllm.homes import Homes
from ragkv.vllm.settings import ConnectorSettings
from tests import tiny_models
from tests.scheduling.helpers import until

CHUNKS = [[7, number, 9, 11] * 64 for number in range(3, 6)]
QUESTION = [5, 6, 7, 8]
MUCH = torch.ones(1 << 20)

pytestmark = pytest.mark.skipif(
    openmp._gnu_openmp() is None or not Path("/proc/self/task").exists(),
    reason="torch does not use GNU OpenMP here",
)


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # however busy this machine is
    monkeypatch.setattr(ThreadChoice, "_choose", lambda _: None)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)
    openmp.release_threads()


@pytest.fixture
def elsewhere() -> Iterator[Callable[..., None]]:
    """Run something on a thread that stays alive."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda work: pool.submit(work).result()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    # the reader threads decode it
    store = StoreConfig(directory=str(tmp_path), memory_bytes=0, codec="int8")
    config = EngineConfig(store=store)
    wide = tiny_models.config(
        "llama", hidden_size=128, intermediate_size=256, max_position_embeddings=4096
    )
    with Engine(transformers.LlamaForCausalLM(wide), config=config) as made:
        made.entries.encode(CHUNKS)
        yield made


def tasks() -> set[int]:
    """The operating system's threads of this process. Threads of earlier tests may end at
    any time.
    """
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def workers(before: set[int]) -> int:
    """How many threads are new and are not Python's."""
    return len(tasks() - before - {thread.native_id for thread in threading.enumerate()})


def test_vllms_thread_has_no_pool_while_it_waits_for_a_prompt(
    elsewhere: Callable[..., None],
) -> None:
    homes = mock.MagicMock(spec=Homes)
    with FusingQueue(homes, ConnectorSettings()) as queue:
        before = tasks()
        elsewhere(MUCH.sum)
        assert workers(before) == 1
        elsewhere(lambda: queue.wait(0.0))
        until(lambda: workers(before) == 0)


def test_a_thread_that_computes_has_a_pool_until_it_releases_it(
    elsewhere: Callable[..., None],
) -> None:
    before = tasks()
    elsewhere(MUCH.sum)
    until(lambda: workers(before) == 1)
    elsewhere(openmp.release_threads)
    until(lambda: workers(before) == 0)
    elsewhere(MUCH.sum)
    until(lambda: workers(before) == 1)
    elsewhere(openmp.release_threads)


def test_only_a_thread_told_to_use_one_thread_computes_without_a_pool(
    elsewhere: Callable[..., None],
) -> None:
    before = tasks()
    elsewhere(openmp.use_one_thread)
    elsewhere(MUCH.sum)
    until(lambda: workers(before) == 0)
    assert torch.get_num_threads() == 2
    MUCH.sum()
    until(lambda: workers(before) == 1)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_thread_that_made_a_request_leaves_no_pool_behind(
    engine: Engine, elsewhere: Callable[..., None], sampled: bool
) -> None:
    before = tasks()
    # the last chunk is a miss, which the background thread encodes
    for chunks in (CHUNKS, [*CHUNKS, [3, 4] * 100]):
        elsewhere(
            lambda c=chunks: engine.answer(
                QUESTION, c, max_new_tokens=4, temperature=float(sampled), ratio=0.2
            )
        )  # type: ignore[misc]
        engine.flush()
        until(lambda: workers(before) == 0)
    engine.prefill(QUESTION, CHUNKS)  # on the main thread
    until(lambda: workers(before) == 0)


def test_the_only_answering_thread_keeps_its_pool_between_tokens(engine: Engine) -> None:
    before = tasks()
    events = engine.stream(QUESTION, CHUNKS, max_new_tokens=8, min_new_tokens=8)
    for _ in range(3):
        next(events)
    until(lambda: workers(before) == 1)
    list(events)
    until(lambda: workers(before) == 0)
