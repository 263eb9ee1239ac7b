"""What an engine is built on."""

from pathlib import Path

import pytest

from ragkv import Engine
from ragkv.errors import InputError


@pytest.mark.parametrize("name", ["reader", Path("models/mine")])
def test_a_name_instead_of_a_loaded_model_is_refused_and_the_method_that_loads_it_is_named(name: str | Path) -> None:
    with pytest.raises(InputError, match=rf"Engine\.from_pretrained\('{name}'\)"):
        Engine(name, object())
