"""The table of LangChain's standard suites in docs/langchain.md, made from their results."""

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
VACUOUS = {  # they pass without testing any of our code
    "test_bind_tool_pydantic": "returns at once, as tools are switched off",
    "test_with_structured_output": "returns at once, as structured output is switched off",
    "test_three_values": "tests its own fixture",
    "test_no_overrides_DO_NOT_OVERRIDE": "checks whether a test was overridden",
}
REASONS = {  # a word in the reason of a skip -> the text in the docs
    "tool": "tools need a model that chooses and fills them; own tests constrain the choice",
    "structured output": "structured output needs a model that ends its sentences; own tests have bounded schemas",
    "json mode": "structured output needs a model that ends its sentences; own tests have bounded schemas",
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


def lines(suites: dict[str, Suite]) -> list[str]:
    """The lines of the section in the docs."""
    rows = ["| suite | tests | passed | of these vacuous | not applicable |", "|---|---|---|---|---|"]
    for title in SUITES.values():
        one = suites[title]
        total = len(one.passed) + len(one.skipped) + len(one.failed)
        rows.append(f"| {title} | {total} | {len(one.passed)} | {len(one.vacuous)} | {len(one.skipped)} |")
    by_reason: dict[str, list[str]] = defaultdict(list)
    for one in suites.values():
        for name, skip in one.skipped.items():
            by_reason[reason(name, skip)].append(bare(name))
    rows += ["", "Not applicable:", ""]
    for why, names in sorted(by_reason.items()):
        rows.append(f"- {why} ({len(names)}): {', '.join(f'`{name}`' for name in dict.fromkeys(names))}")
    seen = dict.fromkeys(name for one in suites.values() for name in one.vacuous)
    rows += ["", "Vacuous passes, which prove nothing:", "", *(f"- `{name}`: {VACUOUS[name]}" for name in seen)]
    return rows
