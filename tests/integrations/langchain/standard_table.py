"""The table of LangChain's standard suites in docs/langchain.md, made from their results."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "langchain.md"
BEGIN, END = "<!-- standard suites: written by tests/integrations/langchain/standard_table.py -->", "<!-- end -->"
SUITES = {
    "test_standard_chat.py::TestUnit": "chat model, unit",
    "test_standard_chat.py::TestIntegration": "chat model, integration",
    "test_standard_others.py::TestEmbeddingsUnit": "embeddings, unit",
    "test_standard_others.py::TestEmbeddings": "embeddings, integration",
    "test_standard_others.py::TestRetriever": "retriever",
}
VACUOUS = {  # they pass without testing any of our code
    "test_no_overrides_DO_NOT_OVERRIDE": "checks whether a test was overridden",
}
REASONS = {  # a word in the reason of a skip -> the text in the docs
    "image": "text only",
    "pdf": "text only",
    "audio": "text only",
    "anthropic": "text only",
    "init_from_env": "the environment gives only settings, and no constructor arguments",
    "serializable": "the components are not serialised, because an engine cannot be",
    "vcr": "there is no network traffic to record",
}


def bare(name: str) -> str:
    """A test's name without its parameters."""
    return name.partition("[")[0]


@dataclass
class Suite:
    """The results of one suite."""

    passed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # reason by test
    failed: list[str] = field(default_factory=list)
    unable: dict[str, str] = field(default_factory=dict)  # failed as expected: what the model would have to do

    @property
    def total(self) -> int:
        return len(self.passed) + len(self.skipped) + len(self.failed) + len(self.unable)

    def add(self, name: str, report: pytest.TestReport) -> None:
        """Count the report of a test, if it says how the test ended."""
        if report.skipped and hasattr(report, "wasxfail"):
            self.unable[name] = report.wasxfail
        elif report.skipped:
            self.skipped[name] = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        elif report.failed or report.when == "call":
            (self.passed if report.passed else self.failed).append(name)

    @property
    def vacuous(self) -> list[str]:
        return [name for name in map(bare, self.passed) if name in VACUOUS]


def suite_of(node: str) -> str | None:
    """The suite a test belongs to, by its node id."""
    return next((title for place, title in SUITES.items() if f"{place}::" in node), None)


def reason(name: str, skip: str) -> str:
    """Why a test does not apply. Raises `LookupError` for a skip without an explanation."""
    text = f"{name} {skip}".lower().replace("not lc_serializable", "serializable")
    found = next((why for word, why in REASONS.items() if word in text), None)
    if found is None:
        raise LookupError(f"{name} was skipped: {skip}. Explain it in REASONS, or make it pass.")
    return found


def table(suites: Mapping[str, Suite], why: Callable[[str, str], str] = reason) -> list[str]:
    """The lines of a table of `suites` by title, and of the lists of tests that did not pass. `why` explains a skip."""
    rows = [
        "| suite | tests | passed | of these vacuous | needs an able model | not applicable |",
        "|---|---|---|---|---|---|",
    ]
    unable, skipped = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for title, one in suites.items():
        counts = (one.total, len(one.passed), len(one.vacuous), len(one.unable), len(one.skipped))
        rows.append(f"| {title} | {' | '.join(map(str, counts))} |")
        for name, skill in one.unable.items():
            unable[skill].append(bare(name))
        for name, skip in one.skipped.items():
            skipped[why(name, skip)].append(bare(name))
    for heading, names_by_reason in (("Needs an able model", unable), ("Not applicable", skipped)):
        rows += ["", f"{heading}:", ""]
        for explained, names in sorted(names_by_reason.items()):
            rows.append(f"- {explained} ({len(names)}): {', '.join(f'`{name}`' for name in dict.fromkeys(names))}")
    return rows


def lines(suites: dict[str, Suite]) -> list[str]:
    """The lines of the section in the docs."""
    rows = table({title: suites[title] for title in SUITES.values()})
    seen = dict.fromkeys(name for one in suites.values() for name in one.vacuous)
    rows += ["", "Vacuous passes, which prove nothing:", "", *(f"- `{name}`: {VACUOUS[name]}" for name in seen)]
    return rows
