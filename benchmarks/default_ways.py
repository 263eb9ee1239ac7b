"""The ways that `benchmarks.defaults` compares: how passages are cut, ordered and stored, and which
tokens are recomputed, and over which layers and tokens the question asks.

A way is a question's prompt in one layout, over entries of one form, with one choice of tokens.
Ways of the same layout share its full prefill, and those of the same form its entries.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

from benchmarks.anchors import Given, asked_over_anchors
from benchmarks.real_judge import COMPARED_TOKENS, Reader, config_of, divergence
from benchmarks.real_sets import Asked
from benchmarks.rows import Row
from ragkv import Chunk, Engine
from ragkv.control.controller import Controller
from ragkv.control.method import Method
from ragkv.fusion import Candidates, Plan, Recompute
from ragkv.fusion.selectors import Attention, Selector, budget, top
from ragkv.model import Rows as PromptRows
from ragkv.model import grown, run_layer
from ragkv.model.attention import Watch
from ragkv.prompt import PrefilledPrompt, planning
from ragkv.retrieval import Document, Splitter
from ragkv.scheduling.encoding import contexts

RATIO = 0.15
# Every form has the same codec, so that only what chunks are encoded behind differs.
SETTINGS = {"store.memory_bytes": str(1 << 29), "store.codec": "int8"}
# The default's own names, so that the tables follow the package.
NEUTRAL = contexts.NEUTRAL_TOKENS
LEADING = planning.LEADING_TOKENS
EVERY_TOKEN = 1 << 30  # more than a passage has
FIRST_SHARE = 0.5  # of the budget, chosen in the first of two rounds

Layout = Callable[[Engine, Asked], Sequence[str]]  # the passages of a prompt, in its order


@dataclass(frozen=True)
class Way:
    """One way to serve a question."""

    name: str
    layout: str = "as they come"
    neutral_tokens: int = NEUTRAL  # 0: chunks are encoded alone
    options: Mapping[str, Any] = field(
        default_factory=lambda: {"selector": "attention", "ratio": RATIO}
    )
    leading_tokens: int = LEADING  # of the first passage, computed in place
    first_share: float | None = None  # of the budget, in the first of two rounds; None: one round
    # of each chunk's tokens, over which alone the question asks; None: over all
    anchors: float | None = None
    early: float = 0.0  # of the candidates, recomputed before the question chooses


@dataclass(frozen=True)
class Study:
    """A default and its alternatives."""

    title: str
    default: str  # the name of its way
    ways: Sequence[Way]


class Unweighed(Attention):
    """Attention that weighs the same everywhere in a chunk."""

    name = "unweighed"

    def select_asked(
        self, candidates: Candidates, attention: torch.Tensor, ratio: float
    ) -> torch.Tensor:
        return top(attention, budget(ratio, len(candidates)))


class Remembering(Attention):
    """Keeps the candidates of the prompt it is asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.candidates = torch.empty(0, dtype=torch.int64)  # positions (N,)

    def select_asked(
        self, candidates: Candidates, attention: torch.Tensor, ratio: float
    ) -> torch.Tensor:
        self.candidates = candidates.positions
        return super().select_asked(candidates, attention, ratio)


def as_they_come(_engine: Engine, asked: Asked) -> Sequence[str]:
    """The passages of the set, in its order."""
    return asked.passages


def cut_at(tokens: int) -> Layout:
    """The passages as one document, cut into chunks of at most so many tokens."""

    def layout(engine: Engine, asked: Asked) -> Sequence[str]:
        splitter = Splitter(engine.model.count_tokens, tokens)
        whole = Document(asked.key, "\n\n".join(asked.passages))
        return [passage.text for passage in splitter.split(whole)]

    return layout


def with_best(at: int) -> Layout:
    """The passage that answers first (0) or last (-1), the others in the order of the set."""

    def layout(_engine: Engine, asked: Asked) -> Sequence[str]:
        best = _best(asked)
        others = [text for text in asked.passages if text is not best]
        return [best, *others] if at == 0 else [*others, best]

    return layout


def _best(asked: Asked) -> str:
    """The first passage that has an answer; the first of all if none has."""
    return next(
        (text for text in asked.passages if any(gold in text for gold in asked.golds)),
        asked.passages[0],
    )


LAYOUTS: dict[str, Layout] = {
    "as they come": as_they_come,
    **{f"cut at {tokens}": cut_at(tokens) for tokens in (128, 256, 512)},
    "best first": with_best(0),
    "best last": with_best(-1),
}


def _asked(name: str, selector: str | Selector, ratio: float = RATIO) -> Way:
    return Way(name, options={"selector": selector, "ratio": ratio})


def _anchored(name: str, anchors: float, ratio: float) -> Way:
    return Way(name, options={"selector": "attention", "ratio": ratio}, anchors=anchors)


_DEFAULT = Way("the default")
_SMALLER = _asked("asked below .83, at .05", "attention", 0.05)
STUDIES = {
    "asked": Study(
        "Over which layers the question asks",
        _DEFAULT.name,
        (
            _DEFAULT,
            _asked("asked to the last layer", Attention((0.5, 1.0))),
            _asked("asked below .73", Attention((0.5, 0.73))),
            _asked("nothing recomputed", "attention", 0.0),
        ),
    ),
    "asked at .05": Study(
        "Over which layers the question asks, where 5 % are recomputed",
        _SMALLER.name,
        (
            _SMALLER,
            _asked("asked to the last layer, at .05", Attention((0.5, 1.0)), 0.05),
            _asked("nothing recomputed", "attention", 0.0),
        ),
    ),
    "leading": Study(
        f"How much of the first passage is computed in place ({LEADING} tokens)",
        _DEFAULT.name,
        (
            _DEFAULT,
            Way("its first token", leading_tokens=1),
            Way("all of it", leading_tokens=EVERY_TOKEN),
        ),
    ),
    "neutral": Study(
        f"The length of the neutral text that chunks are encoded behind ({NEUTRAL:,} tokens)",
        _DEFAULT.name,
        (
            Way("320 tokens", neutral_tokens=320),
            _DEFAULT,
        ),
    ),
    "choice": Study(
        "Which tokens the question's attention chooses",
        _DEFAULT.name,
        (
            _DEFAULT,
            _asked("beginnings weigh as much", Unweighed()),
            Way("two rounds", first_share=FIRST_SHARE),
        ),
    ),
    "choice at .05": Study(
        "Which tokens the question's attention chooses, where 5 % are recomputed",
        _SMALLER.name,
        (
            _SMALLER,
            _asked("beginnings weigh as much, at .05", Unweighed(), 0.05),
        ),
    ),
    "anchors": Study(
        "Whether the question asks over a slice of each chunk alone",
        _DEFAULT.name,
        (
            _DEFAULT,
            _anchored("over 30 % of a chunk", 0.3, RATIO),
            _anchored("over 15 % of a chunk: all are recomputed", 0.15, RATIO),
        ),
    ),
    "anchors at .05": Study(
        "Whether the question asks over a slice of each chunk alone, where 5 % are recomputed",
        _SMALLER.name,
        (
            _SMALLER,
            _anchored("over 15 % of a chunk, at .05", 0.15, 0.05),
        ),
    ),
    "early": Study(
        "Beginnings of chunks that are recomputed besides, while the question waits for its layers",
        _DEFAULT.name,
        (
            _DEFAULT,
            Way("5 % early", early=0.05),
            Way("10 % early", early=0.1),
            _asked("10 % more by attention", "attention", 0.25),
        ),
    ),
    "chunks": Study(
        "The length of chunks",
        "cut at 256",
        tuple(Way(f"cut at {tokens}", f"cut at {tokens}") for tokens in (128, 256, 512)),
    ),
    "order": Study(
        "The place of the best passage",
        "best last",
        (Way("best first", "best first"), Way("best last", "best last")),
    ),
}


class Asker:
    """Asks one model in the ways of some studies."""

    def __init__(self, base: Engine, studies: Sequence[str]) -> None:
        self._open = ExitStack()
        self._reader = Reader(base)
        every = [way for name in studies for way in STUDIES[name].ways]
        self._ways = list({way.name: way for way in every}.values())
        self._engines = {
            tokens: self._open.enter_context(_behind(base, tokens))
            for tokens in dict.fromkeys(way.neutral_tokens for way in self._ways)
        }

    def __enter__(self) -> "Asker":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def ask(self, asked: Asked, known: Collection[str] = ()) -> Iterator[Row]:
        """A row for each way that is not `known`. Raises `PromptTooLongError`."""
        todo = [way for way in self._ways if way.name not in known]
        for layout in dict.fromkeys(way.layout for way in todo):
            own = [way for way in todo if way.layout == layout]
            yield from self._in_layout(asked, LAYOUTS[layout], own)

    def _in_layout(self, asked: Asked, layout: Layout, ways: Sequence[Way]) -> Iterator[Row]:
        reader = self._reader
        question = reader.question(asked)
        golds = reader.golds(asked)
        any_engine = next(iter(self._engines.values()))
        passages = layout(any_engine, asked)
        chunks = [any_engine.chunk(text) for text in passages]
        full = any_engine.prefill(question, chunks, reuse="none")
        answer = reader.decoded(full, COMPARED_TOKENS)
        wanted = reader.log_probabilities(full, answer)
        full_gold = reader.likelihood(full, golds)
        for tokens in dict.fromkeys(way.neutral_tokens for way in ways):
            engine = self._engines[tokens]
            engine.entries.encode(chunks)
            for way in (way for way in ways if way.neutral_tokens == tokens):
                prefill = served(engine, question, chunks, way)
                found = reader.log_probabilities(prefill, answer)
                yield {
                    "way": way.name,
                    "kl": divergence(wanted, found),
                    "gold": reader.likelihood(prefill, golds),
                    "full_gold": full_gold,
                    "compute": prefill.reuse.compute,
                    "tokens": len(prefill.token_ids),
                    "chunks": len(chunks),
                }
            engine.entries.delete(chunks)


def served(engine: Engine, question: str, chunks: Sequence[Chunk], way: Way) -> PrefilledPrompt:
    """The prompt's KV and last logits in one way. `compute` leaves out what a second round costs:
    the first round, and asking again; and what asking over anchors costs.
    """
    if way.anchors is not None:
        return asked_over_anchors(engine, question, chunks, way.anchors, way.options["ratio"])
    if way.first_share is None:
        with (
            mock.patch.object(planning, "LEADING_TOKENS", way.leading_tokens),
            mock.patch.object(Controller, "decide", _deciding(way.early)),
        ):
            return engine.prefill(question, chunks, **way.options)
    asking = Remembering()
    first = engine.prefill(question, chunks, selector=asking, ratio=RATIO * way.first_share)
    rows = len(engine.token_ids(question))
    again = attention_of_last(engine, first, rows)[asking.candidates]
    wanted = budget(RATIO, len(asking.candidates)) - len(first.selected)
    again[torch.isin(asking.candidates, first.selected)] = -1.0
    more = asking.candidates[top(again, wanted)]
    positions = torch.cat((first.selected, more)).sort().values
    return engine.prefill(question, chunks, selector=Given(positions), ratio=RATIO)


def _deciding(early: float) -> Callable[[Controller, Plan, Method], tuple[Plan, Recompute]]:
    """The controller's decision, with a share of the candidates recomputed early."""
    decide = Controller.decide

    def decided(controller: Controller, plan: Plan, method: Method) -> tuple[Plan, Recompute]:
        plan, recompute = decide(controller, plan, method)
        return plan, replace(recompute, early=budget(early, len(plan.candidates)))

    return decided


@torch.no_grad()
def attention_of_last(engine: Engine, prefill: PrefilledPrompt, count: int) -> torch.Tensor:
    """The attention that the last `count` rows of a prefilled prompt pay to each position (S,):
    means over these rows, the heads and the layers over which the question asks.
    """
    adapter = engine.model.adapter
    length = len(prefill.token_ids)
    rows = PromptRows.span(length - count, length, adapter.device)
    tables = adapter.rope.tables(length)
    kv = grown(prefill.kv, 0)  # The rows' own KV is written again, as it is.
    asked = Attention().asked_layers(adapter.layer_count)
    watch = Watch(count, length, adapter.device)
    hidden = adapter.embed(prefill.token_ids[length - count :].to(adapter.device))
    for layer in range(adapter.layer_count):
        seen = watch if layer in asked else None
        hidden = run_layer(adapter, layer, hidden, rows, kv, tables, watch=seen)
    return watch.received()


def _behind(base: Engine, tokens: int) -> Engine:
    """An engine on the same model whose chunks are encoded behind so many neutral tokens."""
    form = "expected" if tokens else "alone"
    with mock.patch.object(contexts, "NEUTRAL_TOKENS", tokens):
        return base.with_config(config_of({**SETTINGS, "fusion.stored_kv": form}))
