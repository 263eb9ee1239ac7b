"""Promises to vLLM: only what is fused is promised, and whatever goes wrong is left to vLLM."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ragkv import Engine, EngineConfig, FusionConfig, StoreConfig
from ragkv.store.store import Store
from ragkv.vllm.front import left_report
from ragkv.vllm.front.salts import SECRET_VARIABLE, proof
from ragkv.vllm.scheduler import PromptScheduler
from ragkv.vllm.settings import ConnectorSettings
from tests import tiny_models
from tests.scheduling.helpers import until

from .models import vllm_request

PREFIX = (1,)
A, B, C = (tiny_models.tokens(count, seed) for count, seed in ((20, 1), (17, 2), (15, 3)))
QUESTION = tiny_models.tokens(4, seed=4)
CHUNKS = (A, B)


def request(name: str, *ids: int, params: dict[str, Any] | None = None, **changes: Any) -> Any:
    return vllm_request(
        name, ids, kv_transfer_params=None if params is None else {"ragkv": params}, **changes
    )


def prompt(
    request_id: str = "r", texts: tuple[tuple[int, ...], ...] = CHUNKS, **params: Any
) -> Any:
    ids = [*PREFIX, *(token for text in texts for token in text), *QUESTION]
    return request(request_id, *ids, params=params or None)


@pytest.fixture
def engine() -> Iterator[Engine]:
    config = EngineConfig(store=StoreConfig(directory=None), fusion=FusionConfig(ratio=0.15))
    with Engine(tiny_models.model("llama"), config=config) as engine:
        engine.entries.encode(CHUNKS)
        yield engine


@pytest.fixture
def prompts(engine: Engine) -> Iterator[PromptScheduler]:
    made = PromptScheduler(engine, ConnectorSettings(timeout_s=20.0, refresh_s=0.05, prompts=2))
    yield made
    made.close()


def promise(prompts: PromptScheduler, asked: Any, *block_ids: int) -> int:
    """What is promised in the end, and allocated by vLLM."""
    promised = settled(prompts, asked)
    prompts.allocated(asked, list(block_ids or (1,)), promised)
    return promised


def ended(prompts: PromptScheduler, asked: Any) -> dict[str, Any]:
    """The report of a request that ends."""
    report = prompts.finished(asked)
    assert report is not None
    return dict(report["ragkv"])


def settled(prompts: PromptScheduler, request: Any) -> int:
    """What is promised in the end, as vLLM asks step after step."""
    ends = time.monotonic() + 120.0  # far beyond a pause of the machine
    while (promised := prompts.promised(request, 0)) is None:
        prompts.take_loads(idle=True)
        assert time.monotonic() < ends
    return promised


def test_a_prompt_is_promised_once_it_is_fused_and_then_written(
    prompts: PromptScheduler, engine: Engine
) -> None:
    asked = prompt()
    assert prompts.promised(asked, 0) is None
    promised = promise(prompts, asked, 3, 5)
    assert promised == len(PREFIX) + len(A) + len(B)
    (load,) = prompts.take_loads(idle=False)
    assert (load.start, load.stop, load.block_ids) == (0, promised, (3, 5))
    own = engine.prefill(QUESTION, CHUNKS).kv
    for layer in range(engine.model.adapter.layer_count):
        for found, wanted in zip(
            load.kv.view(layer, promised), own.view(layer, promised), strict=True
        ):
            assert (found - wanted).abs().max() < 1e-4
    assert prompts.take_loads(idle=False) == ()


def test_the_report_counts_what_was_reused_and_recomputed(prompts: PromptScheduler) -> None:
    asked = prompt(ratio=0.5)
    promise(prompts, asked)
    found = ended(prompts, asked)["reuse"]
    assert found["exact"] == len(PREFIX) + len(A)
    assert found["fused"] + found["recomputed"] == len(B)
    assert found["recomputed"] == 9  # half of the 17 tokens of B, rounded up


def test_a_preempted_request_is_fused_again(prompts: PromptScheduler) -> None:
    asked = prompt()
    for _ in range(2):
        promise(prompts, asked)
        assert len(prompts.take_loads(idle=False)) == 1
    assert prompts.finished(asked) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"lora_request": object()},
        {"mm_features": [object()]},
        {"pooling_params": object()},
        {"skip_reading_prefix_cache": True},
        {"prompt_token_ids": None},
        {"kv_transfer_params": {"ragkv": {"reuse": "none"}}},
    ],
)
def test_requests_whose_kv_is_another_are_left_to_vllm(
    prompts: PromptScheduler, change: dict[str, Any]
) -> None:
    asked = prompt()
    vars(asked).update(change)
    assert prompts.promised(asked, 0) == 0
    assert prompts.finished(asked) is None


def test_parameters_that_are_not_understood_are_reported_and_never_fail(
    prompts: PromptScheduler,
) -> None:
    for wrong in ({"reuse": "maybe"}, {"chunks": [[5, 3]]}):
        asked = prompt(**wrong)
        assert prompts.promised(asked, 0) == 0
        assert "kv_transfer_params.ragkv" in ended(prompts, asked)["notes"][0]
    for wrong in ({"ratio": 7.0}, {"selector": "best"}):
        asked = prompt(**wrong)
        assert settled(prompts, asked) == 0
        assert next(iter(wrong)) in ended(prompts, asked)["notes"][0]


def test_a_chunk_whose_edges_merged_with_the_text_around_it_is_reused_without_them(
    prompts: PromptScheduler,
) -> None:
    asked = prompt("merged", ((*A[:-1], 9), (9, *B[1:])))
    assert promise(prompts, asked, 1, 2) == len(PREFIX) + len(A) + len(B)
    found = ended(prompts, asked)["reuse"]
    assert found["missed_chunks"] == 0
    assert found["exact"] == len(PREFIX) + len(A) - 1, "a token's KV depends on no later token"
    assert found["fused"] + found["recomputed"] == len(B) - 1


def test_a_request_that_is_not_as_expected_never_raises(prompts: PromptScheduler) -> None:
    assert prompts.promised(SimpleNamespace(request_id="broken"), 0) == 0
    broken = prompt("broken later")
    del broken.mm_features
    prompts.arrived(broken)
    assert prompts.promised(broken, 0) == 0, "no later look at it fuses what was not understood"


def test_missing_chunks_are_encoded_and_found_in_later_prompts(
    prompts: PromptScheduler, engine: Engine
) -> None:
    named = prompt(texts=(C,), chunks=[[1, 1 + len(C)]])
    assert settled(prompts, named) == 0  # nothing of it is stored
    assert "only 0 of 16 tokens" in ended(prompts, named)["notes"][0]
    engine.flush()
    until(lambda: prompts.known_chunks >= 3)
    assert settled(prompts, prompt("later", (C,))) == 16


def test_only_so_many_prompts_are_fused_ahead(prompts: PromptScheduler) -> None:
    asked = [prompt(str(number)) for number in range(3)]
    assert [settled(prompts, one) > 0 for one in asked[:2]] == [True, True]
    assert prompts.promised(asked[2], 0) is prompts.promised(asked[2], 0) is None
    prompts.finished(asked[0])  # aborted: its place is free
    assert settled(prompts, asked[2]) > 0


def test_an_aborted_request_leaves_nothing_behind(prompts: PromptScheduler) -> None:
    asked = prompt()
    prompts.promised(asked, 0)
    assert prompts.finished(asked) is None
    assert prompts.take_loads(idle=True) == ()
    assert settled(prompts, prompt("next")) > 0


def test_a_store_that_stalls_delays_a_prompt_only_for_the_timeout(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def stall(*_: object) -> None:
        released.wait(20.0)

    prompts = PromptScheduler(engine, ConnectorSettings(timeout_s=0.3, prompts=2))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Store, "lease", stall)
            began = time.monotonic()
            assert [settled(prompts, prompt(str(number))) for number in range(4)] == [0] * 4
            assert time.monotonic() - began < 5.0
            released.set()
        # soon prompts are fused again
        until(lambda: settled(prompts, prompt(f"at {time.monotonic()}")))
    finally:
        prompts.close()


def asked_for(prompts: PromptScheduler, name: str) -> dict[str, Any]:
    """The connector's answer to a request that asks for a report."""
    asking = request(f"asks-{name}-{time.monotonic()}", 0, params={"report_of": name})
    assert prompts.promised(asking, 0) == 0
    return ended(prompts, asking)


def test_a_named_report_is_given_once_with_the_spans_and_the_identity(
    prompts: PromptScheduler, engine: Engine
) -> None:
    promise(prompts, prompt("r", name="mine"))
    answer = asked_for(prompts, "mine")  # while the request still runs
    report = answer["report"]
    assert report["promised_tokens"] == len(PREFIX) + len(A) + len(B)
    spans = [(one["kind"], one["tokens"]) for one in report["spans"]]
    assert spans[:3] == [("prefix", 1), ("chunk", 20), ("chunk", 17)]
    assert report["reuse"]["exact"] == len(PREFIX) + len(A)
    assert answer["identity"]["weights"] == engine.sessions.blocks.writer.base.weights
    assert (answer["ratio"], answer["selector"]) == (0.15, "attention")
    assert asked_for(prompts, "mine")["report"] is None
    assert asked_for(prompts, "unknown")["report"] is None


def test_a_named_report_says_why_vllm_computed_the_prompt(prompts: PromptScheduler) -> None:
    assert settled(prompts, prompt("exact", reuse="none", name="exact")) == 0
    nothing = asked_for(prompts, "exact")["report"]
    assert nothing == left_report() and nothing["promised_tokens"] == 0 == len(nothing["notes"])
    assert settled(prompts, prompt("missed", (C,), chunks=[[1, 1 + len(C)]], name="missed")) == 0
    report = asked_for(prompts, "missed")["report"]
    assert (report["reuse"]["missed_chunks"], report["reuse"]["missed_tokens"]) == (1, len(C))
    assert "only 0 of 16 tokens" in report["notes"][0]


def test_a_second_answer_to_a_prompt_does_not_undo_the_report_of_the_first(
    prompts: PromptScheduler,
) -> None:
    first = prompt("0_r", name="mine")
    second = prompt("1_r", name="mine")
    promise(prompts, first)
    prompts.promised(second, 0)  # vLLM looks at it while the first decodes
    assert asked_for(prompts, "mine")["report"]["promised_tokens"] > 0


def test_reports_that_no_one_asks_for_are_dropped(
    prompts: PromptScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragkv.vllm.scheduler.MOST_NAMED", 2)
    for name in ("a", "b", "c"):
        settled(prompts, prompt(name, reuse="none", name=name))
    assert [asked_for(prompts, name)["report"] is None for name in ("a", "b", "c")] == [
        True,
        False,
        False,
    ]


def salted_request(
    prompts: PromptScheduler, request_id: str, salt: str | None, **params: Any
) -> Any:
    """A request that has arrived; its salt is now its own in vLLM's cache."""
    asked = prompt(request_id, **params)
    asked.cache_salt = salt
    prompts.arrived(asked)
    return asked


@pytest.fixture
def caching(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[PromptScheduler]:
    monkeypatch.setenv(SECRET_VARIABLE, "of both servers")
    made = PromptScheduler(engine, ConnectorSettings(home=str(tmp_path)), prefix_caching=True)
    yield made
    made.close()


def test_beside_the_prefix_cache_a_request_without_a_salt_is_vllms_alone(
    caching: PromptScheduler,
) -> None:
    plain = salted_request(caching, "plain", None)
    assert caching.promised(plain, 0) == 0 and plain.cache_salt is None
    proved = {"tenant": "one", "proof": proof(b"of both servers", "one", "")}
    assert caching.promised(salted_request(caching, "tenant", None, **proved), 0) == 0, (
        "its prompts are not one"
    )
    assert settled(caching, salted_request(caching, "salted", "s")) == len(PREFIX) + len(A) + len(B)


def test_what_vllms_prefix_cache_has_is_not_promised_again(caching: PromptScheduler) -> None:
    asked = salted_request(caching, "salted", "s", chunks=[[1, 21], [21, 38]])
    settled(caching, asked)
    assert caching.promised(asked, 32) == 6
    caching.allocated(asked, [4, 5, 6], 6)
    (load,) = caching.take_loads(idle=False)
    assert (load.start, load.stop) == (32, 38)
    assert caching.promised(salted_request(caching, "exact", "s", reuse="none", name="n"), 32) == 0
    caching.allocated(request("exact"), [4], 0)
    assert asked_for(caching, "n")["report"]["promised_tokens"] == 32


def test_a_salt_is_shared_by_requests_of_one_tenant_and_one_setting(
    caching: PromptScheduler,
) -> None:
    def salt(number: int, given: str | None, **params: Any) -> str | None:
        if "tenant" in params:
            params.setdefault("proof", proof(b"of both servers", params["tenant"], given or ""))
        made: str | None = salted_request(caching, str(number), given, **params).cache_salt
        return made

    of_one: list[dict[str, Any]] = [
        {},
        {"ratio": 0.15},
        {"ratio": 0.5},
        {"reuse": "none"},
        {"tenant": "one"},
    ]
    of_one += [{"tenant": "two"}, {"tenant": "one", "proof": "forged"}]
    wishes: list[Any] = [
        ("other", {}),
        (None, {"tenant": "one"}),
        *(("s", params) for params in of_one),
    ]
    found = [salt(number, given, **params) for number, (given, params) in enumerate(wishes)]
    assert len(set(found)) == len(wishes) and None not in found
    assert salt(20, "s", keep=True) == found[2], "what is kept changes no KV"


def test_a_tenant_is_served_from_its_own_entries_alone(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "of both servers")
    named = [[1, 1 + len(A)], [1 + len(A), 1 + len(A) + len(B)]]
    for tenant, chunks in (("", CHUNKS), ("one", CHUNKS), ("two", (C,))):
        store = StoreConfig(
            directory=str(tmp_path / "tenants" / tenant / "kv" if tenant else tmp_path / "kv")
        )
        with engine.with_config(replace(engine.config, store=replace(store, tenant=tenant))) as own:
            own.entries.encode(chunks)
    settings, config = ConnectorSettings.read({"home": str(tmp_path)}, "float32", "cpu")
    prompts = PromptScheduler(engine.with_config(config), settings, prefix_caching=True)

    def reused(tenant: str, proof_of: str) -> tuple[int, Any]:
        proved = {
            "tenant": tenant,
            "proof": proof(b"of both servers", proof_of, "s"),
            "chunks": named,
        }
        asked = salted_request(prompts, f"{tenant} {proof_of}", "s", **proved)
        promised = settled(prompts, asked)
        return promised, (prompts.finished(asked) or {}).get("ragkv", {}).get("notes")

    assert reused("one", "one") == (38, None)
    for tenant, proof_of, said in (
        ("two", "two", "only 0 of 38"),
        ("one", "two", "not proved"),
        ("../", "../", "name"),
    ):
        promised, notes = reused(tenant, proof_of)
        assert promised == 0 and said in notes[0]
    odd = salted_request(prompts, "odd", "s", tenant="one", proof="\u00e9", chunks=named)
    assert prompts.promised(odd, 0) == 0 and "not proved" in ended(prompts, odd)["notes"][0]
    prompts.close()


def test_the_next_turn_of_a_conversation_finds_its_history(engine: Engine, tmp_path: Path) -> None:
    settings, config = ConnectorSettings.read({"home": str(tmp_path / "h")}, "float32", "cpu")
    config = replace(config, store=StoreConfig(directory=None, read_only=False))
    first = [*PREFIX, *A, *B, *QUESTION]
    second = [*first, *tiny_models.tokens(9, 8), *C, *QUESTION]
    reports = []
    # a process each: what is kept outlives it
    for ids, chunks in ((first, (A, B)), (second, (C,))):
        with engine.with_config(config) as own:
            own.entries.encode(chunks)
            prompts = PromptScheduler(own, settings, prefix_caching=True)
            asked = request("r", *ids, params={"keep": True}, cache_salt="s")
            prompts.arrived(asked)
            promised = promise(prompts, asked, 1, 2)
            assert promised == len(ids) - 1
            (load,) = prompts.take_loads(idle=False)
            assert load.kv.view(0, promised)[0].shape[2] == promised
            reports.append(ended(prompts, asked)["reuse"])
            prompts.close()
    assert reports[1]["exact"] + reports[1]["fused"] + reports[1]["recomputed"] >= len(first) + len(
        C
    )
    assert reports[1]["computed"] == 9 + len(QUESTION)
