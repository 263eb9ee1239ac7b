"""An engine whose conversations are in the test's folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ragkv import Engine

from .helpers import engine_at


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with engine_at(tmp_path) as engine:
        yield engine
