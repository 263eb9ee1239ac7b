"""The quality gate: the fastest setting that stays close to full recompute, for this model, corpus and machine.

It compares the next tokens under fusion with those under a full prefill, for several selectors, ratios and orders of
the passages; the same passes give the times. With questions of the user the next tokens are those of the answers by
full recompute. Without any it makes prompts from the user's own text, so it works for any model.

What looks best on the prompts that choose among many settings is partly luck. So the fastest that keeps the tolerance
is measured again, on prompts that did not choose it, and only these numbers are reported. Settings that have failed are
not measured to the end. (CacheBlend section 5.1 takes r* = 15 % from the figure of one model.) Errors of the
implementation, such as a missing rotation, show here too.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Self

import torch

from ragkv.engine import Engine
from ragkv.errors import InputError, PromptTooLongError
from ragkv.fusion import Selector, gate_result, make_selector
from ragkv.fusion.gate_result import SURE, GateResult, Point, SpeedUp, Tolerance, candidates
from ragkv.model import PromptKV, full_pass
from ragkv.runtime import cpu_features, cpu_model
from ragkv.types import Chunk

RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)  # Above half, fusing saves too little.
SELECTORS = ("none", "sensitivity", "hkvd-gradual")  # These are tried besides the config's.
CHUNKS = 5  # A prompt that is not made by retrieval has so many chunks.
NEXT_TOKENS = 16  # A prompt's question has so many tokens, and so many are compared behind it.
# At most so many prompts are made of documents; given ones are all used. Half choose, half confirm.
MOST_PROMPTS = 200
LEAST_PROMPTS = 6  # At least so many prompts choose, however long they take.
LOOK_EVERY = 20  # After so many prompts, settings that have failed are left out of the others.
CONFIRMED = 3  # At most so many settings are measured again, until one keeps the tolerance.
REPEATS = 3  # Each pass that confirms runs so often, for its time,
FEW_PROMPTS = 50  # where no more prompts than these confirm.

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt, in one or more orders of its chunks, and the text that comes next."""

    chunks: Mapping[str | None, tuple[Chunk, ...]]  # by the order's name; None: not made by retrieval
    question: tuple[int, ...]
    following: tuple[int, ...] = ()  # goes on right behind the chunks and the question; empty: the answer counts
    answered: bool = False  # whether `following` is the answer, behind the template's tail

    @classmethod
    def of(cls, chunks: Mapping[str | None, tuple[Chunk, ...]], text: Sequence[int]) -> Self:
        """The start of `text` (at least one token) is the question, and what follows in it the next tokens."""
        question = min(NEXT_TOKENS, len(text) // 2)
        return cls(chunks, tuple(text[:question]), tuple(text[question : question + NEXT_TOKENS]))


@dataclass(frozen=True, slots=True)
class GateSetting:
    """What is tried."""

    selector: Selector
    ratio: float
    order: str | None


@dataclass(frozen=True, slots=True)
class _ProbePass:
    """One prefill of a probe."""

    log_probs: torch.Tensor  # (A, V): of the next tokens
    first_token_s: float
    remaining_deviation: float | None


@dataclass(frozen=True, slots=True)
class _Measurements:
    """What was measured of one setting, one value per prompt."""

    kls: list[float] = field(default_factory=list)  # nats per token
    agreements: list[float] = field(default_factory=list)  # without the prompts where full prefill is never sure
    sure: list[int] = field(default_factory=list)  # tokens of these that were compared
    deviations: list[float] = field(default_factory=list)  # that remain per token, if entries have scores
    fused_s: list[float] = field(default_factory=list)
    full_s: list[float] = field(default_factory=list)

    def add(self, fulls: Sequence[_ProbePass], fused: Sequence[_ProbePass]) -> None:
        """Passes over one prompt."""
        expected, found = fulls[0].log_probs, fused[0].log_probs
        self.kls.append(float((expected.exp() * (expected - found)).sum(-1).mean()))
        equal = _equal(expected, found)
        if len(equal):
            self.agreements.append(float(equal.float().mean()))
            self.sure.append(len(equal))
        self.deviations.extend(one for one in (fused[0].remaining_deviation,) if one is not None)
        self.fused_s.append(statistics.median(one.first_token_s for one in fused))
        self.full_s.append(statistics.median(one.first_token_s for one in fulls))

    def fails(self, tolerance: Tolerance) -> bool:
        """Whether even the better 95 % bounds are not within `tolerance`."""
        best = statistics.fmean(self.agreements) + _margin(self.agreements) if self.agreements else 1.0
        return best < tolerance.agreement or statistics.fmean(self.kls) - _margin(self.kls) > tolerance.kl

    def point(self, setting: GateSetting) -> Point:
        """Means and one-sided 95 % bounds."""
        # A few prompts without any difference do not prove that there is none: the bound counts one more prompt, in
        # which one token differs.
        doubted = [*self.agreements, 1.0 - 1.0 / statistics.fmean(self.sure)] if self.sure else [0.0]
        return Point(
            selector=setting.selector.name,
            ratio=setting.ratio,
            order=setting.order,
            kl=statistics.fmean(self.kls),
            kl_bound=statistics.fmean(self.kls) + _margin(self.kls),
            agreement=statistics.fmean(self.agreements) if self.agreements else 0.0,
            agreement_bound=statistics.fmean(doubted) - _margin(doubted),
            remaining_deviation=max(self.deviations, default=None),
            speed=SpeedUp.of(self.fused_s, self.full_s),
            prompts=len(self.kls),
        )


def gate(
    engine: Engine,
    chunks: Sequence[Chunk | str | Sequence[int]] = (),
    *,
    probes: Sequence[Probe] = (),
    source: str = "retrieved passages",
    selectors: Sequence[str | Selector] = (),
    ratios: Sequence[float] = RATIOS,
    tolerance: Tolerance | None = None,
    limit_s: float | None = None,
    on_progress: OnProgress | None = None,
) -> GateResult:
    """The fastest setting of `engine` that keeps `tolerance`, over `probes`, else over prompts of consecutive `chunks`.

    `source` says in the result what `probes` were made of. Without `selectors` they are the config's, and `SELECTORS`
    as far as chunks have the scores they need. After `limit_s` it goes on with the prompts it has measured by then.
    `on_progress(done, total)` is called after each prompt. Prompts that are longer than the model's context are left
    out and counted. Raises `InputError` without any text (fewer than three chunks), and if the prompts that fit are
    fewer than six.
    """
    began = time.monotonic()
    if not probes:
        probes, source = spread(_windows([_chunk(engine, one) for one in chunks])), "consecutive chunks"
    if not probes:
        raise InputError("The gate has no text: give at least three chunks, or ingest documents with as many passages.")
    fitting = _fitting(engine, probes)
    left_out = len(probes) - len(fitting)
    settings = _settings(engine, fitting, selectors, ratios)
    random.Random(0).shuffle(fitting)  # the same every time: neighbours in a corpus choose and confirm
    choosing, confirming = fitting[::2], fitting[1::2] or fitting
    bench = _Bench(engine, len(choosing) + len(confirming), on_progress or (lambda _, __: None))
    tolerance = tolerance or Tolerance()
    until_s = None if limit_s is None else began + 0.7 * limit_s
    confirmations: list[Point] = []
    points = bench.measure(choosing, settings, until_s, tolerance=tolerance)
    by_setting = {(one.selector.name, one.ratio, one.order): one for one in settings}
    for found in candidates(points, tolerance)[:CONFIRMED]:
        until_s = None if limit_s is None else max(began + limit_s, time.monotonic() + 0.1 * limit_s)
        repeats = REPEATS if len(confirming) <= FEW_PROMPTS else 1
        confirmations += bench.measure(confirming, [by_setting[found.is_setting_of]], until_s, repeats)
        if confirmations[-1].keeps(tolerance):
            break
    return GateResult(tolerance, tuple(points), tuple(confirmations), source, bench.tokens, _machine(engine), left_out)


def save(engine: Engine, result: GateResult) -> Path | None:
    """Apply `result` to `engine` from now on, and save it for later engines like it on the same store directory.

    Returns the file, or `None` if the engine has no directory.
    """
    engine.intake.apply_gate_result(result)
    directory, measured_as = engine.config.store.directory, engine.entries.encoder.measured_as
    return None if directory is None else gate_result.save(result, directory, measured_as, engine.config.fusion)


class _Bench:
    """Passes over probes, and how many are done."""

    def __init__(self, engine: Engine, prompts: int, on_progress: OnProgress) -> None:
        self._engine, self._prompts, self._on_progress = engine, prompts, on_progress
        self._done = self.tokens = 0

    def measure(
        self,
        probes: Sequence[Probe],
        settings: Sequence[GateSetting],
        until_s: float | None,
        repeats: int = 1,
        tolerance: Tolerance | None = None,
    ) -> list[Point]:
        """All settings on each probe. Passes of full recompute stand before, between and behind those of settings.

        With `tolerance` a setting that has failed it is left out of further probes.
        """
        found, left = [_Measurements() for _ in settings], list(range(len(settings)))
        for number, probe in enumerate(probes):
            if until_s is not None and number >= LEAST_PROMPTS and time.monotonic() > until_s:
                break
            if tolerance is not None and number and number % LOOK_EVERY == 0:
                left = _not_failed(left, settings, found, tolerance)
            if not left:
                break
            for order, chunks in probe.chunks.items():
                mine = [index for index in left if settings[index].order == order]
                if mine:
                    self._measure(probe, chunks, settings, found, _rotated(mine, number), repeats)
            self._done = min(self._done + 1, self._prompts)
            self._on_progress(self._done, self._prompts)
        return [one.point(setting) for one, setting in zip(found, settings, strict=True)]

    def _measure(
        self,
        probe: Probe,
        chunks: tuple[Chunk, ...],
        settings: Sequence[GateSetting],
        found: Sequence[_Measurements],
        mine: Sequence[int],
        repeats: int,
    ) -> None:
        engine = self._engine
        engine.warm(chunks)
        if not probe.following:
            answer = engine.answer(probe.question, chunks, reuse="none", max_new_tokens=NEXT_TOKENS)
            probe = replace(probe, following=answer.token_ids, answered=True)
        elif not self._done:
            _next_tokens(engine, probe, chunks, None)  # the first prefill of a process is slower than all later ones
        fulls = [_next_tokens(engine, probe, chunks, None)]
        self.tokens += len(fulls[0].log_probs)
        fused: dict[int, list[_ProbePass]] = {index: [] for index in mine}
        for _ in range(repeats):
            for place, index in enumerate(mine, 1):
                fused[index].append(_next_tokens(engine, probe, chunks, settings[index]))
                if place == len(mine) or (place == len(mine) // 2 and len(mine) > 6):
                    fulls.append(_next_tokens(engine, probe, chunks, None))
        for index in mine:
            found[index].add(fulls, fused[index])


def _settings(
    engine: Engine, probes: Sequence[Probe], selectors: Sequence[str | Selector], ratios: Sequence[float]
) -> list[GateSetting]:
    """Every selector at every ratio in every order that all probes have."""
    encoder = engine.entries.encoder
    chosen = {one.name: one for one in map(make_selector, selectors)}
    if not chosen:
        names = dict.fromkeys((engine.intake.method({}).selector.name, *SELECTORS))
        made = [make_selector(name) for name in names if name != "all"]
        chosen = {one.name: one for one in made if not one.needs_scores or encoder.makes_scores}
    if any(one.needs_scores for one in chosen.values()):
        encoder.make_scores()
    orders = [order for order in probes[0].chunks if all(order in probe.chunks for probe in probes)]
    if not orders:
        raise InputError("The gate's prompts have no order of their chunks in common, so no setting fits them all.")
    return [
        GateSetting(selector, ratio, order)
        for order in orders
        for selector in chosen.values()
        for ratio in (sorted(set(ratios)) if selector.uses_ratio else (0.0,))
    ]


def _not_failed(
    left: Sequence[int], settings: Sequence[GateSetting], found: Sequence[_Measurements], tolerance: Tolerance
) -> list[int]:
    """Those of `left` that have not failed, nor a higher ratio of their selector and order (`candidates`)."""
    highest: dict[tuple[str, str | None], float] = {}  # the highest ratio that failed
    for index in left:
        setting, kind = settings[index], (settings[index].selector.name, settings[index].order)
        if found[index].fails(tolerance):
            highest[kind] = max(setting.ratio, highest.get(kind, 0.0))
    return [
        index
        for index in left
        if settings[index].ratio > highest.get((settings[index].selector.name, settings[index].order), -1.0)
    ]


def _fitting(engine: Engine, probes: Sequence[Probe]) -> list[Probe]:
    """The probes that fit the model's context with the tokens compared behind them.

    Raises `PromptTooLongError` if some do not, and the others are fewer than `LEAST_PROMPTS`.
    """
    context, runs = engine.model.adapter.context_length, engine.intake.runs
    others = len(runs.before_documents) + len(runs.after_question) + NEXT_TOKENS
    separator = len(engine.intake.separator)

    def length(probe: Probe) -> int:
        longest = max(sum(len(chunk) + separator for chunk in chunks) for chunks in probe.chunks.values())
        return others + max(1, len(probe.question)) + longest

    fitting = [probe for probe in probes if context is None or length(probe) <= context]
    if len(fitting) < min(LEAST_PROMPTS, len(probes)):
        raise PromptTooLongError(
            f"{len(probes) - len(fitting)} of the gate's {len(probes)} prompts are longer than the model's context of "
            f"{context} tokens, and the others are too few to measure. Use fewer (-k) or shorter passages."
        )
    return fitting


def _chunk(engine: Engine, content: Chunk | str | Sequence[int]) -> Chunk:
    return content if isinstance(content, Chunk) else engine.chunk(content)


def _windows(chunks: Sequence[Chunk]) -> Iterator[Probe]:
    """Prompts of consecutive chunks; the next chunk starts with question and next tokens. Wraps at the end."""
    size = min(CHUNKS, len(chunks) - 1)
    if size < 2:
        return
    for start in range(len(chunks)):
        window = [chunks[(start + place) % len(chunks)] for place in range(size + 1)]
        yield Probe.of({None: tuple(window[:-1])}, window[-1].token_ids)


def spread(probes: Iterable[Probe]) -> list[Probe]:
    """At most `MOST_PROMPTS` of the probes, evenly spread."""
    found = list(probes)
    step = max(1.0, len(found) / MOST_PROMPTS)
    return [found[int(number * step)] for number in range(min(MOST_PROMPTS, len(found)))]


def _rotated(values: Sequence[int], by: int) -> list[int]:
    """So that no setting is always measured right behind a full prefill."""
    by %= max(1, len(values))
    return [*values[by:], *values[:by]]


@torch.no_grad()
def _next_tokens(engine: Engine, probe: Probe, chunks: tuple[Chunk, ...], setting: GateSetting | None) -> _ProbePass:
    """A prefill with `setting`, `None` for full recompute, and what it expects behind each token of the text."""
    question: tuple[int, ...] = probe.question or probe.following[:1]
    reuse: Literal["fused", "none"] = "none" if setting is None else "fused"
    prefill = engine.prefill(
        question,
        chunks,
        ratio=0.0 if setting is None else setting.ratio,
        selector="none" if setting is None else setting.selector,
        reuse=reuse,
    )
    kv: PromptKV = prefill.fused.kv
    adapter = engine.model.adapter
    if probe.answered:
        text, logits = probe.following, [prefill.logits[None]]
    else:  # the template's tail is left out: the text goes on right behind the chunks
        kv.length = len(prefill.token_ids) - len(question) - len(engine.intake.runs.after_question)
        text, logits = probe.question + probe.following, []
    if text:
        kv.reserve(kv.length + len(text))
        hidden = full_pass(adapter, torch.tensor(text, device=adapter.device), kv, start=kv.length)
        logits.append(adapter.logits(hidden).cpu())
    log_probs = torch.cat(logits).log_softmax(-1)
    return _ProbePass(log_probs, prefill.timing.first_token_s, prefill.fused.remaining_deviation)


def _equal(full: torch.Tensor, fused: torch.Tensor) -> torch.Tensor:
    """Which predictions are equal, of the tokens (A, V) of which full prefill is sure: bool."""
    best = full.topk(2, dim=-1)
    sure = best.values[:, 0] - best.values[:, 1] >= SURE
    return fused.argmax(-1)[sure] == best.indices[sure, 0]


def _margin(values: list[float]) -> float:
    """Half the one-sided 95 % interval of a mean."""
    return 1.645 * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def _machine(engine: Engine) -> str:
    """The machine's kind, on which the times were measured."""
    adapter = engine.model.adapter
    where = (
        torch.cuda.get_device_name(adapter.device)
        if adapter.device.type == "cuda"
        else f"{cpu_model()} ({', '.join(cpu_features()) or 'no known extensions'})"
    )
    return f"{where}, {torch.get_num_threads()} threads, {engine.model.identity.dtype}"
