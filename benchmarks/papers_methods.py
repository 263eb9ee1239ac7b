"""The methods of the CacheBlend paper's figures 12 and 13, and the questions of a set asked with
each of them.

The papers' own methods reuse KV as the papers store it: of each chunk alone, not rounded. Prefix
caching has an earlier prompt with the same first chunk, MapReduce and MapRerank an earlier question
about each chunk.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.papers_report import BASE, Results
from benchmarks.papers_tasks import Prepared, Preparer, Task
from benchmarks.quality_data import Context
from benchmarks.rows import Row
from examples.baselines import map_reduce, map_rerank
from examples.earlier_prompts import ask_before, ask_each_before
from ragkv import Engine, EngineConfig, PromptConfig
from ragkv.retrieval import Embedder

# How chunks are stored, by the name of the form.
ALONE = "KV alone, raw"
EXPECTED = "expected KV, int8"
STORED: dict[str, dict[str, str]] = {
    ALONE: {"stored_kv": "alone", "codec": "raw"},
    EXPECTED: {"stored_kv": "expected", "codec": "int8"},
}
# CacheBlend's selectors, which have its KV.
AS_PRINTED = {"hkvd": "HKVD", "hkvd-gradual": "HKVD, gradual"}


@dataclass(frozen=True)
class Method:
    """How a question is answered."""

    name: str
    options: dict[str, Any]  # of `Engine.answer`
    stored: str = ""  # the form of the KV that it reuses: a key of `STORED`, or none
    mapped: Callable[..., Any] | None = None  # MapReduce or MapRerank


def methods(options: argparse.Namespace, task: Task) -> list[Method]:
    """The methods of figure 12 and, if asked for, those of figure 13, which answer
    questions only.
    """
    nothing = {"ratio": 0.0}
    made = [
        Method(BASE, {"reuse": "none"}),
        Method("prefix caching", {"reuse": "prefix"}),
        Method("full reuse (PromptCache)", nothing, ALONE),
        Method("nothing recomputed (ours)", nothing, EXPECTED),
    ]
    for selector, ratio in itertools.product(options.selectors, options.ratios):
        how = {"ratio": ratio, "selector": selector}
        if selector in AS_PRINTED:
            name = f"{AS_PRINTED[selector]} {ratio:g} (CacheBlend as printed)"
            made.append(Method(name, how, ALONE))
        else:
            made.append(Method(f"{selector} {ratio:g} (ours)", how, EXPECTED))
    if options.map and task.retrieved:
        made.append(Method("MapReduce", {"reuse": "prefix"}, mapped=map_reduce))
        made.append(Method("MapRerank", {"reuse": "prefix"}, mapped=map_rerank))
    return made


class Asker:
    """Asks the questions of one set with every method."""

    def __init__(
        self, base: Engine, task: Task, options: argparse.Namespace, embedder: Embedder | None
    ) -> None:
        self._task = task
        self._open = ExitStack()
        config = replace(base.config, prompt=PromptConfig(task.before, task.separator))
        self.engines = {
            name: self._open.enter_context(base.with_config(_stored_as(config, form)))
            for name, form in STORED.items()
        }
        # It also serves what reuses no entries.
        self._engine = self.engines[EXPECTED]
        self._methods = methods(options, task)
        self._preparer = Preparer(
            self._engine, task, options.chunks, options.chunk_tokens, embedder
        )

    def __enter__(self) -> "Asker":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def missing(self, name: str, contexts: Sequence[Context], results: Results) -> Iterator[Row]:
        """The results of the questions that have none yet. The first question also warms up,
        uncounted.
        """
        todo = [n for n in range(len(contexts)) if not results.has(name, n)]
        prepared = (self._preparer.prepared(context) for context in contexts) if todo else iter(())
        if (first := next(filter(None, prepared), None)) is not None:
            with self._stored(first):
                for method in self._methods:
                    self._result(method, first, new_tokens=2)
        for number in todo:
            question = self._preparer.prepared(contexts[number])
            row: Row = {"set": name, "number": number}
            yield row if question is None else row | self._asked(question, number)

    def _asked(self, question: Prepared, number: int) -> Row:
        # another one for each question, so that none is always the first
        first = number % len(self._methods)
        with self._stored(question):
            found = {
                method.name: self._result(method, question, self._task.new_tokens)
                for method in (*self._methods[first:], *self._methods[:first])
            }
        return {
            "cut": question.cut,
            "chunks": len(question.chunks),
            "prompt_tokens": found[BASE].pop("tokens"),
            "methods": {method.name: found[method.name] for method in self._methods},
        }

    @contextmanager
    def _stored(self, question: Prepared) -> Iterator[None]:
        """The entries of the chunks are in memory, and what prefix caching has."""
        for engine in self.engines.values():
            engine.entries.encode(question.chunks)
        ask_before(self._engine, question.chunks)
        if any(method.mapped for method in self._methods):
            ask_each_before(self._engine, question.chunks)
        yield
        for engine in self.engines.values():
            engine.entries.delete(question.chunks)

    def _result(self, method: Method, question: Prepared, new_tokens: int) -> dict[str, Any]:
        engine = self.engines.get(method.stored, self._engine)
        options = method.options
        if method.mapped is not None:
            mapped = method.mapped(
                engine, question.text, question.chunks, max_new_tokens=new_tokens, **options
            )
            text = mapped.text
            first_token_s = mapped.first_token_s
            compute = None
            missed = 0
        else:
            answer = engine.answer(
                question.text, question.chunks, max_new_tokens=new_tokens, **options
            )
            text = answer.text
            first_token_s = answer.timing.first_token_s
            compute = answer.reuse.compute
            missed = 0 if "reuse" in options else answer.reuse.missed_chunks
        score = self._task.score(text, question.golds)
        found = {
            "answer": text,
            "score": score,
            "first_token_s": first_token_s,
            "compute": compute,
            "missed": missed,
            "stored": method.stored,
        }
        return found | ({"tokens": answer.reuse.tokens} if method.name == BASE else {})


def _stored_as(config: EngineConfig, form: Mapping[str, str]) -> EngineConfig:
    """`config` with chunks stored in a form of `STORED`."""
    fusion = replace(config.fusion, stored_kv=form["stored_kv"])
    return replace(config, fusion=fusion, store=replace(config.store, codec=form["codec"]))
