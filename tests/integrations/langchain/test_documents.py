"""In whatever form documents reach the model, they become the ingested chunks; at ratio 1 answers
do not change.
"""

import threading
from typing import Any

import pytest
import torch
import transformers
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from ragkv import EngineConfig, FusionConfig, PromptConfig, RagKVError
from ragkv.errors import UnsupportedError
from ragkv.integrations.langchain import ChatRagKV

from .helpers import QUESTION, A, B, C, chat, kv


@pytest.fixture
def llm(tiny: str) -> ChatRagKV:
    # Expected KV of a short chunk that leads is computed again; KV encoded alone is exact there.
    alone = EngineConfig(fusion=FusionConfig(stored_kv="alone"))
    made = chat(tiny, ratio=1.0, config=alone)
    made.delete([A, B, C])
    made.ingest([A, B, C])
    return made


def reused(message: BaseMessage) -> int:
    """The number of chunk tokens whose stored KV was used, recomputed or not."""
    reuse = kv(message)["reuse"]
    return int(reuse["exact"] + reuse["fused"] + reuse["recomputed"])


def transformers_answer(folder: str, messages: list[dict[str, str]], tokens: int) -> str:
    """The greedy answer of plain transformers to the prompt that the template writes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    given = torch.tensor([ids])
    said = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, do_sample=False
    )
    return str(tokenizer.decode(said[0, len(ids) :], skip_special_tokens=True))


CONTEXT = "\n\n".join(one.page_content for one in (A, B, C))
TOOL = [
    AIMessage("", tool_calls=[{"name": "search", "args": {}, "id": "1"}]),
    ToolMessage(f"Found:\n{CONTEXT}", tool_call_id="1", artifact=[A, B, C]),
]
WAYS: dict[str, tuple[list[BaseMessage], dict[str, Any]]] = {
    "flattened in the user's turn": ([HumanMessage(f"Context:\n{CONTEXT}\n\n{QUESTION}")], {}),
    "flattened in the system text": (
        [SystemMessage(f"Use this.\n\n{CONTEXT}"), HumanMessage(QUESTION)],
        {},
    ),
    "documents of the call": ([HumanMessage(QUESTION)], {"documents": [A, B, C]}),
    "documents as mappings": (
        [HumanMessage(QUESTION)],
        {"documents": [{"text": one.page_content} for one in (A, B, C)]},
    ),
    "content blocks": (
        [
            HumanMessage(
                content=[
                    {
                        "type": "text-plain",
                        "mime_type": "text/plain",
                        "text": A.page_content,
                        "title": "a",
                    },
                    {"type": "text", "text": B.page_content, "metadata": {"source": "b"}},
                    {
                        "type": "document",
                        "source": {
                            "type": "text",
                            "data": C.page_content,
                            "media_type": "text/plain",
                        },
                    },
                    {"type": "text", "text": QUESTION},
                ]
            )
        ],
        {},
    ),
    "a tool's artifact": ([HumanMessage(QUESTION), *TOOL], {}),
    "an artifact its message does not show": (
        [
            HumanMessage(QUESTION),
            TOOL[0],
            ToolMessage("3 found", tool_call_id="1", artifact=[A, B, C]),
        ],
        {},
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_documents_in_every_form_become_the_ingested_chunks(way: str, llm: ChatRagKV) -> None:
    messages, call = WAYS[way]
    answer = llm.invoke(messages, **call)
    stored = sum(len(llm.shared.engine.chunk(one.page_content)) for one in (A, B, C))
    assert (len(kv(answer)["documents"]), kv(answer)["reuse"]["missed_chunks"]) == (3, 0)
    assert reused(answer) >= stored
    assert kv(answer)["mode"] == "fused"


@pytest.mark.parametrize("way", ["flattened in the user's turn", "flattened in the system text"])
def test_at_ratio_1_the_answer_is_that_of_plain_transformers(
    way: str, llm: ChatRagKV, tiny: str
) -> None:
    messages, _ = WAYS[way]
    roles = {"human": "user", "system": "system"}
    plain = [{"role": roles[message.type], "content": str(message.content)} for message in messages]
    assert llm.invoke(messages, max_tokens=12, min_new_tokens=0).content == transformers_answer(
        tiny, plain, 12
    )


def test_a_chunk_without_its_last_letter_is_not_recognised(llm: ChatRagKV) -> None:
    answer = llm.invoke(f"Context:\n{A.page_content[:-2]}\n\n{B.page_content}\n\n{QUESTION}")
    assert [one["source"] for one in kv(answer)["documents"]] == ["b"]


def test_a_document_of_a_call_is_missed_once_and_then_stored(llm: ChatRagKV) -> None:
    llm.delete([B])
    first = llm.invoke(QUESTION, documents=[A, B])
    tokens = len(llm.shared.engine.chunk(B.page_content))
    assert first.usage_metadata is not None
    assert first.usage_metadata["input_token_details"]["cache_creation"] == tokens
    second = llm.invoke(f"{A.page_content}\n\n{B.page_content}\n\n{QUESTION}", documents=[A, B])
    assert kv(second)["reuse"]["missed_chunks"] == 0
    assert len(kv(second)["documents"]) == 2


def test_a_corpus_is_warm_from_the_second_call_on(tiny: str) -> None:
    new = [
        "The early ferry to Neltham leaves at noon.",
        "The early road to Pell is closed in winter.",
    ]
    llm = chat(tiny, corpus=new)
    llm.invoke("Who?")  # no text of the corpus is missed here
    for thread in threading.enumerate():
        if thread.name == "ragkv-corpus":
            thread.join(30)
    llm.shared.engine.flush()
    prompts = [f"Read: {text}\n{A.page_content} Why?" for text in new]
    assert [kv(llm.invoke(prompt))["reuse"]["missed_chunks"] for prompt in prompts] == [0, 0]
    llm.delete(new)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_cache_read_counts_exact_and_fused_tokens(ratio: float, llm: ChatRagKV) -> None:
    answer = llm.invoke(QUESTION, documents=[A, B, C], ratio=ratio)
    prefix = len(llm.shared.template.token_ids(llm.shared.template.own_opening))
    first = len(A.page_content)
    assert answer.usage_metadata is not None
    read = prefix + first + kv(answer)["reuse"]["fused"]
    assert answer.usage_metadata["input_token_details"] == {"cache_read": read, "cache_creation": 0}
    assert (read > prefix + first) == (ratio < 1.0)
    assert answer.usage_metadata["input_tokens"] == kv(answer)["reuse"]["computed"] + reused(answer)


def test_the_configured_system_text_is_reused_as_an_exact_prefix(tiny: str) -> None:
    llm = chat(tiny, config=EngineConfig(prompt=PromptConfig(system="Answer briefly.")))
    opening = len(llm.shared.template.token_ids(llm.shared.template.own_opening))
    said = llm.invoke(QUESTION)
    same = llm.invoke([SystemMessage("Answer briefly."), HumanMessage(QUESTION)])
    other = llm.invoke([SystemMessage("Answer at length."), HumanMessage(QUESTION)])
    reads = [one.usage_metadata["input_token_details"]["cache_read"] for one in (said, same, other)]  # type: ignore
    assert reads == [opening, opening, 0]
    assert said.content == same.content


def test_forgotten_documents_are_not_recognised_any_more(llm: ChatRagKV) -> None:
    assert llm.delete([A, "never there at all"]) == 1
    answer = llm.invoke(f"{CONTEXT}\n\n{QUESTION}")
    assert [one["source"] for one in kv(answer)["documents"]] == ["b", "c"]


def test_a_block_that_is_no_text_raises_an_error_that_names_it(llm: ChatRagKV) -> None:
    with pytest.raises(UnsupportedError, match="image_url"):
        llm.invoke([HumanMessage([{"type": "image_url", "image_url": {"url": "x"}}])])


@pytest.mark.parametrize(
    "call", [{"functions": [{}]}, {"documnets": []}, {"documents": [3]}, {"ratio": 2.0}]
)
def test_an_unknown_or_invalid_setting_of_a_call_is_refused(
    call: dict[str, Any], llm: ChatRagKV
) -> None:
    with pytest.raises(RagKVError):
        llm.invoke("x", **call)
