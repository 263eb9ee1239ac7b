"""Log probabilities in `response_metadata`, where `ChatOpenAI` gives them."""

import math
from typing import Any

import pytest
from langchain_core.messages import BaseMessage

from ragkv.errors import InputError
from ragkv.integrations.langchain import ChatRagKV

from .helpers import chat, joined


@pytest.fixture
def llm(tiny: str) -> ChatRagKV:
    return chat(tiny, logprobs=True, top_logprobs=2)


def content(message: BaseMessage) -> list[dict[str, Any]]:
    assert message.response_metadata["logprobs"]["refusal"] is None
    return message.response_metadata["logprobs"]["content"]  # type: ignore[no-any-return]


def test_each_token_of_an_answer_has_its_log_probability(llm: ChatRagKV) -> None:
    said = llm.invoke("Who?")
    tokens = content(said)
    assert said.usage_metadata is not None and len(tokens) == said.usage_metadata["output_tokens"]
    assert (
        bytes(byte for one in tokens for byte in one["bytes"]).decode("utf-8", "replace").strip()
        == said.content
    )
    for one in tokens:
        assert (
            set(one) == {"token", "bytes", "logprob", "top_logprobs"}
            and len(one["top_logprobs"]) == 2
        )
        assert one["top_logprobs"][0]["logprob"] == pytest.approx(one["logprob"]), (
            "a greedy answer takes the best"
        )
        assert sum(math.exp(other["logprob"]) for other in one["top_logprobs"]) < 1


def test_a_stream_gives_the_same_log_probabilities(llm: ChatRagKV) -> None:
    assert content(joined(llm.stream("Who?"))) == content(llm.invoke("Who?"))


def test_top_logprobs_need_logprobs(tiny: str) -> None:
    with pytest.raises(InputError, match="top_logprobs need logprobs"):
        chat(tiny).invoke("Who?", top_logprobs=2)
    assert "logprobs" not in chat(tiny).invoke("Who?").response_metadata
