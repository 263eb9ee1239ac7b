"""LangChain's own suites through the server, with `ChatOpenAI` and `OpenAIEmbeddings` as they are.

What does not apply is switched off here and named in docs/api.md.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests

from ragkv import Engine

from .house import app_on, on_port

pytestmark = pytest.mark.enable_socket
SERVED: dict[str, Any] = {"api_key": "none"}  # what the clients are made with; the fixture adds where to


@pytest.fixture(scope="module", autouse=True)
def _server(talker: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    home: Path = tmp_path_factory.mktemp("served")
    once = httpx.Limits(max_keepalive_connections=0)  # each test has a loop of its own, which connections belong to
    with on_port(app_on(talker, home, model=str(home / "talker"))) as url, httpx.Client(trust_env=False) as client:
        SERVED["base_url"], SERVED["http_client"] = f"{url}/v1", client
        SERVED["http_async_client"] = httpx.AsyncClient(trust_env=False, limits=once)
        yield


class TestChat(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "talker", "max_tokens": 24, "stream_usage": True, **SERVED}

    @property
    def has_tool_calling(self) -> bool:
        return False  # refused by name

    @property
    def has_tool_choice(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False

    @property
    def supports_model_override(self) -> bool:
        return False  # one model is served

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {kind: ["cache_read_input"] for kind in ("invoke", "stream")}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        documents = [{"text": "The harbour of Oro was built by Lena Moss, who came from far away."}]
        llm = ChatOpenAI(**self.chat_model_params, extra_body={"documents": documents, "session_id": "s"})
        llm.invoke("Who built it?")
        if not stream:
            return llm.invoke("And when?")
        chunks = list(llm.stream("And when?"))
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole = whole + chunk
        assert isinstance(whole, AIMessage)
        return whole


class TestEmbeddings(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[Embeddings]:
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"model": "hash", "check_embedding_ctx_length": False, **SERVED}
