"""Settings, streaming, tracing and lazy loading of the chat model."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tracers.base import BaseTracer
from transformers import AutoModelForCausalLM

from ragkv import Engine, RagKVError
from ragkv.errors import DeadlineError, InputError
from ragkv.integrations.langchain import ChatRagKV, RagKVRetriever
from ragkv.rag import Corpus, Rag
from tests.prompt.test_template import NO_SYSTEM, SILENT_ABOUT_SYSTEM
from tests.toy_tokenizers import CHATML, byte_tokenizer

from .helpers import A, chat, kv

ROOT = Path(__file__).parents[3]
model_of = AutoModelForCausalLM.from_pretrained


class TestSettings:
    def test_settings_of_a_call_override_those_of_the_model(self, llm: ChatRagKV) -> None:
        answer = llm.invoke("Who?", max_tokens=3, min_new_tokens=3)
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["output_tokens"] == 3
        assert answer.response_metadata["finish_reason"] == "length"

    def test_ratio_selector_and_reuse_reach_the_engine(self, llm: ChatRagKV) -> None:
        llm.ingest([A])
        how: dict[str, Any] = {"documents": ["x" * 20, A], "ratio": 0.5, "selector": "first-k"}
        reuse = kv(llm.invoke("Who?", **how))["reuse"]
        assert (reuse["ratio"], reuse["selector"]) == (0.5, "first-k")
        assert kv(llm.invoke("Who?", **{**how, "reuse": "none"}))["mode"] == "full_prefill"

    def test_an_answer_that_exceeds_the_timeout_raises_a_deadline_error(self, tiny: str) -> None:
        with pytest.raises(DeadlineError):
            chat(tiny, timeout=1e-4).invoke("Who?", max_tokens=200, min_new_tokens=200)

    def test_an_unknown_field_is_refused_by_the_constructor(self) -> None:
        with pytest.raises(ValueError, match="temprature"):
            ChatRagKV(temprature=0)  # type: ignore[call-arg]


class TestStreaming:
    def test_a_stream_gives_the_text_and_usage_of_invoke(self, llm: ChatRagKV) -> None:
        *pieces, last = llm.stream("Who founded it?")
        whole = llm.invoke("Who founded it?")
        assert "".join(str(piece.content) for piece in pieces) == whole.content
        assert last.usage_metadata == whole.usage_metadata
        assert len(pieces) > 2

    async def test_an_engine_error_is_raised_in_the_awaiting_task(self, llm: ChatRagKV) -> None:
        with pytest.raises(RagKVError):
            await llm.ainvoke("Who?", ratio=3.0)
        with pytest.raises(RagKVError):
            [piece async for piece in llm.astream("Who?", ratio=3.0)]


class TestTracesAndCaches:
    def test_traces_do_not_contain_documents(self, llm: ChatRagKV) -> None:
        class Tracer(BaseTracer):
            seen: list[str] = []

            def _persist_run(self, run: Any) -> None:
                self.seen.append(repr(run.extra))

        llm.invoke("Who?", documents=[A], config={"callbacks": [Tracer()]})
        assert Tracer.seen
        assert A.page_content not in Tracer.seen[0]

    def test_an_answer_cache_distinguishes_settings_and_documents(self, tiny: str) -> None:
        class Keys(InMemoryCache):
            seen: list[str] = []

            def lookup(self, prompt: str, llm_string: str) -> Any:
                self.seen.append(llm_string)
                return super().lookup(prompt, llm_string)

        made = chat(tiny, cache=Keys())
        first = made.invoke("Who?", documents=[A])
        assert made.invoke("Who?", documents=[A]).id == first.id or first.content
        assert (
            made.invoke("Who?", documents=["Quite another text than that."]).content
            != first.content
        )
        chat(tiny, cache=made.cache, ratio=1.0).invoke("Who?", documents=[A])
        assert len(set(Keys.seen)) == 3


class TestEngines:
    def test_the_constructor_loads_no_model(self) -> None:
        assert ChatRagKV(model="/nowhere/at/all").model == "/nowhere/at/all", (
            "a missing model would raise"
        )

    def test_chat_models_over_one_given_engine_share_its_ingested_documents(
        self, tiny: str
    ) -> None:
        with Engine.from_pretrained(tiny) as engine:
            one = ChatRagKV(engine=engine)
            two = ChatRagKV(engine=engine, temperature=0.5)
            one.ingest([A])
            answer = two.invoke(f"{A.page_content} Who?", max_tokens=3)
            assert len(kv(answer)["documents"]) == 1, "two knows the document that one ingested"
            assert answer.response_metadata["model_name"] == tiny

    def test_an_engine_without_a_tokenizer_is_refused(self, tiny: str) -> None:
        with Engine(model_of(tiny)) as engine, pytest.raises(InputError, match="tokenizer"):
            ChatRagKV(engine=engine).invoke("Who?")

    @pytest.mark.parametrize("template", [None, NO_SYSTEM, SILENT_ABOUT_SYSTEM])
    def test_a_model_without_a_system_role_or_without_a_template_gets_all_messages(
        self, tiny: str, template: str | None
    ) -> None:
        with Engine(model_of(tiny), byte_tokenizer(template)) as engine:
            llm = ChatRagKV(engine=engine, max_tokens=4, min_new_tokens=2)
            llm.ingest([A])
            answer = llm.invoke(
                [SystemMessage("Be brief."), HumanMessage(f"{A.page_content} Who?")]
            )
            assert len(kv(answer)["documents"]) == 1
            assert answer.usage_metadata is not None
            assert answer.usage_metadata["input_tokens"] > len("Be brief.") + len(A.page_content), (
                "no message is dropped"
            )

    def test_messages_that_the_template_refuses_raise_an_input_error(self, tiny: str) -> None:
        strict = (
            CHATML
            + "{% if messages[-1].role == 'assistant' and messages|length > 1 %}{{ 1 / 0 }}{% "
            "endif %}"
        )
        with Engine(model_of(tiny), byte_tokenizer(CHATML)) as engine:
            llm = ChatRagKV(engine=engine, max_tokens=2)
            # the engine has already read the one without the refusal
            engine.tokenizer.chat_template = strict
            with pytest.raises(InputError, match="refuses"):
                llm.invoke([HumanMessage("Who?"), AIMessage("She"), AIMessage("is")])


def test_documents_of_a_retriever_are_recognised_by_the_model_on_its_engine(tiny: str) -> None:
    from ragkv.retrieval import Document as Source

    with Engine.from_pretrained(tiny) as engine, Rag(Corpus(engine, None)) as rag:
        rag.corpus.ingest(
            [
                Source("a", A.page_content, "a.txt", {"year": 1820}),
                Source("b", "Nothing of that.", "b.txt"),
            ]
        )
        retriever = RagKVRetriever(rag=rag, k=1)
        llm = ChatRagKV(engine=engine, max_tokens=2)
        (found,) = retriever.invoke("paper and rope")
        assert (found.metadata["source"], found.metadata["year"]) == ("a.txt", 1820)
        assert retriever.invoke("paper and rope")[0].id == found.id
        assert retriever.invoke("mill", where={"year": {"lt": 1800}}) == []
        answer = llm.invoke(f"Context: {found.page_content}\nWho?")
        assert kv(answer)["documents"][0]["source"] == "a.txt"
        assert kv(answer)["reuse"]["missed_chunks"] == 0, "its KV was stored by ingest"


def test_without_langchain_the_import_error_names_the_package_to_install() -> None:
    script = "import sys; sys.modules['langchain_core'] = None\nimport ragkv.integrations.langchain"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].endswith('pip install "ragkv[langchain]"')
