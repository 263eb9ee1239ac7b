"""The table of LangChain's standard suites in docs/langchain.md, from what the suites really did."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "langchain.md"
BEGIN, END = "<!-- standard suites: written by tests/langchain/standard_table.py -->", "<!-- end -->"
SUITES = {
    "test_standard_chat.py::TestUnit": "chat model, unit",
    "test_standard_chat.py::TestIntegration": "chat model, integration",
    "test_standard_others.py::TestEmbeddingsUnit": "embeddings, unit",
    "test_standard_others.py::TestEmbeddings": "embeddings, integration",
    "test_standard_others.py::TestVectorStore": "vector store",
    "test_standard_others.py::TestRetriever": "retriever",
    "test_standard_others.py::TestByteStore": "byte store",
    "test_standard_others.py::TestByteStoreAsync": "byte store, async",
}
VACUOUS = {  # they pass without having looked at anything of ours
    "test_bind_tool_pydantic": "returns at once where there are no tools",
    "test_with_structured_output": "returns at once where there is no structured output",
    "test_three_values": "looks at its own fixture",
    "test_no_overrides_DO_NOT_OVERRIDE": "looks whether a test was overridden",
}
REASONS = {  # what a skip says, in the page's words
    "tool": "tools are not offered",
    "structured output": "structured output is not offered",
    "json mode": "structured output is not offered",
    "image": "text alone",
    "pdf": "text alone",
    "audio": "text alone",
    "anthropic": "text alone",
    "init_from_env": "nothing comes from the environment but the settings, which are no constructor arguments",
    "serializable": "the components are not serialised: an engine cannot be",
    "vcr": "there is no traffic to record",
}


def bare(name: str) -> str:
    """A test's name without its parameters."""
    return name.partition("[")[0]


@dataclass
class Suite:
    """What became of one suite."""

    passed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # reason by test
    failed: list[str] = field(default_factory=list)

    @property
    def vacuous(self) -> list[str]:
        return [name for name in map(bare, self.passed) if name in VACUOUS]


def suite_of(node: str) -> str | None:
    """The suite a test belongs to, by its node id."""
    return next((title for place, title in SUITES.items() if f"{place}::" in node), None)


def reason(name: str, said: str) -> str:
    """Why a test does not apply; raises `LookupError` for a skip nobody has explained."""
    text = f"{name} {said}".lower().replace("not lc_serializable", "serializable")
    found = next((why for word, why in REASONS.items() if word in text), None)
    if found is None:
        raise LookupError(f"{name} was skipped: {said}. Explain it in REASONS, or make it pass.")
    return found


def lines(suites: dict[str, Suite]) -> list[str]:
    """The section of the page."""
    rows = ["| suite | tests | passed | of these vacuous | not applicable |", "|---|---|---|---|---|"]
    for title in SUITES.values():
        one = suites[title]
        total = len(one.passed) + len(one.skipped) + len(one.failed)
        rows.append(f"| {title} | {total} | {len(one.passed)} | {len(one.vacuous)} | {len(one.skipped)} |")
    by_reason: dict[str, list[str]] = defaultdict(list)
    for one in suites.values():
        for name, said in one.skipped.items():
            by_reason[reason(name, said)].append(bare(name))
    rows += ["", "Not applicable:", ""]
    for why, names in sorted(by_reason.items()):
        rows.append(f"- {why} ({len(names)}): {', '.join(f'`{name}`' for name in dict.fromkeys(names))}")
    seen = dict.fromkeys(name for one in suites.values() for name in one.vacuous)
    rows += ["", "Vacuous passes, which prove nothing:", "", *(f"- `{name}`: {VACUOUS[name]}" for name in seen)]
    return rows
