"""The tokens that end an answer. `test_sampling.py` has how tokens are chosen."""

from types import SimpleNamespace
from typing import Any

import pytest

from ragkv.model.decode.decoding import end_tokens


@pytest.mark.parametrize(
    ("of_generation", "of_model", "of_tokenizer", "wanted"),
    [([7, 8], 2, 3, (7, 8)), (7, 2, 3, (7,)), (None, 2, 3, (2,)), (None, None, 3, (3,)), (None, None, None, ())],
)
def test_end_tokens_come_from_the_first_source_that_names_them(
    of_generation: Any, of_model: Any, of_tokenizer: Any, wanted: tuple[int, ...]
) -> None:
    model = SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=of_generation), config=SimpleNamespace(eos_token_id=of_model)
    )
    assert end_tokens(model, SimpleNamespace(eos_token_id=of_tokenizer)) == wanted
