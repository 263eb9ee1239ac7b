"""What a leading passage needs: how much of the first passage of a prompt must be computed in place.

    python -m benchmarks.leading --data FOLDER [--quick]
    python -m benchmarks.leading --data FOLDER --halves test --sets xquad --model gemma3

A passage that stands right behind the prefix can be served in three ways. `whole` computes it in
place. `exact` reuses a second entry, which was encoded behind the prefix alone. `N tokens` computes
its first N tokens in place and fuses the others from the entry that every passage has. Each way is
compared with the model's own full prefill: KL over the first tokens of its greedy answer, the gold
answer's log-likelihood a token, the share of compute, and the first token's time.

The other passages are fused, with `--selector` at `--ratio`. The full prefill is computed once for
a question, and a passage is encoded once for all questions. The first `--few` questions of a half in
`--few-halves` also try the counts of `--also`. Differences are paired by question, and their
intervals are 95 % bootstraps. Rows are appended to `--out` question by question, and the same
command goes on where a killed run stopped. MODEL and FOLDER are those of `benchmarks.real`.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks import report, sets
from benchmarks.leading_report import differences, means, rows_of, written
from benchmarks.real import NO_DATA
from benchmarks.real_judge import (
    COMPARED_TOKENS,
    GOLD_TOKENS,
    WITH_TEMPLATE,
    WITHOUT_TEMPLATE,
    config_of,
    located,
)
from benchmarks.real_sets import Asked, questions
from benchmarks.rows import Row, Rows
from ragkv import Engine
from ragkv.errors import PromptTooLongError, RagKVError
from ragkv.fusion import Passed, Plan, Span, SpanKind, SpanState, make_selector
from ragkv.model import full_pass
from ragkv.model.decode.stopping import end_tokens
from ragkv.prompt import Prompt
from ragkv.runtime.rates import Rate
from ragkv.scheduling.encoding import Encoder
from ragkv.store import MemoryLease

LABEL = ("model", "dtype", "selector", "ratio")  # rows of other values are of other runs
FULL = "full"
TABLES_EVERY = 10  # questions: what is known is written then


@dataclass(frozen=True)
class Way:
    """How the leading passage is served."""

    name: str
    # its first tokens that are computed in place; None: all
    computed: int | None = 0
    exact: bool = False  # it has an entry of its own, encoded behind the prefix alone
    fuses: bool = True  # whether the other passages are fused, or computed as well

    @classmethod
    def first(cls, tokens: int) -> "Way":
        """Its first `tokens` are computed in place."""
        return cls(f"{tokens} tokens", tokens)


WHOLE = Way("whole", None)
EXACT = Way("exact", exact=True)


class Passages:
    """The engine's parts that this benchmark builds prompts of: the only place that knows them."""

    def __init__(self, engine: Engine, selector: str, ratio: float) -> None:
        self.engine = engine
        self._selector = make_selector(selector)
        self._ratio = ratio
        prefix = engine.intake.runs.before_documents
        alone = replace(engine.entries.identity, behind="", codec="raw")
        self._alone = Encoder(engine.model.adapter, prefix, alone)  # behind the prefix alone

    def prompt(self, question: str, passages: Sequence[str]) -> Prompt:
        """The prompt as the engine lays it out. Raises `PromptTooLongError`."""
        intake = self.engine.intake
        return intake.prompt(intake.prefill_request(question, passages, {}))

    def encode(self, prompt: Prompt) -> MemoryLease:
        """Store the entries of all passages; the leading one's exact entry is returned."""
        self.engine.entries.warm(prompt.chunks)
        with self.engine.scheduler.encoding_turn():
            (entry,) = self._alone.chunks(prompt.chunks[:1])
        return MemoryLease(entry)

    def fused(self, prompt: Prompt, way: Way, exact: MemoryLease) -> Passed:
        """The prompt's KV and last logits. `exact` is the leading passage's exact entry."""
        scheduler = self.engine.scheduler
        with ExitStack() as held:
            plan = self.plan(prompt, way, exact, held)
            fusor = self.engine.fusor
            one = held.enter_context(fusor.prepared(plan, self._selector, self._ratio))
            held.enter_context(scheduler.turn())
            fusor.run([one], lambda: None)
            passed = one.result()
            assert passed is not None
            return passed

    def plan(self, prompt: Prompt, way: Way, exact: MemoryLease, held: ExitStack) -> Plan:
        """The plan of a prompt whose leading passage is served in `way`; its leases go to `held`."""
        ids = torch.tensor(prompt.token_ids)
        if not way.fuses:
            return Plan.of(ids, [Span(SpanKind.TEXT, 0, len(ids), SpanState.COMPUTED)])
        encoder = self.engine.entries.encoder
        prefix = encoder.prefix()
        assert prefix is not None, "the model has no prefix, or its KV depends on the length"
        at = len(prompt.prefix)
        spans = [Span(SpanKind.PREFIX, 0, at, SpanState.EXACT, held.enter_context(prefix))]
        for run, index in prompt.body:
            stop = at + len(run)
            if index is None:
                spans.append(Span(SpanKind.TEXT, at, stop, SpanState.COMPUTED))
            elif index == 0 and way.exact:
                spans.append(Span(SpanKind.CHUNK, at, stop, SpanState.EXACT, exact, index))
            else:
                lease = self.engine.store.lease(encoder.identity, run)
                assert lease is not None, "the store has no room for the passages of one prompt"
                held.enter_context(lease)
                wanted = len(run) if way.computed is None else way.computed
                computed = min(wanted, len(run)) if index == 0 else 0
                cut = at + computed
                if computed:
                    spans.append(Span(SpanKind.CHUNK, at, cut, SpanState.COMPUTED, None, index))
                if cut < stop:
                    spans.append(
                        Span(SpanKind.CHUNK, cut, stop, SpanState.FUSED, lease, index, computed)
                    )
            at = stop
        spans.append(Span(SpanKind.QUESTION, at, len(ids), SpanState.COMPUTED))
        return Plan.of(ids, spans)

    @torch.no_grad()
    def log_probabilities(self, passed: Passed, ids: Sequence[int]) -> torch.Tensor:
        """Of every token at each place of `ids` (N,), each behind the ones before it: (N, V)."""
        adapter = self.engine.model.adapter
        logits = [passed.logits[None].float()]
        if len(ids) > 1:
            kv = passed.fused.kv.grown(len(ids) - 1)
            hidden = full_pass(adapter, torch.tensor(ids[:-1]), kv, start=kv.length)
            logits.append(adapter.logits(hidden).float())
        return torch.cat(logits).log_softmax(-1)

    @torch.no_grad()
    def greedy(self, passed: Passed) -> list[int]:
        """The greedy answer: at most `COMPARED_TOKENS`, the end token included."""
        adapter = self.engine.model.adapter
        ends = end_tokens(adapter.model, self.engine.tokenizer)
        kv = passed.fused.kv.grown(COMPARED_TOKENS)
        found = [int(passed.logits.argmax())]
        while found[-1] not in ends and len(found) < COMPARED_TOKENS:
            hidden = full_pass(adapter, torch.tensor(found[-1:]), kv, start=kv.length)
            found.append(int(adapter.logits(hidden)[-1].argmax()))
        return found


class Judge:
    """Asks one question in every way."""

    def __init__(self, passages: Passages) -> None:
        self._passages = passages
        engine = passages.engine
        has_template = bool(engine.intake.runs.after_question)
        self._form = WITH_TEMPLATE if has_template else WITHOUT_TEMPLATE
        self._before_answer = "" if has_template else " "
        self._is_warm = False

    def ask(self, asked: Asked, ways: Sequence[Way]) -> Iterator[Row]:
        """A row for the full prefill and for each of `ways`, which take turns in being first.

        Raises `PromptTooLongError`.
        """
        passages = self._passages
        question = self._form.replace("{question}", asked.question)
        prompt = passages.prompt(question, asked.passages)
        encode = passages.engine.intake.encode
        golds = encode(self._before_answer + asked.golds[0])[:GOLD_TOKENS]
        exact = passages.encode(prompt)
        if not self._is_warm:  # the first passes of a process are slower
            for way in ways:
                passages.fused(prompt, way, exact)
            self._is_warm = True
        answer = list[int]()
        wanted = torch.empty(0)
        shuffled = random.Random(asked.key).sample(list(ways), len(ways))
        for way in (Way(FULL, fuses=False), *shuffled):
            began_s = time.perf_counter()
            began_cpu_s = time.process_time()
            passed = passages.fused(prompt, way, exact)
            first_token_cpu_s = time.process_time() - began_cpu_s
            first_token_s = time.perf_counter() - began_s
            if not way.fuses:
                answer = passages.greedy(passed)
                wanted = passages.log_probabilities(passed, answer)
            found = passages.log_probabilities(passed, answer)
            gold = passages.log_probabilities(passed, golds).gather(1, torch.tensor(golds)[:, None])
            length = len(prompt.token_ids)
            layers = passages.engine.model.adapter.layer_count
            yield {
                "question": asked.key,
                "way": way.name,
                "kl": float((wanted.exp() * (wanted - found)).sum(-1).mean()),
                "agreement": float((wanted.argmax(-1) == found.argmax(-1)).float().mean()),
                "gold": float(gold.mean()),
                "compute": passed.fused.row_layers / (layers * length),
                "first_token_s": first_token_s,
                "first_token_cpu_s": first_token_cpu_s,
                "tokens": length,
                "leading_tokens": len(prompt.chunks[0]),
            }


@dataclass(frozen=True)
class Todo:
    """A question to be asked, and how."""

    half: str
    name: str  # of its set
    asked: Asked
    ways: tuple[Way, ...]


def main() -> None:
    options = _options()
    if options.data is None:
        report.skip(NO_DATA)
    torch.set_num_threads(options.threads)
    try:
        print("\n" + run(options))
    except (RagKVError, KeyboardInterrupt) as error:
        sys.exit(str(error) or "Interrupted: the same command goes on.")


def run(options: argparse.Namespace) -> str:
    """Ask what no earlier run asked; returns the tables. Raises `RagKVError`."""
    rows = Rows(options.out, fresh=options.fresh)
    settings = {"dtype": options.dtype, "store.memory_bytes": str(3 << 30)}
    with Engine.from_pretrained(located(options.model), config_of(settings)) as engine:
        judge = Judge(Passages(engine, options.selector, options.ratio))
        label = {key: getattr(options, key) for key in LABEL}
        label["dtype"] = engine.model.identity.dtype
        todo = _todo(options)
        rate = Rate()
        for number, one in enumerate(todo, 1):
            _ask(judge, rows, one, label)
            rate.update(number, len(todo))
            place = f"{one.half} {one.name} {one.asked.key}"
            print(f"{number}/{len(todo)}, {place}{rate.left}", file=sys.stderr, flush=True)
            if number % TABLES_EVERY == 0:
                _tables(rows.all, label, options)
    return _tables(rows.all, label, options)


def _todo(options: argparse.Namespace) -> list[Todo]:
    """The first question of every half and set, then the second ones: a run that ends early has
    asked equally many of each.
    """
    ways = (WHOLE, EXACT, Way.first(options.tokens))
    more = (*ways, *map(Way.first, options.also))
    found = list[tuple[int, Todo]]()
    for half in options.halves:
        few = options.few if half in options.few_halves else 0
        for name in options.sets:
            for number, asked in enumerate(questions(name, options.data, half, options.questions)):
                found.append((number, Todo(half, name, asked, more if number < few else ways)))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def _ask(judge: Judge, rows: Rows, todo: Todo, label: Mapping[str, Any]) -> None:
    """Ask a question in the ways in which no earlier run asked it."""
    own = {**label, "half": todo.half, "set": todo.name}
    key = todo.asked.key
    known = {row["way"] for row in rows_of(rows.all, {**own, "question": key})}
    missing = [way for way in todo.ways if way.name not in known]
    if missing:
        try:
            found = list(judge.ask(todo.asked, missing))
        except PromptTooLongError as error:
            print(f"{key} is left out: {error}", file=sys.stderr)
        else:
            rows.add([{**own, **row} for row in found if row["way"] not in known])


def _tables(rows: Sequence[Row], label: Mapping[str, Any], options: argparse.Namespace) -> str:
    """Write the tables of all rows with `label` beside `--out`, as Markdown and JSON; returns
    them.
    """
    own = rows_of(rows, label)
    proposed = Way.first(options.tokens).name
    counts = [Way.first(count).name for count in sorted({options.tokens, *options.also})]
    found = {
        "ways": means(own, [FULL, WHOLE.name, EXACT.name, proposed]),
        "differences": differences(
            own,
            [(proposed, WHOLE.name), (proposed, EXACT.name), (EXACT.name, WHOLE.name)],
        ),
        "counts": means(own, [WHOLE.name, EXACT.name, *counts]),
        "differences of counts": differences(own, [(name, EXACT.name) for name in counts]),
    }
    machine = report.machine()
    about = (
        f"{options.model}, {label['dtype']}, `{options.selector}` {options.ratio:g}, "
        f"{machine['cpu']}, {options.threads} threads"
    )
    text = "\n\n".join((about, *map(written, found.values()))) + "\n"
    options.out.with_suffix(".md").write_text(text, encoding="utf-8")
    results = json.dumps({"about": about, "machine": machine, "results": found}, indent=2)
    options.out.with_suffix(".json").write_text(results + "\n", encoding="utf-8")
    return text


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = sets.parser(__doc__, "leading", 100, "half")
    parser.add_argument("--sets", nargs="+", default=["xquad", "mtrag", "needles"])
    parser.add_argument("--halves", nargs="+", default=["dev", "test"], choices=["dev", "test"])
    parser.add_argument("--tokens", type=int, default=64, help="computed in place, as proposed")
    parser.add_argument("--also", type=int, nargs="*", default=[0, 32, 128], help="other counts")
    parser.add_argument("--few", type=int, default=40, help="questions that try other counts")
    parser.add_argument("--few-halves", nargs="*", default=["dev"], choices=["dev", "test"])
    parser.add_argument("--selector", default="attention")
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--dtype", default="auto", help="of the model and its KV")
    return sets.parsed(parser, arguments)


if __name__ == "__main__":
    main()
