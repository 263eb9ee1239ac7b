"""An answer's report counts every token, every row and every byte once."""

import math
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ragkv import Engine, StoreConfig
from ragkv.fusion import Candidates, Selection, Selector, budget, make_selector
from ragkv.registry import SELECTORS
from tests import tiny_models
from tests.engine.helpers import PREFIX, TOKEN_BYTES, A, B, C, Q, counts, engine_of
from tests.faults import raising
from tests.fixed import fixed

POOL = [tiny_models.tokens(count, 20 + count) for count in (1, 2, 5, 8, 11, 13)]
WARM = POOL[::2]


@pytest.fixture(scope="module")
def engine() -> Engine:
    """An engine that never encodes missed chunks, so that its store does not change."""
    with engine_of(fusion=fixed(selector="first-k")) as engine:
        engine.entries.encode(WARM)
        engine.entries.background.add = lambda *_: None  # type: ignore[method-assign]
        yield engine


def recount(
    chunks: list[list[int]], question: list[int], reuse: str
) -> tuple[list[int], list[int], int]:
    """Exact positions, fused positions, and S, counted token by token."""
    exact = [0] if reuse != "none" else []
    fused = []
    at = 1
    for index, chunk in enumerate(chunks):
        here = range(at, at + len(chunk))
        if chunk in WARM and index == 0 and reuse != "none":
            exact += here
        elif chunk in WARM and reuse == "fused":
            fused += here
        at += len(chunk)
    last = at + len(question) - 1
    return [p for p in exact if p != last], [p for p in fused if p != last], last + 1


def test_token_counts_of_random_layouts_equal_a_naive_recount(engine: Engine) -> None:
    dice = random.Random(0)
    for _ in range(200):
        chunks = dice.choices(POOL, k=dice.randint(0, 5))
        question = tiny_models.tokens(dice.randint(0, 4), seed=3)
        reuse = dice.choice(["fused", "fused", "fused", "none"])
        ratio = dice.choice([0.0, 0.2, 0.5, 1.0])
        selector = dice.choice(["hkvd", "first-k", "random"])
        prefill = engine.prefill(question, chunks, ratio=ratio, selector=selector, reuse=reuse)

        exact, fused, length = recount(chunks, question, reuse)
        share = math.ceil(ratio * len(fused))
        computed = length - len(exact) - len(fused)
        assert counts(prefill.reuse) == (len(exact), len(fused) - share, share, computed)
        assert prefill.reuse.tokens == len(prefill.token_ids) == length
        assert set(prefill.selected.tolist()) <= set(fused)
        looked_up = chunks if reuse == "fused" else []
        assert prefill.reuse.missed_chunks == sum(chunk not in WARM for chunk in looked_up)
        read = 1 if reuse != "none" and length > 1 else 0  # the prefix
        checks = selector == "hkvd" and share > 0  # then every candidate's stored KV is compared
        recomputed = {*prefill.selected.tolist(), length - 1}
        at = 1
        for index, chunk in enumerate(chunks):
            whole = set(range(at, at + len(chunk))) <= recomputed
            if index < len(looked_up) and chunk in WARM and not (whole and not checks):
                # what is recomputed whole, and known to be before loading, is not read
                read += len(chunk)
            at += len(chunk)
        assert prefill.reuse.bytes_by_tier == ({"memory": read * TOKEN_BYTES} if read else {})


@pytest.mark.parametrize(
    "selector",
    [name for name in SELECTORS if make_selector(name).selection is not Selection.ASKING],
)
def test_compute_is_the_share_of_a_full_prefills_row_layers(engine: Engine, selector: str) -> None:
    chunks = [WARM[0], POOL[1], WARM[1], WARM[2], WARM[1]]
    prefill = engine.prefill(Q, chunks, selector=selector, ratio=0.3)
    rows = sum(prefill.reuse.computed + selected.numel() for selected in prefill.selected_by_layer)
    assert prefill.reuse.compute == pytest.approx(rows / (4 * prefill.reuse.tokens))
    assert engine.prefill(Q, chunks, reuse="none").reuse.compute == 1.0


def test_bytes_read_are_counted_for_each_tier(tmp_path: object) -> None:
    config = StoreConfig(directory=str(tmp_path), memory_bytes=0)
    with engine_of(store=config) as engine:
        engine.entries.encode([A, B])
        read = engine.prefill(Q, [A, B, C]).reuse.bytes_by_tier
        assert read == {
            "memory": len(PREFIX) * TOKEN_BYTES,
            "disk": (len(A) + len(B)) * TOKEN_BYTES,
        }


def test_times_are_not_negative_and_fit_inside_each_other(engine: Engine) -> None:
    prefill = engine.prefill(Q, WARM)
    answer = engine.answer(Q, WARM, max_new_tokens=3)
    for timing in (prefill.timing, answer.timing):
        parts = [getattr(timing, name) for name in timing.__slots__]
        assert min(parts) >= 0
        assert timing.first_token_s >= timing.prefill_s > 0
        assert timing.prefill_s >= timing.load_s + timing.fuse_s
        assert timing.first_token_s >= timing.queue_s + timing.lookup_s + timing.prefill_s
    assert answer.timing.decode_s > 0


@pytest.mark.parametrize(
    ("how", "used"),
    [
        ({}, (0.15, "first-k")),
        ({"ratio": 0.0}, (0.0, "none")),
        ({"reuse": "none"}, (0.0, "none")),
        ({"reuse": "prefix"}, (0.0, "none")),
        ({"reuse": "prefix", "ratio": 0.5, "selector": "random"}, (0.0, "none")),
    ],
)
def test_a_report_names_a_ratio_and_a_selector_only_where_tokens_were_selected(
    engine: Engine, how: dict[str, Any], used: tuple[float, str]
) -> None:
    reuse = engine.prefill(Q, WARM, **how).reuse
    assert (reuse.ratio, reuse.selector) == used


def test_a_selector_without_a_name_has_that_of_its_class(engine: Engine) -> None:
    class Nameless(Selector):
        def select(self, candidates: Candidates, ratio: float, seed: int) -> torch.Tensor:
            return torch.arange(budget(ratio, len(candidates)))

    assert engine.prefill(Q, WARM, ratio=0.5, selector=Nameless()).reuse.selector == "Nameless"


def test_a_request_for_which_there_is_no_reader_thread_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = StoreConfig(directory=str(tmp_path), memory_bytes=0)
    with engine_of(store=config) as engine:
        engine.entries.encode([A, B])
        engine.flush()
        wanted = engine.prefill(Q, [A, B], reuse="none")
        with monkeypatch.context() as patch:
            no_thread = RuntimeError("can't start new thread")
            patch.setattr(ThreadPoolExecutor, "submit", raising(no_thread))
            alone = engine.prefill(Q, [A, B])
        after = engine.prefill(Q, [A, B])
    assert alone.reuse.missed_chunks == 2 and after.reuse.missed_chunks == 0
    assert any("no thread can read it" in note for note in alone.reuse.notes)
    torch.testing.assert_close(alone.logits, wanted.logits)
