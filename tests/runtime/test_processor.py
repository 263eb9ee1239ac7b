"""A hint where several computing threads share full processors."""

import pytest

from ragkv.runtime import processor


@pytest.mark.parametrize(
    ("threads", "load", "said"), [(2, 6.5, True), (2, 3.0, True), (2, 2.4, False), (1, 6.5, False)]
)
def test_threads_on_full_processors_are_named_with_the_load(
    threads: int, load: float, said: bool
) -> None:
    found = processor.crowding_hint(threads, load, 2)
    assert (found is not None) == said
    if found is not None:
        assert (
            f"fewer than {threads} threads" in found
            and f"load {load} on 2" in found
            and "Stop what else runs" in found
        )
