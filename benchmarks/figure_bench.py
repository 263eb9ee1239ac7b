"""What figures are made of, each part made when it is first needed."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks import sets
from benchmarks.real_sets import Asked, questions
from benchmarks.simulate import load_trace
from benchmarks.simulate.command import profile_in
from ragkv import Engine, EngineConfig
from ragkv.config import StoreConfig
from ragkv.control.measuring import LENGTHS, QUICK_LENGTHS

CORPUS = Path(__file__).parents[1] / "examples" / "corpus"
Row = list[Any]
QUESTION = "What do these passages say?"


class Kind(StrEnum):
    """Where the numbers of a figure come from. It is printed with them."""

    MEASURED = "measured on this machine"
    FITTED = "by the fit of a measured profile, over a generated load or a trace"
    SIMULATED = "simulated: a generated load or a trace, and times by formula"
    COMPUTED = "computed from the sizes of the model"


class NotHereError(Exception):
    """What a figure needs is not here. The message says what."""


@dataclass(frozen=True)
class Figure:
    """A figure or table of a paper."""

    make: Callable[["Bench"], Iterator[Row]]
    headings: str
    kind: Kind
    paper: str = ""  # what the paper has in the same place

    @property
    def about(self) -> str:
        """What it shows, in one line."""
        return " ".join((self.make.__doc__ or "").split())


class Bench:
    """What figures are made of; each part is made when it is first needed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.quick = options.quick

    @cached_property
    def engine(self) -> Engine:
        return Engine.from_pretrained(
            self.options.model, EngineConfig(store=StoreConfig(codec="raw"))
        )

    @cached_property
    def articles(self) -> dict[str, list[int]]:
        """Token ids by article."""
        files = sorted(CORPUS.glob("*.md"))[: 3 if self.quick else None]
        return {file.stem: list(self.engine.chunk(file.read_text()).token_ids) for file in files}

    def chunks(self, count: int, tokens: int = 128) -> list[list[int]]:
        """The first tokens of each article, from several articles in turn; stored."""
        articles = list(self.articles.values())
        made = [
            articles[i % len(articles)][i // len(articles) * tokens :][:tokens]
            for i in range(count)
        ]
        self.engine.entries.encode(made)
        return made

    def questions(self, name: str, count: int) -> Sequence[Asked]:
        """Test questions of a set. Raises `NotHereError`."""
        found = sets.questions()
        if found is None:
            raise NotHereError("no question sets were found: `python -m benchmarks.sets`")
        return questions(name, found, "test", count)

    @cached_property
    def trace(self) -> Any:
        return load_trace(self.options.trace, 16)

    @property
    def profiled_tokens(self) -> int:
        """The longest prompt that the profile was fitted to."""
        return max(QUICK_LENGTHS if self.options.profile is None else LENGTHS)

    @cached_property
    def profile(self) -> Any:
        path = self.options.profile
        return self.engine.parts.profiler.measure(quick=True) if path is None else profile_in(path)
