"""However a chain carries its documents, they become the chunks that were ingested; at ratio 1 nothing changes."""

from typing import Any

import pytest
import torch
import transformers
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from pydantic import Field

from ragkv import EngineConfig, PromptConfig, RagKVError
from ragkv.errors import InputError, UnsupportedError
from ragkv.langchain import ChatRagKV, create_cached_documents_chain

from .helpers import chat

A, B, C = (
    Document(page_content=text, metadata={"source": name}, id=name)
    for name, text in (
        ("a", "The mill of Marl makes paper and rope."),
        ("b", "Ada Quill founded the mill in 1820."),
        ("c", "She lives in Irvburg with her sister."),
    )
)
QUESTION = "Where does the founder of the mill live?"


@pytest.fixture
def llm(tiny: str) -> ChatRagKV:
    made = chat(tiny, ratio=1.0)
    made.forget([A, B, C])
    made.ingest([A, B, C])
    return made


def kv(message: BaseMessage) -> dict[str, Any]:
    return message.response_metadata["kv_cache"]  # type: ignore[no-any-return]


def reused(message: BaseMessage) -> int:
    """Tokens of chunks whose stored KV was used, recomputed or not."""
    reuse = kv(message)["reuse"]
    return int(reuse["exact"] + reuse["fused"] + reuse["recomputed"])


def transformers_says(folder: str, messages: list[dict[str, str]], tokens: int) -> str:
    """The greedy answer of the plain model to the whole prompt as its template writes it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    given = torch.tensor([ids])
    said = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(said[0, len(ids) :], skip_special_tokens=True))


CONTEXT = "\n\n".join(one.page_content for one in (A, B, C))
TOOL = [
    AIMessage("", tool_calls=[{"name": "search", "args": {}, "id": "1"}]),
    ToolMessage(f"Found:\n{CONTEXT}", tool_call_id="1", artifact=[A, B, C]),
]
WAYS: dict[str, tuple[list[BaseMessage], dict[str, Any]]] = {
    "flattened in the user's turn": ([HumanMessage(f"Context:\n{CONTEXT}\n\n{QUESTION}")], {}),
    "flattened in the system text": ([SystemMessage(f"Use this.\n\n{CONTEXT}"), HumanMessage(QUESTION)], {}),
    "documents of the call": ([HumanMessage(QUESTION)], {"documents": [A, B, C]}),
    "documents as mappings": (
        [HumanMessage(QUESTION)],
        {"documents": [{"text": one.page_content} for one in (A, B, C)]},
    ),
    "content blocks": (
        [
            HumanMessage(
                content=[
                    {"type": "text-plain", "mime_type": "text/plain", "text": A.page_content, "title": "a"},
                    {"type": "text", "text": B.page_content, "metadata": {"source": "b"}},
                    {
                        "type": "document",
                        "source": {"type": "text", "data": C.page_content, "media_type": "text/plain"},
                    },
                    {"type": "text", "text": QUESTION},
                ]
            )
        ],
        {},
    ),
    "a tool's artifact": ([HumanMessage(QUESTION), *TOOL], {}),
    "an artifact its message does not show": (
        [HumanMessage(QUESTION), TOOL[0], ToolMessage("3 found", tool_call_id="1", artifact=[A, B, C])],
        {},
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_documents_are_the_ingested_chunks_whichever_way_they_come(way: str, llm: ChatRagKV) -> None:
    messages, call = WAYS[way]
    answer = llm.invoke(messages, **call)
    stored = sum(len(llm.shared.engine.chunk(one.page_content)) for one in (A, B, C))
    assert len(kv(answer)["documents"]) == 3
    assert kv(answer)["reuse"]["missed_chunks"] == 0
    assert reused(answer) >= stored
    assert kv(answer)["mode"] == "fused"


@pytest.mark.parametrize("way", ["flattened in the user's turn", "flattened in the system text"])
def test_at_ratio_1_the_answer_is_plain_transformers(way: str, llm: ChatRagKV, tiny: str) -> None:
    messages, _ = WAYS[way]
    roles = {"human": "user", "system": "system"}
    plain = [{"role": roles[message.type], "content": str(message.content)} for message in messages]
    assert llm.invoke(messages, max_tokens=12, min_new_tokens=0).content == transformers_says(tiny, plain, 12)


def test_a_chunk_cut_by_a_character_is_only_text(llm: ChatRagKV) -> None:
    answer = llm.invoke(f"Context:\n{A.page_content[:-1]}\n\n{B.page_content}\n\n{QUESTION}")
    assert [one["source"] for one in kv(answer)["documents"]] == ["b"]


def test_a_prompt_without_known_chunks_says_so(llm: ChatRagKV) -> None:
    report = kv(llm.invoke(QUESTION, reuse="none"))
    assert (report["mode"], report["reason"]) == ("full_prefill", "no known chunks in the prompt")


def test_what_was_not_ingested_is_missed_once_and_stored(llm: ChatRagKV) -> None:
    llm.forget([B])
    first = llm.invoke(QUESTION, documents=[A, B])
    tokens = len(llm.shared.engine.chunk(B.page_content))
    assert first.usage_metadata is not None
    assert first.usage_metadata["input_token_details"]["cache_creation"] == tokens
    llm.shared.engine.flush()
    second = llm.invoke(f"{A.page_content}\n\n{B.page_content}\n\n{QUESTION}")  # known by now, though never ingested
    assert kv(second)["reuse"]["missed_chunks"] == 0
    assert len(kv(second)["documents"]) == 2


def test_a_corpus_is_known_from_the_start_and_stored_when_it_is_met(tiny: str) -> None:
    new = ["A harbour town of three thousand souls.", Document(page_content="Its ropes are sold as far as Irvburg.")]
    llm = chat(tiny, corpus=new)
    prompt = f"Read: {new[0]}\n{A.page_content} Why?"
    first = llm.invoke(prompt)
    llm.shared.engine.flush()
    second = llm.invoke(prompt)
    assert [kv(one)["reuse"]["missed_chunks"] for one in (first, second)] == [1, 0]
    llm.forget(new)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_cache_read_is_only_what_is_exact(ratio: float, llm: ChatRagKV) -> None:
    answer = llm.invoke(QUESTION, documents=[A, B, C], ratio=ratio)
    prefix, first = len(llm.shared.template.encode(llm.shared.template.own_opening)), len(A.page_content)
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_token_details"] == {"cache_read": prefix + first, "cache_creation": 0}
    assert answer.usage_metadata["input_tokens"] == kv(answer)["reuse"]["computed"] + reused(answer)


def test_a_system_text_of_the_configuration_is_an_exact_prefix(tiny: str) -> None:
    llm = chat(tiny, config=EngineConfig(prompt=PromptConfig(system="Answer briefly.")))
    opening = len(llm.shared.template.encode(llm.shared.template.own_opening))
    said = llm.invoke(QUESTION)
    same = llm.invoke([SystemMessage("Answer briefly."), HumanMessage(QUESTION)])
    other = llm.invoke([SystemMessage("Answer at length."), HumanMessage(QUESTION)])
    reads = [one.usage_metadata["input_token_details"]["cache_read"] for one in (said, same, other)]  # type: ignore
    assert reads == [opening, opening, 0]
    assert said.content == same.content


def test_deleting_documents_deletes_their_kv(llm: ChatRagKV) -> None:
    assert llm.forget([A, "never there at all"]) == 1
    answer = llm.invoke(f"{CONTEXT}\n\n{QUESTION}")
    assert [one["source"] for one in kv(answer)["documents"]] == ["b", "c"]


def test_a_chunk_end_belongs_to_the_chunk(tiny: str) -> None:
    llm = chat(tiny, config=EngineConfig(prompt=PromptConfig(chunk_end="\n\n")))
    llm.ingest([A, B, C])
    assert len(kv(llm.invoke(f"{CONTEXT}\n\n{QUESTION}"))["documents"]) == 3
    assert len(kv(llm.invoke(f"{CONTEXT} {QUESTION}"))["documents"]) == 2, "the last is not what was encoded"
    assert len(kv(llm.invoke(QUESTION, documents=[A, B]))["documents"]) == 2


class TestTheDocumentsChain:
    PROMPT = ChatPromptTemplate.from_messages([("system", "Use this:\n\n{context}"), ("human", "{question}")])

    def test_says_what_a_stuff_chain_says_and_reuses_kv(self, llm: ChatRagKV) -> None:
        inputs = {"context": [A, B, C], "question": QUESTION}
        spy = _Spy()
        chain = create_cached_documents_chain(llm, self.PROMPT, output_parser=spy)
        stuffed = self.PROMPT | llm | StrOutputParser()
        assert chain.invoke(inputs) == stuffed.invoke({"context": CONTEXT, "question": QUESTION})
        assert len(kv(spy.seen[0])["documents"]) == 3
        assert "".join(chain.stream(inputs)) == chain.invoke(inputs)

    def test_a_document_prompt_stands_around_the_chunk(self, llm: ChatRagKV) -> None:
        spy = _Spy()
        chain = create_cached_documents_chain(
            llm,
            self.PROMPT,
            output_parser=spy,
            document_prompt=PromptTemplate.from_template("[{source}] {page_content}"),
            document_separator="\n--\n",
        )
        chain.invoke({"context": [A, B], "question": QUESTION})
        assert [one["source"] for one in kv(spy.seen[0])["documents"]] == ["a", "b"]

    def test_documents_that_were_never_ingested_are_stored_on_the_way(self, tiny: str) -> None:
        llm = chat(tiny)
        new = Document(page_content="Nobody has ever seen this sentence before.")
        llm.forget([new])
        spy = _Spy()
        chain = create_cached_documents_chain(llm, self.PROMPT, output_parser=spy)
        for _ in range(2):
            chain.invoke({"context": [new], "question": QUESTION})
            llm.shared.engine.flush()
        assert [kv(message)["reuse"]["missed_chunks"] for message in spy.seen] == [1, 0]
        llm.forget([new])

    def test_a_prompt_without_the_variable_is_refused(self, llm: ChatRagKV) -> None:
        with pytest.raises(InputError, match="context"):
            create_cached_documents_chain(llm, ChatPromptTemplate.from_messages([("human", "{question}")]))


class _Spy(StrOutputParser):
    """Keeps the messages it parses."""

    seen: list[Any] = Field(default_factory=list)

    def parse_result(self, result: Any, *, partial: bool = False) -> str:
        self.seen.append(result[0].message)
        return super().parse_result(result, partial=partial)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda llm: llm.bind_tools([print]), "Tools"),
        (lambda llm: llm.with_structured_output({"title": "x"}), "Structured output"),
        (lambda llm: llm.invoke("x", tools=[{}]), "tools"),
        (lambda llm: llm.invoke([HumanMessage([{"type": "image_url", "image_url": {"url": "x"}}])]), "image_url"),
    ],
)
def test_what_is_not_offered_is_refused_in_a_sentence(call: Any, why: str, llm: ChatRagKV) -> None:
    with pytest.raises(NotImplementedError, match=why) as refused:
        call(llm)
    assert isinstance(refused.value, UnsupportedError)


@pytest.mark.parametrize("call", [{"documnets": []}, {"documents": [3]}, {"ratio": 2.0}])
def test_what_would_be_ignored_is_refused(call: dict[str, Any], llm: ChatRagKV) -> None:
    with pytest.raises(RagKVError):
        llm.invoke("x", **call)
