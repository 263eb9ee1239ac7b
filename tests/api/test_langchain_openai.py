"""LangChain's own suites through the server, with `ChatOpenAI` and `OpenAIEmbeddings` as they are.

What does not apply is switched off here.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from langchain_core.embeddings import Embeddings
from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import EmbeddingsIntegrationTests

from ragkv import Engine
from tests.integrations.langchain.helpers import joined
from tests.integrations.langchain.unaided import ENDING, UnaidedChatTests, needs_skill

from .helpers import app_on, on_port

pytestmark = [
    pytest.mark.enable_socket,
    # Warnings of `ChatOpenAI` itself, about its own objects and about classes of pydantic's first
    # version.
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
    pytest.mark.filterwarnings("ignore:Received a Pydantic BaseModel V1 schema:UserWarning"),
]
# arguments of the clients; the fixture adds the address
SERVED: dict[str, Any] = {"api_key": "none"}


@pytest.fixture(scope="module", autouse=True)
def _server(talker: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    home: Path = tmp_path_factory.mktemp("served")
    # a connection belongs to an event loop, and each test has its own
    once = httpx.Limits(max_keepalive_connections=0)
    with (
        on_port(app_on(talker, home, model=str(home / "talker"))) as url,
        httpx.Client(trust_env=False) as client,
    ):
        SERVED["base_url"], SERVED["http_client"] = f"{url}/v1", client
        SERVED["http_async_client"] = httpx.AsyncClient(trust_env=False, limits=once)
        yield


class TestChat(UnaidedChatTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "talker", "max_tokens": 300, "stream_usage": True, **ENDING, **SERVED}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return False  # one model is served

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {kind: ["cache_read_input"] for kind in ("invoke", "stream")}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        documents = [{"text": "The harbour of Oro was built by Lena Moss, who came from far away."}]
        llm = ChatOpenAI(
            **self.chat_model_params, extra_body={"documents": documents, "session_id": "s"}
        )
        llm.invoke("Who built it?")
        return joined(llm.stream("And when?")) if stream else llm.invoke("And when?")

    @needs_skill("test_structured_output_pydantic_2_v1")
    def test_structured_output_pydantic_2_v1(self, model: BaseChatModel) -> None:
        super().test_structured_output_pydantic_2_v1(model)

    @needs_skill("test_json_mode", raises=OutputParserException)
    def test_json_mode(self, model: BaseChatModel) -> None:
        super().test_json_mode(model)


class TestEmbeddings(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[Embeddings]:
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"model": "hash", "check_embedding_ctx_length": False, **SERVED}
