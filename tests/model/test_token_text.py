"""Tokens as text and bytes: the tokens of a text join to its bytes, in every kind of tokenizer."""

from typing import Any

import pytest

from ragkv.model.decode.token_text import LEAST_LOGPROB, TokenText
from ragkv.types import TokenLogprob
from tests.toy_tokenizers import EOS, byte_tokenizer, fallback_tokenizer

TEXT = "the stop é€🦊 \n\t¬®ÿ"


@pytest.mark.parametrize(
    "tokenizer", [byte_tokenizer(), fallback_tokenizer()], ids=["byte-level", "byte-fallback"]
)
def test_the_bytes_of_a_texts_tokens_join_to_the_text(tokenizer: Any) -> None:
    text = TokenText(tokenizer)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert b"".join(text.bytes_of(token) or b"?" for token in ids) == TEXT.encode()


def test_a_special_token_has_its_name_as_text_and_an_unknown_one_none() -> None:
    text = TokenText(byte_tokenizer())
    assert (text.bytes_of(EOS), text.bytes_of(10**6)) == (b"</s>", None)


def test_entries_have_openais_form_and_no_infinity() -> None:
    tokenizer = byte_tokenizer()
    a = tokenizer("a", add_special_tokens=False)["input_ids"][0]
    part = tokenizer("é")["input_ids"][0]
    found = TokenText(tokenizer).entries(
        [TokenLogprob(a, -0.5, ((a, -0.5), (part, float("-inf"))))]
    )
    assert found == [
        {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [
                {"token": "a", "logprob": -0.5, "bytes": [97]},
                {"token": "\ufffd", "logprob": LEAST_LOGPROB, "bytes": [195]},
            ],
        }
    ]
