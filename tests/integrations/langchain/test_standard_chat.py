"""LangChain's own suites for chat models, with tools and structured output, on a model with random
weights.

A test that only an able model passes is expected to fail, and says what the model would have to do.
"""

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_tests.unit_tests import ChatModelUnitTests

from ragkv import EngineConfig
from ragkv.integrations.langchain import ChatRagKV

from .helpers import A, B, C, joined
from .unaided import ENDING, UnaidedChatTests

pytest.importorskip("llguidance")

CONFIG = EngineConfig()
FOLDERS: dict[str, str] = {}  # of the models; a fixture fills it


@pytest.fixture(scope="module", autouse=True)
def _folders(tiny: str) -> None:
    FOLDERS.update(tiny=tiny)


class _Common:
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatRagKV

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": FOLDERS["tiny"], "config": CONFIG}

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestUnit(_Common, ChatModelUnitTests):
    pass


class TestIntegration(_Common, UnaidedChatTests):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "min_new_tokens": 8, "max_tokens": 600, **ENDING}

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {kind: ["cache_read_input", "cache_creation_input"] for kind in ("invoke", "stream")}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        llm = ChatRagKV(**self.chat_model_params)
        llm.ingest([A, B, C])
        return _say(llm, f"{A.page_content} What does the mill make?", stream)

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        llm = ChatRagKV(**self.chat_model_params)
        llm.delete([A, B, C])
        return _say(llm, "What does the mill make?", stream, documents=[A, B, C])


def _say(llm: ChatRagKV, text: str, stream: bool, **how: Any) -> AIMessage:
    return joined(llm.stream(text, **how)) if stream else llm.invoke(text, **how)
