"""LangChain's own suites for chat models. docs/langchain.md lists the tests that are switched off here."""

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from ragkv import EngineConfig
from ragkv.langchain import ChatRagKV
from ragkv.model.loading import READER

from .helpers import documents, needs_reader

CONFIG = EngineConfig()


class _Common:
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatRagKV

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "reader", "config": CONFIG, "min_new_tokens": 1}

    @property
    def has_structured_output(self) -> bool:
        return False  # the reader's sentences do not end: test_structured_output.py has bounded schemas

    @property
    def has_tool_calling(self) -> bool:
        return False  # the reader calls no tools: test_tools.py constrains the choice


class TestUnit(_Common, ChatModelUnitTests):
    pass


@needs_reader
class TestIntegration(_Common, ChatModelIntegrationTests):
    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str | None:
        return str(READER)  # the same model under another name, so another engine

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {kind: ["cache_read_input", "cache_creation_input"] for kind in ("invoke", "stream")}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        llm = ChatRagKV(**self.chat_model_params)
        llm.ingest(documents())
        return _say(llm, f"{documents()[0].page_content} What does Nesibissa do for a living?", stream)

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        llm = ChatRagKV(**self.chat_model_params)
        llm.forget(documents())
        return _say(llm, "What does Nesibissa do for a living?", stream, documents=documents())


def _say(llm: ChatRagKV, text: str, stream: bool, **how: Any) -> AIMessage:
    if not stream:
        return llm.invoke(text, **how)
    said: AIMessageChunk | None = None
    for chunk in llm.stream(text, **how):
        said = chunk if said is None else said + chunk  # type: ignore[assignment]
    assert said is not None
    return said
