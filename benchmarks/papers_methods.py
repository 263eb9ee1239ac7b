"""The methods of the CacheBlend paper's figures 12 and 13, and the questions of a set asked with
each of them.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.papers_report import BASE, Results
from benchmarks.papers_tasks import Prepared, Preparer, Task
from benchmarks.quality_data import Context
from benchmarks.real_judge import make_first_exact
from benchmarks.rows import Row
from examples.baselines import map_reduce, map_rerank
from ragkv import Engine, PromptConfig
from ragkv.retrieval import Embedder


@dataclass(frozen=True)
class Method:
    """How a question is answered."""

    name: str
    options: dict[str, Any]  # of `Engine.answer`
    mapped: Callable[..., Any] | None = None  # MapReduce or MapRerank


def methods(options: argparse.Namespace, task: Task) -> list[Method]:
    """The methods of figure 12 and, if asked for, those of figure 13, which answer
    questions only.
    """
    made = [
        Method(BASE, {"reuse": "none"}),
        Method("prefix caching", {"reuse": "prefix"}),
        Method("full reuse", {"ratio": 0.0, "selector": "none"}),
    ]
    for selector, ratio in itertools.product(options.selectors, options.ratios):
        name = "CacheBlend (hkvd)" if selector == "hkvd" else selector
        made.append(Method(f"{name} {ratio:g}", {"ratio": ratio, "selector": selector}))
    if options.map and task.retrieved:
        made.append(Method("MapReduce", {"reuse": "none"}, mapped=map_reduce))
        made.append(Method("MapRerank", {"reuse": "none"}, mapped=map_rerank))
    return made


class Asker:
    """Asks the questions of one set with every method."""

    def __init__(
        self, base: Engine, task: Task, options: argparse.Namespace, embedder: Embedder | None
    ) -> None:
        self._task = task
        self._open = ExitStack()
        config = replace(base.config, prompt=PromptConfig(task.before, task.separator))
        self._engine = self._open.enter_context(base.with_config(config))
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
        """The entries of the chunks are in memory."""
        self._engine.warm(question.chunks)
        make_first_exact(self._engine, question.chunks)
        yield
        self._engine.delete(question.chunks)

    def _result(self, method: Method, question: Prepared, new_tokens: int) -> dict[str, Any]:
        engine = self._engine
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
        }
        return found | ({"tokens": answer.reuse.tokens} if method.name == BASE else {})
