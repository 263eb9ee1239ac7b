"""/v1/chat/completions: OpenAI's shapes, documents and retrieval, named and unnamed conversations,
markers.
"""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from ragkv.api.bodies.parts import IGNORED, MAX_NOTES, UNKNOWN
from ragkv.api.sources import address_of, source_of, without_markers
from ragkv.retrieval import Passage

from .helpers import FACTS, WORLD, corpus, engine_of, events, questions

HELLO = [{"role": "user", "content": "Who built the harbour of Oro?"}]
DOCUMENTS = [
    {"id": str(number), "title": f"Fact {number}", "text": text}
    for number, text in enumerate(FACTS)
]


def chat(
    client: TestClient, messages: list[Any] | None = None, headers: Any = None, **more: Any
) -> Any:
    model = client.get("/v1/models").json()["data"][-1]["id"]
    body = {"model": model, "messages": messages or HELLO, "max_tokens": 12, **more}
    response = client.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json() if not more.get("stream") else events(response.text)


def said(response: Any) -> str:
    text: str = response["choices"][0]["message"]["content"]
    return text


def kinds(response: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for span in response["ragkv"]["prompt"]:
        name = f"{span['kind']} {span['state']}"
        found[name] = found.get(name, 0) + span["tokens"]
    return found


def test_a_chat_response_has_openais_shape(talk: TestClient) -> None:
    got = chat(talk, max_tokens=12.0)  # to JSON 12.0 and 12 are the same number
    assert got["object"] == "chat.completion" and got["id"].startswith("chatcmpl-")
    assert (
        got["choices"][0]["finish_reason"] == "length"
        and got["choices"][0]["message"]["role"] == "assistant"
    )
    usage = got["usage"]
    reuse = got["ragkv"]["reuse"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (reuse["tokens"], 12)
    assert usage["total_tokens"] == reuse["tokens"] + 12
    assert usage["prompt_tokens_details"]["cached_tokens"] == reuse["exact"] + reuse["fused"]


def test_a_chat_stream_has_the_same_content_as_the_whole_response(talk: TestClient) -> None:
    # below 1, the answer depends on which entries are stored
    exact = {"documents": DOCUMENTS, "ragkv": {"ratio": 1}}
    whole = chat(talk, **exact, stop=["zzzz"])
    told = [
        data for _, data in chat(talk, **exact, stream=True, stream_options={"include_usage": True})
    ]
    assert told.pop() == "[DONE]"
    assert told[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(one["choices"][0]["delta"].get("content", "") for one in told[:-1])
    assert text == said(whole)
    assert [one["choices"][0]["finish_reason"] for one in told[:-1]][-1] == "length"
    assert told[-1]["choices"] == [] and told[-1]["usage"]["completion_tokens"] == 12
    assert told[-1]["ragkv"]["reuse"]["tokens"] == whole["ragkv"]["reuse"]["tokens"]
    assert all("ragkv" not in one and one["usage"] is None for one in told[:-1])


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(talk: TestClient) -> None:
    whole = said(chat(talk, max_tokens=40))
    stop = whole[10:12]
    got = chat(talk, max_tokens=40, stop=stop)
    assert said(got) == whole[: whole.index(stop)] and got["choices"][0]["finish_reason"] == "stop"
    assert said(chat(talk, max_tokens=40, stop=["never-said", stop])) == said(got)


def test_decoding_is_greedy_by_default_and_a_seed_makes_sampling_repeatable(
    talk: TestClient,
) -> None:
    assert (
        said(chat(talk))
        == said(chat(talk, temperature=0))
        == said(chat(talk, temperature=0.0, top_p=0.5))
    )
    sampled = [said(chat(talk, temperature=1.5, seed=seed)) for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    assert said(chat(talk, top_p=0.9, seed=3)) == said(chat(talk, top_p=0.9, temperature=1, seed=3))
    assert (
        said(chat(talk, top_k=20, seed=3))
        == said(chat(talk, top_k=20, temperature=1, seed=3))
        != said(chat(talk))
    )
    notes = chat(talk, temperature=0, top_p=0.5)["ragkv"]["reuse"]["notes"]
    assert notes == ["decoding is greedy because temperature is 0: top_p has no effect"]


def test_log_probabilities_come_with_every_token_also_streamed(talk: TestClient) -> None:
    how: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "ragkv": {"ratio": 1}}
    whole = chat(talk, **how)
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == 12 and all(len(one["top_logprobs"]) == 2 for one in content)
    for one in content:  # greedy: the token is the most probable one
        assert (
            one["logprob"] == one["top_logprobs"][0]["logprob"] >= one["top_logprobs"][1]["logprob"]
        )
    assert (
        b"".join(bytes(one["bytes"]) for one in content).decode("utf-8", "replace").strip()
        == said(whole).strip()
    )
    assert chat(talk)["choices"][0]["logprobs"] is None
    streamed = [data for _, data in chat(talk, **how, stream=True)][:-1]
    together = [
        one
        for chunk in streamed
        for one in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert together == content


@pytest.mark.parametrize("field", IGNORED)
def test_a_field_without_effect_is_accepted_and_a_note_says_so(
    talk: TestClient, field: str
) -> None:
    assert chat(talk, **{field: {"any": "value"}})["ragkv"]["notes"] == [
        f"{field} is ignored: {IGNORED[field]}"
    ]
    assert chat(talk, **{field: None})["ragkv"]["notes"] == []
    assert f"`{field}`" in (WORLD.parents[1] / "docs" / "api.md").read_text("utf-8")


def test_fields_of_other_servers_in_earlier_messages_are_left_out_and_noted(
    talk: TestClient,
) -> None:
    call = {"id": "c1", "index": 0, "function": {"name": "f", "arguments": "{}", "parsed": {}}}
    earlier = {
        "role": "assistant",
        "id": "msg_1",
        "content": [{"type": "text", "text": "Hello.", "logprobs": []}],
        "reasoning_content": "The user greets.",
        "provider_specific_fields": {"a": 1},
        "audio": None,
    }
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "7", "artifact": [1]}
    answered = chat(talk, messages=[*HELLO, earlier, *HELLO, called, result])
    names = ("id", "reasoning_content", "provider_specific_fields", "logprobs")
    of_calls = ("index", "parsed", "artifact")
    assert answered["ragkv"]["notes"] == [
        f"{name} is ignored: {UNKNOWN}" for name in (*names, *of_calls)
    ]


def test_notes_on_left_out_fields_are_few_however_many_there_are(talk: TestClient) -> None:
    many = {f"field{number}": 1 for number in range(MAX_NOTES + 5)}
    notes = chat(talk, messages=[{**HELLO[0], **many}])["ragkv"]["notes"]
    assert len(notes) == MAX_NOTES + 1
    assert notes[-1] == "5 more fields are ignored"


def test_values_that_clients_send_and_that_ask_for_nothing_are_answered(talk: TestClient) -> None:
    sent = {  # by openai-python, Open WebUI and LibreChat
        "n": 1, "user": "", "store": False, "metadata": {}, "service_tier": "auto", "parallel_tool_calls": True,
        "stream_options": {"include_usage": None}, "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {},
        "seed": 7, "response_format": {"type": "text"}, "tool_choice": "none", "modalities": ["text"], "stop": None,
        "functions": None, "reasoning_effort": "none", "verbosity": "medium", "tools": [],
    }  # fmt: skip
    assert said(chat(talk, **sent)) == said(chat(talk))
    assert chat(talk, **sent, stream=True)[-1][1] == "[DONE]"


def test_an_image_is_refused_and_the_error_says_that_it_should_be_text(client: TestClient) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    content = [{"type": "text", "text": "What is this?"}, image]
    body = {"model": "reader", "messages": [{"role": "user", "content": content}]}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert (
        response.json()["error"]["message"] == "messages.0.content.1.type: Input should be 'text'."
    )


def test_documents_of_a_chat_are_chunks_whose_kv_is_stored(talk: TestClient) -> None:
    first = chat(talk, documents=DOCUMENTS)
    assert first["ragkv"]["reuse"]["missed_chunks"] == 2
    engine_of(talk.app).flush()
    second = chat(
        talk, [{"role": "user", "content": "And who built the mill?"}], documents=DOCUMENTS[::-1]
    )
    assert second["ragkv"]["reuse"]["missed_chunks"] == 0
    chunks = [span for span in second["ragkv"]["prompt"] if span["kind"] == "chunk"]
    assert [chunk["number"] for chunk in chunks] == [1, 2]
    assert [source["document_id"] for source in second["ragkv"]["sources"]] == ["1", "0"]
    # the other one is computed
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > len(FACTS[0]) // 2


def test_a_chat_with_rag_answers_and_cites_as_ask_does(client: TestClient) -> None:
    client.post("/v1/collections", json={"name": "world"})
    client.post("/v1/collections/world/documents", files=corpus())
    cited = 0
    for one in questions()[:8]:
        asked = client.post(
            "/v1/ask",
            json={"question": one["question"], "collection": "world"},
        ).json()
        got = chat(
            client,
            [{"role": "user", "content": one["question"]}],
            rag={"collection": "world"},
            max_tokens=64,
        )
        report = got["ragkv"]
        assert report["reuse"]["tokens"] == asked["reuse"]["tokens"]
        message = got["choices"][0]["message"]
        numbers = [citation["number"] for citation in report["citations"]]
        assert [source["text"] for source in report["sources"]] == [
            source["text"] for source in asked["sources"]
        ]
        assert message["content"] == asked["answer"] + ("\u00a0" if numbers else "") + "".join(
            f"[{n}]" for n in numbers
        )
        for annotation, number in zip(message["annotations"], numbers, strict=True):
            there = annotation["url_citation"]
            assert message["content"][there["start_index"] : there["end_index"]] == f"[{number}]"
            source = report["sources"][number - 1]["source"]
            assert there["url"] == f"/v1/collections/world/documents/{source}"
            cited += 1
    assert cited


@pytest.mark.parametrize(
    ("source", "id", "collection", "address"),
    [
        ("https://a.example/x", "d", "c", "https://a.example/x"),
        ("HTTP://a.example", "d", None, "HTTP://a.example"),
        ("javascript:alert(1)", "javascript:alert(1)", "c", "javascript%3Aalert%281%29"),
        ("data:text/html,x", "../../keys", "c", "..%2F..%2Fkeys"),
        (" javascript:x//https://a", "a b/c?d#e", "c", "a%20b%2Fc%3Fd%23e"),
        ("file:///etc/passwd", "javascript:x", None, "#1"),
        ("javascript:x", "javascript:x", None, "#1"),
    ],
)
def test_a_citation_links_to_the_web_or_to_this_server_whatever_its_author_wrote(
    source: str, id: str, collection: str | None, address: str
) -> None:
    passage = Passage("", id, "text", (0, 4), source, {})
    linked = address_of(source_of(1, passage), collection)
    assert linked.removeprefix("/v1/collections/c/documents/") == address


@pytest.mark.parametrize(
    "said", ["rows[0]", "see list [2]", "x = [1]", "a[1][2]", "See [1] and [2]."]
)
def test_brackets_of_an_answer_stay_and_markers_of_the_server_go(said: str) -> None:
    assert without_markers(said) == said == without_markers(f"{said}\u00a0[3][12]")


def test_messages_that_continue_an_answer_reuse_its_kv(talk: TestClient) -> None:
    first = chat(talk)
    messages = [
        *HELLO,
        {"role": "assistant", "content": said(first)},
        {"role": "user", "content": "And when?"},
    ]
    assert kinds(chat(talk, messages))["history exact"] > len(HELLO[0]["content"])
    edited = [{"role": "user", "content": "Who built the mill of Oro?"}, *messages[1:]]
    assert "history exact" not in kinds(chat(talk, edited))
    assert talk.get("/v1/sessions").json()["data"] == []  # unnamed conversations are not listed


@pytest.mark.parametrize(
    ("prompt_chars", "asked", "tokens", "note"),
    [
        (100, {"max_tokens": 4096}, 1024, "max_tokens is 1024, not 4096"),
        (100, {"max_completion_tokens": 10**9}, 1024, "max_tokens is 1024, not 1000000000"),
        (7_900, {"max_tokens": 1000}, 273, "the answer may have 273 tokens, not 1000"),
        (8_100, {}, 73, "the answer may have 73 tokens, not 256"),
        (8_172, {}, 1, "the answer may have 1 tokens, not 256"),
        (8_173, {}, None, "The prompt has 8192 tokens"),
    ],
)
def test_an_answer_is_cut_to_what_fits(
    talk: TestClient, prompt_chars: int, asked: dict[str, int], tokens: int | None, note: str
) -> None:
    body = {
        "model": "talker",
        "messages": [{"role": "user", "content": "x" * prompt_chars}],
        **asked,
    }
    response = talk.post("/v1/chat/completions", json=body)
    assert note in response.text
    if tokens is None:
        assert (response.status_code, response.json()["error"]["code"]) == (
            400,
            "context_length_exceeded",
        )
    else:
        got = response.json()
        assert (got["choices"][0]["finish_reason"], got["usage"]["completion_tokens"]) == (
            "length",
            tokens,
        )


def test_an_answer_that_is_cut_leaves_a_conversation_its_history(talk: TestClient) -> None:
    chat(talk, [{"role": "user", "content": "x" * 600}], session_id="long")
    got = chat(talk, [{"role": "user", "content": "y" * 7_300}], session_id="long", max_tokens=1000)
    kept = sum(span["tokens"] for span in got["ragkv"]["prompt"] if span["kind"] == "history")
    assert kept > 600 and got["usage"]["completion_tokens"] == 8192 - got["usage"]["prompt_tokens"]


def test_with_a_session_the_server_stores_the_conversation(talk: TestClient) -> None:
    chat(talk, documents=DOCUMENTS, session_id="s")
    got = chat(talk, [{"role": "user", "content": "And when?"}], session_id="s")
    assert got["ragkv"]["session_id"] == "s"
    assert sum(span["tokens"] for span in got["ragkv"]["prompt"] if span["kind"] == "history") > 80
    ignored = [
        {"role": "user", "content": "never looked at"},
        {"role": "assistant", "content": "nor this"},
    ]
    alike = []
    for name, more in (("f", []), ("g", ignored)):
        assert talk.post("/v1/sessions/s/fork", json={"to": name}).status_code == 201
        alike.append(chat(talk, [*more, {"role": "user", "content": "And why?"}], session_id=name))
    assert alike[0]["ragkv"]["reuse"]["tokens"] == alike[1]["ragkv"]["reuse"]["tokens"]
    assert said(alike[0]) == said(alike[1])


@pytest.mark.parametrize(
    ("extra", "status", "param"),
    [
        ({"model": "gpt-4o"}, 404, "model"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, 400, "messages"),
        ({"n": 2}, 400, "n"),
        ({"audio": {"voice": "a"}}, 400, "audio"),
        ({"top_logprobs": 3}, 400, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        ({"stop": list("abcde")}, 400, "stop"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 400, "max_tokens"),
        ({"max_completion_tokens": 0}, 400, "max_completion_tokens"),
        ({"stop": [""]}, 400, "stop.0"),
        ({"stop": ["a", 3]}, 400, "stop.1"),
        ({"stop": ["a"] * 5}, 400, "stop"),
        ({"messages": [{"role": "user", "content": []}]}, 400, "messages.0.content"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, 400, "messages.0.content.0"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            400,
            "messages.0.content.0.text",
        ),
        (
            {"tool_choice": "any", "tools": [{"type": "function", "function": {"name": "f"}}]},
            400,
            "tool_choice",
        ),
        ({"tool_choice": {"type": "tool"}, "tools": []}, 400, "tool_choice.type"),
        ({"Stop": 1}, 400, "Stop"),
        ({"temperature": 2.5}, 400, "temperature"),
        ({"temperature": True}, 400, "temperature"),
        ({"top_k": -1}, 400, "top_k"),
        ({"min_p": 1.5}, 400, "min_p"),
        ({"presence_penalty": 2.5}, 400, "presence_penalty"),
        ({"logit_bias": {"5": 101}}, 400, "logit_bias.5"),
        ({"logit_bias": {"five": 1}}, 400, None),
        ({"logit_bias": {"999999": 1}}, 400, None),
        ({"rag": {"collection": "nowhere"}}, 404, "rag.collection"),
        ({"documents": [{"text": "x"}] * 65}, 400, "documents"),
        ({"temprature": 1}, 400, "temprature"),
    ],
)
def test_a_wrong_chat_request_is_refused_and_names_the_field(
    client: TestClient, extra: dict[str, Any], status: int, param: str | None
) -> None:
    response = client.post(
        "/v1/chat/completions", json={"model": "reader", "messages": HELLO, **extra}
    )
    assert response.status_code == status, response.text
    if param is not None:
        assert response.json()["error"]["param"] == param
