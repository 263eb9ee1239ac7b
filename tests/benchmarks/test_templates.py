"""The rows of benchmarks/templates.py, from one prompt a template."""

from benchmarks import templates


def test_every_template_is_reused_from_the_second_call_on_without_false_matches() -> None:
    rows = templates.measured(prompts=1)
    assert len(rows) == 10
    for row in rows:
        assert row["second"] >= row["first"] and row["second"] > 0.6, row
        assert (row["found"], row["false"], row["equal"]) == ("5 of 5", 0, "1 of 1"), row
