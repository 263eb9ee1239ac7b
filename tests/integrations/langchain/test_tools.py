"""`bind_tools` on random weights: constrained choices validate, and calls and results go back into
the prompt.
"""

from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool

from ragkv.errors import InputError
from ragkv.integrations.langchain import ChatRagKV

from .helpers import chat, joined

pytest.importorskip("llguidance")


@tool
def search(query: Literal["mill", "port"], k: Literal[1, 2]) -> str:
    """Finds passages."""
    return f"{query} {k}"


@tool
def clock() -> str:
    """Tells the time."""
    return "noon"


@pytest.fixture
def llm(tiny: str) -> ChatRagKV:
    return chat(tiny, max_tokens=900)


@pytest.mark.parametrize("choice", ["any", True])
def test_a_model_that_must_call_a_tool_calls_it_with_valid_arguments(
    llm: ChatRagKV, choice: Any
) -> None:
    got = llm.bind_tools([search, clock], tool_choice=choice, parallel_tool_calls=False).invoke(
        "Who built the mill?"
    )
    assert (
        got.tool_calls
        and got.content == ""
        and got.response_metadata["finish_reason"] == "tool_calls"
    )
    for call in got.tool_calls:
        assert {"search": search, "clock": clock}[call["name"]].invoke(call["args"])


@pytest.mark.parametrize("choice", ["search", {"type": "function", "function": {"name": "search"}}])
def test_a_named_tool_is_called_once(llm: ChatRagKV, choice: Any) -> None:
    (call,) = llm.bind_tools([search, clock], tool_choice=choice).invoke("Who?").tool_calls
    assert call["name"] == "search" and search.invoke(call["args"])


def test_a_stream_holds_the_calls_of_the_whole_answer(llm: ChatRagKV) -> None:
    bound = llm.bind_tools([search], tool_choice="any", parallel_tool_calls=False)
    whole = joined(bound.stream("Who built the mill?"))  # type: ignore[arg-type]
    assert whole.content == ""
    (call,), (other,) = whole.tool_calls, bound.invoke("Who built the mill?").tool_calls
    assert call["name"] == other["name"] and call["args"] == other["args"]


def test_results_go_back_and_the_conversation_is_found_again(llm: ChatRagKV) -> None:
    question = HumanMessage("Who built the mill?")
    called = llm.bind_tools([search], tool_choice="any", parallel_tool_calls=False).invoke(
        [question]
    )
    assert isinstance(called, AIMessage) and called.usage_metadata is not None
    result = ToolMessage("Ada.", tool_call_id=called.tool_calls[0]["id"])
    again = llm.bind_tools([search]).invoke([question, called, result], max_tokens=6)
    assert again.usage_metadata is not None
    assert (
        again.usage_metadata["input_token_details"]["cache_read"]
        >= called.usage_metadata["output_tokens"]
    )


def test_a_choice_that_names_no_tool_is_refused(llm: ChatRagKV) -> None:
    with pytest.raises(InputError, match="tool_choice"):
        llm.bind_tools([search], tool_choice="other")


def test_tools_and_a_response_format_at_once_are_refused(llm: ChatRagKV) -> None:
    with pytest.raises(InputError, match="together"):
        llm.bind_tools([search]).invoke("x", response_format={"type": "json_object"})
