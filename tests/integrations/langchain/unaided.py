"""What of LangChain's suites a model with random weights cannot do, and how it comes to end its
strings and answers.

A bias towards the quote and towards the end of an answer replaces what a trained model knows by
itself. Everything else that a suite asks is done by ragkv: choices and schemas are constrained, so
the calls and their arguments validate.
"""

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests

from tests.toy_tokenizers import EOS, byte_tokenizer

QUOTE = byte_tokenizer().encode('"', add_special_tokens=False)[0]
# strings and answers end
ENDING: dict[str, Any] = {"temperature": 1.0, "seed": 1, "logit_bias": {QUOTE: 4, EOS: 12}}

SKILLS = {  # what a test asks of the model itself, by the name of the test
    "test_tool_calling": "the model would have to give the argument 3 that the question names",
    "test_tool_calling_async": "the model would have to give the argument 3 that the question "
    "names",
    "test_unicode_tool_call_integration": "the model would have to copy a Chinese name from the "
    "question",
    "test_agent_loop": "the model would have to decide by itself to call a tool",
    "test_structured_output_pydantic_2_v1": "the model would have to write no other keys: the "
    "schema allows them",
    "test_json_mode": "the model would have to write the keys that the question names: JSON mode "
    "allows any object",
}


def needs_skill(name: str, raises: type[Exception] = AssertionError) -> Any:
    """The mark of the test `name`, which only an able model passes."""
    return pytest.mark.xfail(reason=SKILLS[name], strict=True, raises=raises)


class UnaidedChatTests(ChatModelIntegrationTests):
    """LangChain's suite for a model of random weights, which calls no tool of its own accord."""

    @needs_skill("test_tool_calling")
    @pytest.mark.parametrize("model", [{}, {"output_version": "v1"}], indirect=True)
    def test_tool_calling(self, model: BaseChatModel) -> None:
        super().test_tool_calling(model)

    @needs_skill("test_tool_calling_async")
    async def test_tool_calling_async(self, model: BaseChatModel) -> None:
        await super().test_tool_calling_async(model)

    @needs_skill("test_unicode_tool_call_integration")
    def test_unicode_tool_call_integration(self, model: BaseChatModel, **how: Any) -> None:
        super().test_unicode_tool_call_integration(model, **how)

    @needs_skill("test_agent_loop")
    @pytest.mark.parametrize("model", [{}, {"output_version": "v1"}], indirect=True)
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)
