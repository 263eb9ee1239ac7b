"""One home by every route: the same model, passages and KV, and what one question missed is there
for the next.
"""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ragkv import EngineConfig, PromptConfig
from ragkv.errors import ConfigError, RagKVError
from ragkv.home import KnownHome
from ragkv.rag import Corpus, Rag
from ragkv.retrieval import Document
from tests.reader import READER

QUESTION = "Where does Ada Quill live?"
TEXTS = (
    "Ada Quill was born in Marl and became a sculptor.",
    "Ada Quill lives in the town of Dunvale today.",
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index without KV, made by the reader; from then on nobody names a model."""
    monkeypatch.setattr("ragkv.retrieval.embedders.minilm_path", lambda: None)
    with Rag(
        Corpus.open(tmp_path / "home", READER, EngineConfig(dtype="float32"), chunk_tokens=64)
    ) as rag:
        rag.corpus.ingest(
            [Document(f"{number}.md", text) for number, text in enumerate(TEXTS)], encode=False
        )
    monkeypatch.delenv("RAGKV_MODEL")
    return tmp_path / "home"


def library(home: Path, stack: ExitStack) -> Iterator[dict[str, Any]]:
    rag = stack.enter_context(Rag(Corpus.open(home)))
    while True:
        reuse = rag.ask(QUESTION, max_new_tokens=4).answer.reuse
        yield {"missed_chunks": reuse.missed_chunks, "reused": reuse.exact + reuse.fused}


def command(home: Path, stack: ExitStack) -> Iterator[dict[str, Any]]:
    from ragkv.cli import main

    stack.enter_context(pytest.MonkeyPatch.context()).setattr(
        sys,
        "argv",
        ["ragkv", "ask", QUESTION, "--home", str(home), "--json", "--max-new-tokens", "4"],
    )
    printed: list[Any] = []
    stack.enter_context(pytest.MonkeyPatch.context()).setattr(
        "ragkv.cli.ask.print_json", printed.append
    )
    while True:
        with pytest.raises(SystemExit):
            main()
        yield asdict(printed[-1]["answer"].reuse)


def served(home: Path, stack: ExitStack) -> Any:
    testclient = pytest.importorskip("fastapi.testclient", reason="needs fastapi (extra api)")
    from ragkv.api import ServeConfig, create_app

    client = stack.enter_context(
        testclient.TestClient(create_app(ServeConfig(home=str(home))), "http://127.0.0.1")
    )
    while client.get("/readyz").status_code != 200:
        pass
    return client


def service(home: Path, stack: ExitStack) -> Iterator[dict[str, Any]]:
    client = served(home, stack)
    while True:
        yield client.post("/v1/ask", json={"question": QUESTION, "max_tokens": 4}).json()["reuse"]


def langchain(home: Path, stack: ExitStack) -> Iterator[dict[str, Any]]:
    pytest.importorskip("langchain_core", reason="needs langchain-core (extra langchain)")
    from ragkv.integrations.langchain import ChatRagKV, RagKVRetriever

    rag = stack.enter_context(Rag(Corpus.open(home)))
    model = ChatRagKV(engine=rag.engine, max_tokens=4)
    retriever = RagKVRetriever(rag=rag)
    while True:
        passages = "\n\n".join(document.page_content for document in retriever.invoke(QUESTION))
        answer = model.invoke([("system", f"Passages:\n\n{passages}"), ("user", QUESTION)])
        yield answer.response_metadata["kv_cache"]["reuse"]


def mcp(home: Path, stack: ExitStack) -> Iterator[dict[str, Any]]:
    corpus = pytest.importorskip(
        "ragkv.integrations.mcp", reason="needs mcp (extra mcp)"
    ).ServedCorpus
    client = served(home, stack)

    async def send(method: str, path: str, body: Any) -> Any:
        return client.request(method, path, json=body).json()

    while True:
        answer = asyncio.run(corpus(send).ask(QUESTION, 6, 4))
        yield {"missed_chunks": None, "reused": answer["reused_tokens"]}


ROUTES = (library, command, service, langchain, mcp)


@pytest.mark.enable_socket
@pytest.mark.parametrize("first", ROUTES)
def test_the_second_question_is_warm_by_every_route_whatever_route_the_first_took(
    home: Path, first: Any
) -> None:
    with ExitStack() as stack:
        answers = first(home, stack)
        cold = next(answers)
        warm = next(answers)
    # a server, and LangChain's model, may encode passages before the question comes
    if first in (library, command):
        assert cold["missed_chunks"] == len(TEXTS)
    assert warm["missed_chunks"] in (0, None) and cold.get("reused", 0) <= warm.get("reused", 0)
    for other in ROUTES:
        with ExitStack() as stack:
            assert next(other(home, stack))["missed_chunks"] in (0, None), other.__name__


def test_a_home_knows_its_model_and_settings_and_refuses_another_model(
    home: Path, caplog: Any
) -> None:
    with pytest.raises(
        ConfigError, match=r"was made with the model '.*reader'.*Leave the model out"
    ):
        Rag(Corpus.open(home, "smollm2"))
    known = KnownHome.at(home)
    assert (known.model, known.kept["chunk_tokens"], known.kept["settings"]["dtype"]) == (
        READER,
        64,
        "float32",
    )
    assert known.config(EngineConfig()).dtype == "float32"
    known.config(EngineConfig(adapter_id="other"))
    assert "was made with adapter_id = ''; with 'other' none of its KV is reused" in caplog.text
    (home / "home.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"was damaged and lies at .*home\.json\.damaged"):
        KnownHome.at(home)
    new = KnownHome.at(home.parent)
    assert (new.model, new.made_with.get("chunk_tokens")) == ("smollm2", None)  # the default
    assert "one short sentence" in new.config(EngineConfig()).prompt.system
    assert new.config(EngineConfig(prompt=PromptConfig("Be kind."))).prompt.system == "Be kind."


def test_an_index_that_cannot_be_closed_leaves_no_engine_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rag = Rag(Corpus.open(tmp_path / "home", READER))

    def refuse() -> None:
        raise OSError("The disk went away.")

    with monkeypatch.context() as patch:
        patch.setattr(rag.index, "close", refuse)
        with pytest.raises(OSError, match="went away"):
            rag.close()
    with pytest.raises(RagKVError, match="closed"):
        rag.engine.entries.encode([])
    rag.index.close()
