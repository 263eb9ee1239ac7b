"""Follow-up questions after fused turns: quality, compute and first token by `session.inexact_history`.

    python -m benchmarks.followups                     # 300 conversations with the bundled reader, over half an hour
    python -m benchmarks.followups --quick             # 12 conversations
    python -m benchmarks.followups --conversations 60 --ratios .1 .15
    python -m benchmarks.followups --limit-s 400 --resume   # goes on where the last run ended, until all are done
    python -m benchmarks.followups --shape qwen2.5-0.5b     # times at a real size, with random weights

A conversation has 3 to 5 turns about one held-out world. Turn 1 brings all documents, or two thirds of them in
conversations of five turns, whose turn 4 brings the rest. All other turns, two of three, bring none: each needs the
documents of earlier turns, either by a pronoun that stands for something in the turn before, or by a name. Every method
has conversations of its own, with its own answers in its history, which alternate within a run. EM is measured against
the world's answers.

"compute" of a turn is row-layers over those of a full prefill of its whole prompt, and its mean is over follow-ups;
what `background` computes between turns is not in it. "first token" is the median over follow-ups, "sooner" that of the
time of a full recompute of the same turn divided by the method's. With `--shape` the answers mean nothing, so EM is
left out, and scores are the variance: the learned ones are the reader's.
"""

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from random import Random
from typing import Any

import numpy as np
import torch

from benchmarks import report
from ragkv import Engine, EngineConfig, FusionConfig
from ragkv.config import SessionConfig
from ragkv.lab.metrics import best, exact_match
from ragkv.model.shapes import SHAPES, random_model
from training.questions import Question
from training.worlds import World, level, world

FIRST_SEED = 8_500_000_000_000  # far from the seeds of training and evaluation, and from those of benchmarks.quality
MAX_NEW_TOKENS = 12
WARMED_UP = 2  # conversations at the start whose times do not count
RESAMPLES = 2000


@dataclass(frozen=True)
class Turn:
    """A question, its answer, and the documents that it brings."""

    question: str
    gold: str
    chunks: tuple[str, ...] = ()
    is_follow_up: bool = True


@dataclass(frozen=True)
class Method:
    """How every turn of a conversation is answered."""

    name: str
    inexact_history: str
    ratio: float | None = None  # None: a full recompute of every prompt
    selector: str = "sensitivity"


@dataclass(frozen=True)
class Outcome:
    """One turn with one method."""

    conversation: int
    is_follow_up: bool
    exact: float
    compute: float
    first_token_s: float


def main() -> None:
    parser = report.parser(__doc__, "12 conversations", threads=1)
    parser.add_argument("--conversations", type=int, default=300)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.1, 0.15])
    parser.add_argument("--settings", nargs="+", default=["keep", "select", "background", "recompute"])
    parser.add_argument("--selector", default="sensitivity")
    parser.add_argument("--level", type=int, default=3, help="of the worlds: 3 as in benchmarks.quality, 4 is longer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="start no further conversation after this")
    parser.add_argument("--resume", action="store_true", help="go on after the conversations of the last run")
    shapes = sorted(SHAPES.keys() - {"tiny"})  # whose vocabulary is smaller than the reader's
    parser.add_argument("--shape", choices=shapes, help="a model of this shape, in place of the reader")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    count = 12 if options.quick else options.conversations
    methods = [Method("full recompute", "keep")]
    methods += [
        Method(f"{setting} {ratio:g}", setting, ratio, options.selector)
        for ratio in options.ratios
        for setting in options.settings
    ]
    asked = {name: getattr(options, name) for name in ("selector", "level", "seed", "shape")}
    outcomes = _earlier(asked, methods) if options.resume else {method.name: [] for method in methods}
    done = 1 + max((one.conversation for one in outcomes[methods[0].name]), default=-1)
    began = time.perf_counter()
    left = islice(enumerate(conversations(count, options.seed, options.level)), done, None)
    for name, found in measured(methods, left, began + options.limit_s, options.shape).items():
        outcomes[name] += found
    results = summarized(outcomes)
    _print(results, has_answers=options.shape is None)
    results |= {"asked": asked, "turns": {name: [asdict(one) for one in found] for name, found in outcomes.items()}}
    print("written:", report.save("followups", results), f"{time.perf_counter() - began:.0f} s")


def _earlier(asked: dict[str, Any], methods: Sequence[Method]) -> dict[str, list[Outcome]]:
    """The turns of the last run, which had the same options."""
    file = report.RESULTS / "followups.json"
    if not file.exists():
        raise SystemExit("There is no last run; leave --resume out.")
    results = json.loads(file.read_text())["results"]
    if results["asked"] != asked or [*results["turns"]] != [method.name for method in methods]:
        raise SystemExit("The last run had other options; leave --resume out.")
    return {name: [Outcome(**one) for one in found] for name, found in results["turns"].items()}


def conversations(count: int, seed: int, number: int) -> Iterator[tuple[Turn, ...]]:
    """`count` conversations of 3, 4 and 5 turns."""
    spec, made, at = replace(level(number), names="heldout", questions=0), 0, FIRST_SEED + seed * 1_000_000
    while made < count:
        found = conversation(world(at, replace(spec, questions=1000)), 3 + made % 3, Random(at))
        at += 1
        if found is not None:
            made += 1
            yield found


def conversation(of: World, turns: int, random: Random) -> tuple[Turn, ...] | None:
    """A conversation about a world, or `None` if it has too few questions of one of the kinds."""
    early = tuple(range(len(of.chunks) if turns < 5 else max(2, 2 * len(of.chunks) // 3)))
    questions = [question for question in of.questions if question.type != "unanswerable"]
    if turns == 5 and len(early) == len(of.chunks):
        return None
    asked: list[Turn] = []
    seen: set[str] = set()

    def single(support: Sequence[int], needs: frozenset[int] = frozenset()) -> Question | None:
        fitting = [
            question
            for question in questions
            if not question.history and question.question not in seen
            and set(question.support) <= set(support) and (not needs or needs & set(question.support))
        ]  # fmt: skip
        return random.choice(fitting) if fitting else None

    def follow_up(support: Sequence[int]) -> Question | None:
        fitting = [question for question in questions if question.history and set(question.support) <= set(support)]
        return random.choice(fitting) if fitting else None

    first = follow_up(early)
    if first is None:
        return None
    ((opening, opening_gold),) = first.history
    asked.append(Turn(opening, opening_gold, tuple(of.chunks[number] for number in early), is_follow_up=False))
    asked.append(Turn(first.question, first.answer))
    seen |= {opening, first.question}
    everything = range(len(of.chunks))
    for number in range(2, turns):
        late = frozenset(everything) - frozenset(early)
        brings = turns == 5 and number == 3
        support = everything if number >= 3 else early
        next_one = single(support, late if brings else frozenset())
        if next_one is None:
            return None
        seen.add(next_one.question)
        chunks = tuple(of.chunks[at] for at in sorted(late)) if brings else ()
        asked.append(Turn(next_one.question, next_one.answer, chunks, is_follow_up=not brings))
    return tuple(asked)


def measured(
    methods: Sequence[Method], found: Iterator[tuple[int, tuple[Turn, ...]]], until: float, shape: str | None
) -> dict[str, list[Outcome]]:
    """Every conversation, given with its number, with every method."""
    outcomes: dict[str, list[Outcome]] = defaultdict(list)
    engine = _engine(EngineConfig(fusion=FusionConfig(selector=methods[-1].selector)), shape)
    settings = {method.inexact_history for method in methods}
    with engine:
        engines = {
            setting: engine.with_config(replace(engine.config, session=SessionConfig(inexact_history=setting)))
            for setting in settings
        }
        for number, turns in found:
            if time.perf_counter() > until:
                break
            for method in methods:
                outcomes[method.name] += _held(engines[method.inexact_history], method, number, turns)
        for one in engines.values():
            one.close()
    return outcomes


def _engine(config: EngineConfig, shape: str | None) -> Engine:
    """The reader, or a model of that shape with random weights, which reads the reader's token ids."""
    reader = Engine.from_pretrained("reader", config)
    if shape is None:
        return reader
    with reader:
        return Engine(random_model(shape), reader.tokenizer, config)


def _held(engine: Engine, method: Method, number: int, turns: Sequence[Turn]) -> Iterator[Outcome]:
    """One conversation with one method."""
    session = engine.session(f"{method.name} {number}")
    how: dict[str, Any] = (
        dict(reuse="none") if method.ratio is None else dict(ratio=method.ratio, selector=method.selector)
    )
    for turn in turns:
        chunks = [engine.chunk(text) for text in turn.chunks]
        engine.warm(chunks)
        answer = engine.answer(turn.question, chunks, session, max_new_tokens=MAX_NEW_TOKENS, **how)
        exact = best(exact_match, answer.text, (turn.gold,))
        yield Outcome(number, turn.is_follow_up, exact, answer.reuse.compute, answer.timing.first_token_s)
        engine.flush()  # the time until the next question, in which `background` works
    session.delete()


def summarized(outcomes: dict[str, list[Outcome]]) -> dict[str, Any]:
    """EM of follow-ups and of other turns, compute, and first token against a full recompute."""
    full = outcomes["full recompute"]
    rows = {}
    for name, found in outcomes.items():
        after = [one for one in found if one.is_follow_up]
        pairs = [(one, other) for one, other in zip(found, full, strict=True) if one.is_follow_up]
        timed = [(one, other) for one, other in pairs if one.conversation >= WARMED_UP] or pairs
        rows[name] = {
            "exact": statistics.fmean(one.exact for one in after),
            "minus_full": statistics.fmean(one.exact - other.exact for one, other in pairs),
            "minus_full_95": _interval(pairs),
            "exact_other_turns": statistics.fmean(one.exact for one in found if not one.is_follow_up),
            "compute": statistics.fmean(one.compute for one in after),
            "first_token_s": statistics.median(one.first_token_s for one, _ in timed),
            "sooner": statistics.median(other.first_token_s / one.first_token_s for one, other in timed),
        }
    count = len({one.conversation for one in full})
    return {"conversations": count, "follow_ups": sum(one.is_follow_up for one in full), "methods": rows}


def _interval(pairs: Sequence[tuple[Outcome, Outcome]]) -> tuple[float, float]:
    """95 % bootstrap interval, over conversations, of the mean difference."""
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for one, other in pairs:
        sums[one.conversation][0] += one.exact - other.exact
        sums[one.conversation][1] += 1
    values = np.array(list(sums.values()))
    draws = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    means = values[draws, 0].sum(1) / values[draws, 1].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def _print(results: dict[str, Any], has_answers: bool) -> None:
    print(f"{results['conversations']} conversations, {results['follow_ups']} follow-ups")
    headings = ["", "compute", "first token", "sooner"]
    rows = [
        [name, row["compute"], f"{row['first_token_s'] * 1e3:.1f} ms", f"{row['sooner']:.1f}x"]
        for name, row in results["methods"].items()
    ]
    if has_answers:
        headings += ["EM", "- full", "95 %", "EM of other turns"]
        for cells, row in zip(rows, results["methods"].values(), strict=True):
            between = "{:+.3f} to {:+.3f}".format(*row["minus_full_95"])
            cells += [row["exact"], row["minus_full"], between, row["exact_other_turns"]]
    report.table(headings, rows)


if __name__ == "__main__":
    main()
