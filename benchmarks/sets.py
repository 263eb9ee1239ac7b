"""The question sets and traces that benchmarks read: where each is from, its size and its digest.

    python -m benchmarks.sets --check

No set is part of this repository. They are looked for in the folder that BENCHMARK_DATA names, and
else in `shared/data` beside this checkout, with the folders `qa`, `traces` and `models`. Sizes and
digests are those of the files that our tables were measured on; a file of another digest is used,
and `--check` says that it is another one.
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class PublishedSet:
    """A file as it is published. Without a digest it was never read here."""

    path: str  # in the folder of sets
    address: str
    size_bytes: int = 0
    digest: str = ""  # the first 16 digits of its SHA-256


_LONGBENCH = "huggingface.co/datasets/THUDM/LongBench, data.zip"
_MINI = "github.com/MilkThink-Lab/MiniLongBench"
_RAGPULSE = "github.com/flashserve/RAGPulse"
SETS = (
    PublishedSet(
        "qa/xquad.en.json", "github.com/google-deepmind/xquad", 609_383, "e4c57d1c9143aaa1"
    ),
    PublishedSet(
        "qa/musique_s_100.json",
        "github.com/YaoJiayi/CacheBlend, in its inputs: 100 questions",
        2_430_773,
        "7de390b11d4d0868",
    ),
    PublishedSet("qa/MiniLongBench_2wikimqa.json", _MINI, 354_461, "58d4b3d6c0be3187"),
    PublishedSet("qa/MiniLongBench_samsum.json", _MINI, 522_758, "4eb461ec0f9ae778"),
    PublishedSet("qa/MiniLongBench_multi_news.json", _MINI, 148_113, "9e2834e6a1e7b49d"),
    PublishedSet(
        "qa/mtragun_reference.jsonl",
        "github.com/IBM/mt-rag-benchmark",
        3_836_136,
        "68053f709c928570",
    ),
    PublishedSet(
        "traces/mooncake/conversation_trace.jsonl",
        "github.com/kvcache-ai/Mooncake",
        3_029_533,
        "b8cbb061a85206d7",
    ),
    PublishedSet(
        "traces/kv-cache-tester/sample_120.jsonl.gz",
        "github.com/callanjfox/kv-cache-tester, 120 of its conversations",
        1_340_986,
        "3c8a1af444721f67",
    ),
    PublishedSet("traces/ragpulse/0_trace.jsonl", _RAGPULSE, 1_923_473, "cd371571bef33209"),
    PublishedSet("traces/ragpulse/1_sys_prompt.jsonl", _RAGPULSE, 315_609, "e7bf9bc66493629f"),
    PublishedSet("traces/ragpulse/2_passages.jsonl", _RAGPULSE, 347_002, "8575941cab2eb1ca"),
    PublishedSet("traces/ragpulse/3_history.jsonl", _RAGPULSE, 210_541, "fdd9b1ca962c2b4d"),
    PublishedSet("traces/ragpulse/4_user_input.jsonl", _RAGPULSE, 278_133, "5adeff33a44850f5"),
    PublishedSet("traces/ragpulse/5_web_search.jsonl", _RAGPULSE, 23_972, "5e4cba4e2e449eb1"),
    PublishedSet("qa/2wikimqa.jsonl", _LONGBENCH),
    PublishedSet("qa/musique.jsonl", _LONGBENCH),
    PublishedSet("qa/hotpotqa.jsonl", _LONGBENCH),
    PublishedSet("qa/samsum.jsonl", _LONGBENCH),
    PublishedSet("qa/multi_news.jsonl", _LONGBENCH),
    PublishedSet("traces/sharegpt.json", "a file of ShareGPT conversations, such as ShareGPT_V3"),
    PublishedSet(
        "traces/wildchat.jsonl", "huggingface.co/datasets/allenai/WildChat, as JSON lines"
    ),
)
# Sets with the questions of the CacheBlend paper, in the order in which they are asked.
_PAPERS = (
    "2wikimqa.jsonl",
    "musique.jsonl",
    "hotpotqa.jsonl",
    "samsum.jsonl",
    "multi_news.jsonl",
    "musique_s_100.json",
    "MiniLongBench_2wikimqa.json",
    "MiniLongBench_samsum.json",
    "MiniLongBench_multi_news.json",
)
_TRACES = (
    "mooncake/conversation_trace.jsonl",
    "kv-cache-tester/sample_120.jsonl.gz",
    "ragpulse",
    "sharegpt.json",
    "wildchat.jsonl",
)


def folder() -> Path | None:
    """The folder of sets; `None` if there is none."""
    if named := os.environ.get("BENCHMARK_DATA"):
        return Path(named)
    beside = (parent / "shared" / "data" for parent in ROOT.parents)
    return next((found for found in beside if found.is_dir()), None)


def questions() -> Path | None:
    """The folder of question sets; `None` if there is none."""
    found = folder()
    return found / "qa" if found is not None and (found / "qa").is_dir() else None


def parser(doc: str | None, name: str, count: int, counted: str) -> argparse.ArgumentParser:
    """A parser of a benchmark over questions, whose rows are kept in `NAME.jsonl` and go on where a
    killed run stopped. `count` is how many questions are asked at most, and `counted` says of what.
    """
    made = report.parser(doc, "two questions of each set", threads=1)
    made.add_argument("--model", default="smollm2")
    made.add_argument(
        "--data", type=Path, default=questions(), help="the folder with the question sets"
    )
    made.add_argument("--questions", type=int, default=count, help=f"of each {counted}, at most")
    made.add_argument("--out", type=Path, default=report.RESULTS / f"{name}.jsonl", help="the rows")
    made.add_argument("--fresh", action="store_true", help="forget the rows of earlier runs")
    return made


def parsed(made: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; `--quick` asks two questions at most."""
    options = made.parse_args(arguments)
    if options.quick:
        options.questions = min(options.questions, 2)
    return options


def papers_sets() -> list[str]:
    """The files with questions of the CacheBlend paper that are here."""
    return _here("qa", _PAPERS)


def traces() -> list[Path]:
    """The published traces that are here."""
    return [Path(found) for found in _here("traces", _TRACES)]


def _here(kind: str, names: tuple[str, ...]) -> list[str]:
    found = folder()
    paths = [] if found is None else [found / kind / name for name in names]
    return [str(path) for path in paths if path.exists()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="read the files; 1 if one is another")
    options = parser.parse_args()
    found = folder()
    print(f"folder: {found or 'none: set BENCHMARK_DATA'}\n")
    rows = list(_states(found, options.check))
    report.table(("file", "bytes", "SHA-256", "here", "from"), rows)
    if options.check and any(row[3].startswith("another") for row in rows):
        sys.exit(1)


def _states(found: Path | None, check: bool) -> Iterator[tuple[str, str, str, str, str]]:
    """A row for each set: what is known of it, and what lies in the folder `found`."""
    for one in SETS:
        path = None if found is None else found / one.path
        state = "no"
        if path is not None and path.is_file():
            state = "yes"
            digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if check else one.digest
            if one.digest and digest != one.digest:
                state = f"another: {path.stat().st_size} bytes, {digest}"
        size = str(one.size_bytes or "")
        yield one.path, size, one.digest or "never read here", state, one.address


if __name__ == "__main__":
    main()
