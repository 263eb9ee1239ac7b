"""The table in docs/langchain.md matches the results of the standard suites, which ran earlier in this session."""

import os

import pytest

from .standard_table import BEGIN, END, PAGE, SUITES, Suite, lines, reason


def test_the_table_in_the_docs_matches_the_results_of_the_suites(suites: dict[str, Suite]) -> None:
    counts = {title: one.total for title, one in suites.items()}
    if counts.keys() != set(SUITES.values()) or counts["chat model, integration"] < 50:
        pytest.skip("not all standard suites ran")
    if any("bundled reader" in why for one in suites.values() for why in one.skipped.values()):
        pytest.skip("the bundled reader is missing")
    assert not any(one.failed for one in suites.values())
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    shown, _, after = rest.partition(END)
    table = "\n" + "\n".join(lines(suites)) + "\n"
    if os.environ.get("RAGKV_WRITE_TABLE"):
        PAGE.write_text(before + BEGIN + table + END + after, "utf-8")
        return
    assert shown == table, "run the tests of tests/integrations/langchain with RAGKV_WRITE_TABLE=1"


def test_a_skip_without_an_explanation_is_an_error() -> None:
    assert reason("test_image_inputs", "Model does not support image message.") == "text only"
    with pytest.raises(LookupError, match="test_new"):
        reason("test_new", "some new requirement")
