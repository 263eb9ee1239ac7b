"""Model folders made once, engines closed at the end."""

from collections.abc import Iterator

import pytest

from ragkv.integrations.langchain import ChatRagKV, close_engines

from .helpers import chat, tiny_folder


@pytest.fixture(scope="session", autouse=True)
def _engines() -> Iterator[None]:
    yield
    close_engines()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def llm(tiny: str) -> ChatRagKV:
    return chat(tiny)
