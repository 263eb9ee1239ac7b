"""Chats of the openai client: messages, streams, sampling, several answers, log probabilities."""

import math
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.enable_socket
SAY: list[Any] = [{"role": "user", "content": "Tell me of the harbour."}]


def chat(client: openai.OpenAI, messages: list[Any] = SAY, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": "talker", "messages": messages, "max_tokens": 8, **more})


def text(got: Any) -> str:
    return str(got.choices[0].message.content)


def test_a_system_message_changes_the_prompt(openai_client: openai.OpenAI) -> None:
    plain = chat(openai_client)
    kind = chat(openai_client, [{"role": "system", "content": "Be kind."}, *SAY])
    assert kind.usage.prompt_tokens > plain.usage.prompt_tokens + len("Be kind.")


def test_a_developer_message_is_a_system_message(openai_client: openai.OpenAI) -> None:
    answers = [chat(openai_client, [{"role": role, "content": "Be kind."}, *SAY]) for role in ("system", "developer")]
    assert text(answers[0]) == text(answers[1])


def test_text_parts_are_one_text(openai_client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "of the harbour."}]
    assert text(chat(openai_client, [{"role": "user", "content": parts}])) == text(chat(openai_client))


def test_the_second_request_of_a_dialogue_reuses_its_first_turn(openai_client: openai.OpenAI) -> None:
    first = chat(openai_client)
    more = [*SAY, {"role": "assistant", "content": text(first)}, {"role": "user", "content": "And the mill?"}]
    usage = chat(openai_client, more).usage
    assert usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_passages_of_a_collection_are_found_and_reused(openai_client: openai.OpenAI) -> None:
    question: list[Any] = [{"role": "user", "content": "Who built the mill?"}]
    got = chat(openai_client, question, extra_body={"rag": {"collection": "facts", "k": 2}})
    assert len(got.model_extra["ragkv"]["sources"]) == 2 and got.usage.prompt_tokens_details.cached_tokens > 60


@pytest.mark.parametrize("count", [1, 5, 17])
def test_an_answer_has_at_most_max_completion_tokens(openai_client: openai.OpenAI, count: int) -> None:
    got = chat(openai_client, max_tokens=None, max_completion_tokens=count)
    assert got.usage.completion_tokens == count and got.choices[0].finish_reason == "length"


def test_several_stop_strings_end_an_answer_at_the_first(openai_client: openai.OpenAI) -> None:
    whole = text(chat(openai_client, max_tokens=30))
    stops = [whole[20:22], whole[9:11]]
    got = chat(openai_client, max_tokens=30, stop=stops)
    assert text(got) == whole[: min(whole.index(stop) for stop in stops)] and got.choices[0].finish_reason == "stop"


def test_a_seed_repeats_an_answer_and_another_seed_does_not(openai_client: openai.OpenAI) -> None:
    one, same, other = (text(chat(openai_client, temperature=1.5, seed=seed, max_tokens=20)) for seed in (3, 3, 4))
    assert one == same != other


def test_temperature_0_is_the_greedy_answer(openai_client: openai.OpenAI) -> None:
    assert text(chat(openai_client, temperature=0, seed=9)) == text(chat(openai_client))


def test_a_tiny_top_p_gives_the_greedy_answer(openai_client: openai.OpenAI) -> None:
    assert text(chat(openai_client, temperature=1.5, top_p=1e-6, seed=1)) == text(chat(openai_client))


def test_top_k_of_1_is_the_greedy_answer(openai_client: openai.OpenAI) -> None:
    assert text(chat(openai_client, temperature=1.5, seed=1, extra_body={"top_k": 1})) == text(chat(openai_client))


def test_a_logit_bias_chooses_the_token(openai_client: openai.OpenAI) -> None:
    logprobs = chat(openai_client, max_tokens=1, logit_bias={"40": 100}, logprobs=True).choices[0].logprobs
    biased = chat(openai_client, max_tokens=3, logit_bias={"40": 100})
    assert text(biased) == logprobs.content[0].token * 3


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_a_penalty_works_against_repetition(openai_client: openai.OpenAI, penalty: str) -> None:
    bias = {"40": 1.0, "41": 0.5}
    plain = text(chat(openai_client, max_tokens=24, logit_bias=bias))
    less = text(chat(openai_client, max_tokens=24, logit_bias=bias, **{penalty: 2.0}))
    assert len(set(less)) >= len(set(plain)) and less != plain


def test_several_answers_are_numbered_and_differ(openai_client: openai.OpenAI) -> None:
    got = chat(openai_client, n=3, temperature=1.5, seed=1)
    assert [choice.index for choice in got.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in got.choices}) == 3
    assert got.usage.completion_tokens == 24


def test_one_of_several_answers_is_that_of_its_own_seed(openai_client: openai.OpenAI) -> None:
    several = chat(openai_client, n=2, temperature=1.5, seed=5)
    alone = chat(openai_client, temperature=1.5, seed=6)
    assert several.choices[1].message.content == text(alone)


def test_log_probabilities_are_natural_logarithms_and_the_best_come_first(openai_client: openai.OpenAI) -> None:
    tokens = chat(openai_client, logprobs=True, top_logprobs=4).choices[0].logprobs.content
    assert len(tokens) == 8
    for token in tokens:
        best = [one.logprob for one in token.top_logprobs]
        assert best == sorted(best, reverse=True) and len(best) == 4 and sum(map(math.exp, best)) <= 1.0001
        assert token.logprob == pytest.approx(best[0], abs=1e-4), "the answer is greedy"


def test_the_bytes_of_the_tokens_are_the_text(openai_client: openai.OpenAI) -> None:
    got = chat(openai_client, logprobs=True, max_tokens=12)
    data = b"".join(bytes(token.bytes) for token in got.choices[0].logprobs.content)
    assert data.decode("utf-8", "replace").strip() == text(got).strip()


def test_a_stream_is_the_whole_answer(openai_client: openai.OpenAI) -> None:
    chunks = list(chat(openai_client, stream=True, max_tokens=20))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text(chat(openai_client, max_tokens=20))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == "length"
    assert len({chunk.id for chunk in chunks}) == 1 and len(chunks) > 3


def test_a_stream_of_several_answers_has_all_of_them(openai_client: openai.OpenAI) -> None:
    whole = chat(openai_client, n=2, temperature=1.5, seed=1)
    texts = ["", ""]
    for chunk in chat(openai_client, n=2, temperature=1.5, seed=1, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_a_stream_has_the_log_probabilities(openai_client: openai.OpenAI) -> None:
    whole = chat(openai_client, logprobs=True).choices[0].logprobs.content
    chunks = list(chat(openai_client, logprobs=True, stream=True))
    streamed = [one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
    assert [one.token for one in streamed] == [one.token for one in whole]


def test_the_streams_helper_assembles_the_answer(openai_client: openai.OpenAI) -> None:
    stop = text(chat(openai_client, max_tokens=30))[12:14]
    how: Any = {"model": "talker", "messages": SAY, "max_tokens": 30, "stop": stop}
    with openai_client.chat.completions.stream(**how) as stream:
        final = stream.get_final_completion()
    assert text(final) == text(chat(openai_client, max_tokens=30, stop=stop))


def test_a_stream_can_be_closed_before_its_end(openai_client: openai.OpenAI) -> None:
    stream = chat(openai_client, stream=True, max_tokens=900)
    assert next(iter(stream)).choices
    stream.close()
    assert text(chat(openai_client))


def test_a_raw_response_has_the_servers_headers(openai_client: openai.OpenAI) -> None:
    raw = openai_client.chat.completions.with_raw_response.create(model="talker", messages=SAY, max_tokens=2)
    assert raw.headers["x-request-id"] and text(raw.parse())
