"""Chat models on the small reader or on tiny random weights, documents, and readers of an
answer's report.
"""

import functools
import operator
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from langchain_core.documents import Document
from langchain_core.messages import AIMessageChunk, BaseMessage

from ragkv import EngineConfig
from ragkv.integrations.langchain import ChatRagKV
from tests import tiny_models
from tests.toy_tokenizers import CHATML, VOCABULARY, byte_tokenizer

CORPUS = Path(__file__).parents[2] / "world" / "corpus"
A, B, C = (
    Document(page_content=text, metadata={"source": name}, id=name)
    for name, text in (
        ("a", "The mill of Marl makes paper and rope."),
        ("b", "Ada Quill founded the mill in 1820."),
        ("c", "She lives in Irvburg with her sister."),
    )
)
QUESTION = "Where does the founder of the mill live?"


@functools.cache
def documents() -> list[Document]:
    """The example corpus, one document for each file."""
    files = sorted(CORPUS.glob("*.md"))
    return [
        Document(page_content=p.read_text("utf-8").strip(), metadata={"source": p.name})
        for p in files
    ]


def tiny_folder(folder: Path, chat_template: str | None = CHATML, seed: int = 7) -> str:
    """A model folder with random float32 weights and a byte tokenizer."""
    torch.manual_seed(seed)
    config = tiny_models.config("llama", vocab_size=VOCABULARY, max_position_embeddings=4096)
    transformers.LlamaForCausalLM(config).eval().save_pretrained(folder)
    byte_tokenizer(chat_template).save_pretrained(folder)
    return str(folder)


def chat(model: str, **fields: Any) -> ChatRagKV:
    """A chat model whose configuration does not depend on the environment."""
    return ChatRagKV(
        model=model, **{"config": EngineConfig(), "max_tokens": 8, "min_new_tokens": 2, **fields}
    )


def joined(chunks: Iterable[AIMessageChunk]) -> AIMessageChunk:
    """The message that the chunks of a stream make."""
    return functools.reduce(operator.add, chunks)


def kv(message: BaseMessage) -> dict[str, Any]:
    """The engine's report on an answer."""
    return message.response_metadata["kv_cache"]  # type: ignore[no-any-return]
