"""The reader's subword tokenizer and its chat template.

A byte-level BPE whose merges are learned from single words of the templates and single syllables of
names: a common word is one token, an invented name two or three. Every text gets a leading space,
so a chunk has the same ids alone and in a prompt. This file knows the words of worlds, but no
world.

Invariant, the only prompt layout: `<bos>` system `<user>` chunks question `<assistant>` answer
`<end>` `<user>` ...
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from training.names import ENDINGS, FIRST, MIDDLE
from training.questions import UNKNOWN
from training.templates import (
    COMPARISON,
    FILLERS,
    LEADS,
    RELATIONS,
    ROLES,
    SAME,
    SYSTEM,
    THAT,
    WORDS,
)

SPECIAL = ("<pad>", "<bos>", "<end>", "<user>", "<assistant>")
PAD, BOS, END, USER, ASSISTANT = range(5)
VOCABULARY = 2048
CHAT_TEMPLATE = (
    "{{ '<bos>' }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}{{ '<user>' + m.content }}"
    "{% else %}{{ '<assistant>' + m.content + '<end>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def build() -> PreTrainedTokenizerFast:
    """The tokenizer; every call makes the same one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_pieces(), trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    fast: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<end>",
        additional_special_tokens=["<user>", "<assistant>"], model_max_length=2048, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _pieces() -> Iterator[str]:
    """Words with their leading space, and syllables, repeated so often that each becomes
    one token.
    """
    for text in _phrases():
        yield from re.findall(r" ?\w+| ?[^\s\w]+", " " + text)
    for syllable in FIRST:
        yield from [" " + syllable] * 50
    for endings in (MIDDLE, *ENDINGS.values()):
        for syllable in endings:
            yield from [syllable] * 200


def _phrases() -> Iterator[str]:
    texts: list[str] = [
        *FILLERS,
        *LEADS,
        *SYSTEM,
        *ROLES.values(),
        *COMPARISON["train"],
        *COMPARISON["heldout"],
        UNKNOWN,
    ]
    for group in (*SAME.values(), *THAT.values(), *WORDS.values()):
        texts.extend(group)
    for relation in RELATIONS:
        texts.extend(
            (
                *relation.train,
                *relation.heldout,
                *relation.questions,
                *relation.heldout_questions,
                relation.follow_up,
            )
        )
    texts.extend(("the maker of", "he", "she", "it", "him", "her", "his", "its"))
    for text in texts:
        bare = re.sub(r"\{\w\}", "", text)
        yield from [bare, bare[:1].upper() + bare[1:]] * 3
