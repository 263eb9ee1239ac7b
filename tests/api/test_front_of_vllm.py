"""`ragkv serve --engine vllm`: everything works as with ragkv's own engine, and what does not is
said.
"""

import gc
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import AsyncGeneratorType
from typing import Any

import pytest
from fastapi import FastAPI

from ragkv import Engine, EngineConfig
from ragkv.api.keys import KeyFile
from ragkv.api.settings import QueueConfig, VllmConfig
from ragkv.errors import UnsupportedError
from ragkv.vllm.front.salts import SECRET_VARIABLE
from tests.control.test_gate_result import point, result

from .fake_vllm import FakeVllm
from .helpers import (
    app_on,
    client_of,
    engine_of,
    events,
    filled,
    on_port,
    plain,
    service_of,
    wait_until,
)

pytest.importorskip("openai")

pytestmark = pytest.mark.enable_socket

ASK = {
    "collection": "facts",
    "question": "Who built the mill of Oro?",
    "k": 2,
    "ratio": 0.15,
    "max_tokens": 12,
}
COUNTS = (
    "exact",
    "fused",
    "recomputed",
    "computed",
    "tokens",
    "missed_chunks",
    "ratio",
    "selector",
)


def in_front(fake: FakeVllm, loaded: Engine, home: Path, held: ExitStack, **config: Any) -> FastAPI:
    """An app in front of the fake vLLM, which is closed with `held`."""
    held.callback(fake.close)
    vllm = VllmConfig(url=held.enter_context(on_port(fake.app)), timeout_s=60.0)
    return app_on(loaded, home, answer_engine="vllm", vllm=vllm, **config)


class Front:
    """A server in front of the fake vLLM, and one with its own engine and the same documents."""

    def __init__(self, loaded: Engine, folder: Path, held: ExitStack) -> None:
        self.fake = FakeVllm(loaded, folder / "front", EngineConfig())
        self.app = in_front(self.fake, loaded, folder / "front", held, model=str(folder / "m"))
        self.client = held.enter_context(plain(held.enter_context(on_port(self.app))))
        self.own = held.enter_context(
            client_of(app_on(loaded, folder / "own", model=str(folder / "m")))
        )
        for one in (self.client, self.own):
            filled(one)

    def ask_once(self) -> None:
        """Both have stored what a first question misses: the fake computes a prompt twice, and must
        find the same.
        """
        assert self.ask().status_code == self.own.post("/v1/ask", json=ASK).status_code == 200
        self.fake.bodies.clear()

    def ask(self, **body: Any) -> Any:
        return self.client.post("/v1/ask", json={**ASK, **body})


@pytest.fixture
def front(talker: Engine, tmp_path: Path) -> Iterator[Front]:
    with ExitStack() as held:
        yield Front(talker, tmp_path, held)


def counts(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: answer["reuse"][name] for name in COUNTS}


def spans(answer: dict[str, Any]) -> list[Any]:
    return [
        (one["kind"], one["start"], one["tokens"], one["state"], one["recomputed_at"])
        for one in answer["prompt"]
    ]


def test_answer_sources_and_report_are_those_of_ragkvs_engine(front: Front) -> None:
    front.ask_once()
    found = front.ask()
    own = front.own.post("/v1/ask", json=ASK)
    assert found.status_code == own.status_code == 200, found.text
    found = found.json()
    own = own.json()
    for name in ("answer", "finish_reason", "sources", "citations"):
        assert found[name] == own[name], name
    assert counts(found) == counts(own)
    assert found["reuse"]["fused"] > 0 and found["reuse"]["recomputed"] > 0
    assert spans(found) == spans(own)
    (sent,) = front.fake.bodies
    assert len(sent["prompt"]) == found["reuse"]["tokens"]
    assert front.ask(reuse="none").json()["reuse"]["computed"] == found["reuse"]["tokens"]


def test_kv_of_a_prompt_is_refused_before_anything_is_sent(front: Front) -> None:
    engine = engine_of(front.app)
    with pytest.raises(UnsupportedError, match="makes no KV of prompts"):
        engine.prefill([1, 2], [])
    with pytest.raises(UnsupportedError, match="makes no KV of prompts"):
        engine.append(engine.session("s"), [1, 2], [3])
    assert front.fake.bodies == [] and engine.session("s").turns == 0


def test_a_stream_has_the_events_of_ragkvs_engine(front: Front) -> None:
    front.ask_once()
    found, own = (
        events(one.post("/v1/ask", json={**ASK, "stream": True}).text)
        for one in (front.client, front.own)
    )
    assert [name for name, _ in found] == [name for name, _ in own]
    assert [data for name, data in found if name == "token"] == [
        data for name, data in own if name == "token"
    ]
    prompt = next(data for name, data in found if name == "prompt")
    assert counts(prompt) == counts(found[-1][1]) == counts(own[-1][1])


def test_chats_and_log_probabilities_work(front: Front) -> None:
    model = service_of(front.app).model_id
    messages = [{"role": "user", "content": "Who built the mill?"}]
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": 5,
        "logprobs": True,
        "top_logprobs": 2,
    }
    found, own = (
        one.post("/v1/chat/completions", json=body).json() for one in (front.client, front.own)
    )
    for one, other in zip(found["choices"], own["choices"], strict=True):
        assert one["message"] == other["message"] and one["finish_reason"] == other["finish_reason"]
        for token, same in zip(
            one["logprobs"]["content"], other["logprobs"]["content"], strict=True
        ):
            assert token["logprob"] == pytest.approx(same["logprob"], abs=1e-4)
            assert [top["token"] for top in token["top_logprobs"]] == [
                top["token"] for top in same["top_logprobs"]
            ]


def test_a_conversation_goes_into_the_prompt_and_its_documents_are_fused_again(
    front: Front,
) -> None:
    first = front.ask(session_id="s").json()
    second = front.ask(session_id="s", question="And the harbour?").json()
    history = [one for one in second["prompt"] if one["kind"] == "history"]
    assert sum(one["tokens"] for one in history) > first["reuse"]["tokens"] - 20
    assert any(one["state"] == "fused" for one in history)  # the documents of the first turn
    assert front.client.get("/v1/sessions").json()["data"][0]["id"] == "s"
    for _ in range(2):
        front.ask()
    salts = [one["cache_salt"] for one in front.fake.bodies]
    assert salts[0] == salts[1] and len(set(salts)) == 3, (
        "one of the conversation, and one of each other request"
    )


def test_messages_that_repeat_a_conversation_find_it(front: Front) -> None:
    body = {"model": service_of(front.app).model_id, "max_tokens": 4}
    messages = [{"role": "user", "content": "Go"}]
    first = front.client.post("/v1/chat/completions", json={**body, "messages": messages}).json()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "On"}]
    second = front.client.post("/v1/chat/completions", json={**body, "messages": messages}).json()
    history = sum(one["tokens"] for one in second["ragkv"]["prompt"] if one["kind"] == "history")
    assert history >= first["usage"]["total_tokens"] - 1
    # its ids alone are kept
    assert second["ragkv"]["reuse"]["computed"] == second["ragkv"]["reuse"]["tokens"]
    last = front.fake.bodies[-1]["prompt"]
    assert last[: first["usage"]["prompt_tokens"]] == front.fake.bodies[0]["prompt"]


def test_sampling_goes_to_vllm_and_nothing_is_left_to_its_defaults(front: Front) -> None:
    model = service_of(front.app).model_id
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Go"}],
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "presence_penalty": 1.0,
        "logit_bias": {"5": -2.0},
    }
    assert front.client.post("/v1/chat/completions", json=body).status_code == 200
    sent = front.fake.bodies[-1]
    wanted = {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "presence_penalty": 1.0,
        "logit_bias": {"5": -2.0},
    }
    assert {name: sent[name] for name in wanted} == wanted
    assert (
        sent["top_k"],
        sent["min_p"],
        sent["repetition_penalty"],
        sent["frequency_penalty"],
    ) == (0, 0.0, 1.0, 0.0)
    front.ask()
    assert front.fake.bodies[-1]["temperature"] == 0.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reuse": "prefix"}, "reuse 'prefix'"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_what_is_not_sent_to_vllm_is_refused(
    front: Front, change: dict[str, Any], said: str
) -> None:
    answer = front.ask(**change)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]
    assert front.fake.bodies == []


def test_a_vllm_that_fails_gives_503_and_readyz_and_metrics_say_so(front: Front) -> None:
    assert front.client.get("/readyz").status_code == 200
    front.fake.refuses = (500, "boom")
    front.fake.is_healthy = False
    answer = front.ask()
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "vllm_unavailable"
    assert "answered 500" in answer.text and "boom" not in answer.text
    wait_until(lambda: "is not healthy" in (front.client.get("/readyz").json()["reason"] or ""))
    assert front.client.get("/readyz").status_code == 503
    assert "ragkv_vllm_answers 0.0" in front.client.get("/metrics").text
    front.fake.refuses = None
    front.fake.is_healthy = True
    wait_until(lambda: front.client.get("/readyz").status_code == 200)
    assert front.ask().status_code == 200
    assert "ragkv_vllm_answers 1.0" in front.client.get("/metrics").text


def test_no_server_at_all_is_named(talker: Engine, tmp_path: Path) -> None:
    app = app_on(talker, tmp_path, answer_engine="vllm", vllm=VllmConfig(url="http://127.0.0.1:1"))
    with client_of(app) as client:
        ready = client.get("/readyz")
        assert (
            ready.status_code == 503
            and "vLLM at http://127.0.0.1:1 does not answer" in ready.json()["reason"]
        )
        filled(client)  # documents are stored meanwhile
        answer = client.post("/v1/ask", json=ASK)
        assert answer.status_code == 503 and "does not answer" in answer.json()["error"]["message"]


def test_a_server_without_the_connector_or_with_another_model_is_refused(
    front: Front, reader: Engine, tmp_path: Path
) -> None:
    assert front.client.get("/readyz").status_code == 200
    front.fake.has_connector = False
    answer = front.ask()
    assert (
        answer.status_code == 503
        and "without ragkv's connector" in answer.json()["error"]["message"]
    )
    assert front.client.get("/readyz").status_code == 503  # what a request finds out is remembered
    front.fake.has_connector = True
    wait_until(lambda: front.client.get("/readyz").status_code == 200)
    with ExitStack() as held:
        app = in_front(
            FakeVllm(reader, tmp_path / "front"), engine_of(front.app), tmp_path / "b", held
        )
        client = held.enter_context(client_of(app))
        ready = client.get("/readyz")
        assert ready.status_code == 503 and "another model" in ready.json()["reason"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"report": {"promised_tokens": 0, "notes": []}}, "its report has another form"),
        ({"report": None}, "lost the report"),
        ({"ratio": None, "identity": "none"}, "vLLM at"),
    ],
)
def test_a_connector_that_answers_in_another_form_is_vllms_error(
    front: Front, change: dict[str, Any], said: str
) -> None:
    front.fake.answer_changes = change
    answer = front.ask()
    assert answer.status_code == 503 and said in answer.json()["error"]["message"]
    wait_until(lambda: front.fake.open == 0)


@pytest.mark.parametrize(
    ("change", "said"), [("breaks_after", "broke off"), ("ends_with", "abort")]
)
def test_an_answer_that_breaks_off_ends_with_an_error(front: Front, change: str, said: str) -> None:
    setattr(front.fake, change, 3 if change == "breaks_after" else "abort")
    found = events(front.ask(stream=True).text)
    assert "prompt" in {name for name, _ in found} and "answer" not in {name for name, _ in found}
    name, data = found[-1]
    assert (
        name == "error"
        and data["error"]["code"] == "vllm_unavailable"
        and said in data["error"]["message"]
    )


def test_a_client_that_leaves_ends_the_request_at_vllm(front: Front) -> None:
    front.fake.pause_s = 0.05
    with front.client.stream(
        "POST", "/v1/ask", json={**ASK, "max_tokens": 500, "stream": True}
    ) as answer:
        next(line for line in answer.iter_lines() if "token" in line)
    wait_until(lambda: front.fake.aborted == 1 and front.fake.open == 0)


@pytest.mark.parametrize("leaves", [True, False])
def test_a_request_that_is_broken_off_leaves_no_generator_to_garbage_collection(
    front: Front, leaves: bool
) -> None:
    """Collected in another thread, a generator may be closed there while the event loop closes it
    too.
    """

    def suspended() -> list[AsyncGeneratorType[object, object]]:
        found = [
            one
            for one in gc.get_objects()
            if type(one) is AsyncGeneratorType and one.ag_frame is not None
        ]
        return [one for one in found if "Stream" in one.__qualname__ or "HTTP" in one.__qualname__]

    gc.collect()
    gc.disable()
    before = suspended()  # of other tests; kept, so that no new one has its id
    try:
        if leaves:
            front.fake.pause_s = 0.05
            with front.client.stream(
                "POST", "/v1/ask", json={**ASK, "max_tokens": 500, "stream": True}
            ) as answer:
                lines = answer.iter_lines()  # kept: httpx closes the connection with it
                next(line for line in lines if "token" in line)
                wait_until(lambda: len(suspended()) > len(before))
        else:
            front.fake.has_connector = False
            assert front.ask().status_code == 503
        wait_until(lambda: {id(one) for one in suspended()} <= {id(one) for one in before})
    finally:
        gc.enable()


def test_a_deadline_holds_while_vllm_is_slow(talker: Engine, tmp_path: Path) -> None:
    with ExitStack() as held:
        fake = FakeVllm(talker, tmp_path)
        fake.holds = True
        queue = QueueConfig(deadline_s=3.0)
        client = held.enter_context(client_of(in_front(fake, talker, tmp_path, held, queue=queue)))
        filled(client)
        while not fake.bodies:  # on a slow machine the time may be over before a request is at vLLM
            assert client.post("/v1/ask", json=ASK).status_code == 504
        wait_until(lambda: fake.aborted == 1)


@pytest.mark.parametrize("secret", ["", "of both servers"])
def test_a_tenant_with_a_name_is_fused_from_its_own_kv_if_both_servers_have_a_secret(
    talker: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, secret)
    with ExitStack() as held:
        fake = FakeVllm(talker, tmp_path)
        key = KeyFile(tmp_path / "keys.json").add("one", tenant="acme")[0]
        client = held.enter_context(client_of(in_front(fake, talker, tmp_path, held), key))
        filled(client)
        found = client.post("/v1/ask", json=ASK).json()["reuse"]
        assert (found["fused"] > 0) == bool(secret)
        assert any(SECRET_VARIABLE in note for note in found["notes"]) == (not secret)
        salts = [fake.bodies[-1]["cache_salt"]]
        client.post("/v1/ask", json={**ASK, "reuse": "none"})
        salts.append(fake.bodies[-1]["cache_salt"])
        assert all(salts) and (salts[0] != salts[1]) == bool(secret)


def test_an_answer_in_full_because_the_gate_found_nothing_says_so(front: Front) -> None:
    slow = point("first-k", 0.5, 0.9)
    engine_of(front.app).parts.controller.methods.gate_result = result(slow)
    body = {name: value for name, value in ASK.items() if name != "ratio"}
    reuse = front.client.post("/v1/ask", json=body).json()["reuse"]
    assert reuse["computed"] == reuse["tokens"]
    assert any("quality gate: full recompute" in note for note in reuse["notes"])


def test_a_ratio_that_a_request_does_not_name_is_left_to_the_connector(front: Front) -> None:
    def wish(**body: Any) -> dict[str, Any]:
        assert front.ask(**body).status_code == 200
        return dict(front.fake.bodies[-1]["kv_transfer_params"]["ragkv"])

    assert wish()["ratio"] == 0.15
    assert wish(ratio=None)["ratio"] is None  # the connector's loading controller chooses
    body = {name: value for name, value in ASK.items() if name != "ratio"}
    assert front.client.post("/v1/ask", json=body).status_code == 200
    assert "ratio" not in front.fake.bodies[-1]["kv_transfer_params"]["ragkv"]
    assert wish(selector="random")["selector"] == "random"
