"""What these tests share: a chat model on the bundled reader, one on tiny float32 weights, and the example corpus."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from langchain_core.documents import Document

from ragkv import EngineConfig
from ragkv.langchain import ChatRagKV
from ragkv.model.loading import READER
from tests import tiny_models
from tests.toy_tokenizers import VOCABULARY, byte_tokenizer

CORPUS = Path(__file__).parents[2] / "examples" / "corpus"
CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

needs_reader = pytest.mark.skipif(not (READER / "config.json").is_file(), reason="the bundled reader is not there")


@functools.cache
def documents() -> list[Document]:
    """The example corpus, a document a file."""
    return [Document(page_content=p.read_text("utf-8").strip(), metadata={"source": p.name}) for p in _files()]


def _files() -> list[Path]:
    return sorted(CORPUS.glob("*.md"))


def tiny_folder(folder: Path, chat_template: str | None = CHATML, seed: int = 7) -> str:
    """A model folder of random float32 weights that reads and writes bytes."""
    torch.manual_seed(seed)
    config = tiny_models.config("llama", vocab_size=VOCABULARY, max_position_embeddings=4096)
    transformers.LlamaForCausalLM(config).eval().save_pretrained(folder)
    byte_tokenizer(chat_template).save_pretrained(folder)
    return str(folder)


def chat(model: str, **fields: Any) -> ChatRagKV:
    """A chat model with a configuration that no environment changes."""
    return ChatRagKV(model=model, **{"config": EngineConfig(), "max_tokens": 8, "min_new_tokens": 2, **fields})
