"""Random weights and random scores, for benchmarks of time: what the numbers are changes no time."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ragkv import Engine
from ragkv.model.shapes import random_model
from ragkv.store import Entry, EntryInfo

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}> {% endif %}"
)


def put_random_scores(engine: Engine, info: EntryInfo) -> None:
    """Put scores next to the stored entry of `info`, as the engine's own scorer would."""
    scorer = engine.entries.encoder.scorer
    assert scorer is not None, "this engine makes no scores"
    scores = torch.rand((info.tokens, scorer.columns)).half()
    engine.store.put_scores(Entry.of_scores(info, scorer.name, scores), durably=True)


def talker(shape: str, folder: Path, dtype: torch.dtype = torch.bfloat16, layers: int | None = None) -> Path:
    """Write a model folder of that shape: random weights, and a tokenizer with a text for every id."""
    model = random_model(shape, dtype, layers=layers)
    model.save_pretrained(folder)
    _tokenizer(model.config.vocab_size).save_pretrained(folder)
    return folder


def _tokenizer(size: int) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<pad>", "<s>", "</s>", *alphabet]
    words += [f"\u0120w{number}" for number in range(size - len(words))]  # random weights mostly generate these
    backend = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    made.chat_template = TEMPLATE
    return made
