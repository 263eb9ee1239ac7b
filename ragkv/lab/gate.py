"""The quality gate: the fastest setting that stays close to full recompute, for this model, corpus
and machine.

For several selectors and ratios, the gate compares the next tokens under fusion with those under a
full prefill. The same passes give the times. If the user gives questions, the next tokens are those
of the answers by full recompute. Without questions, prompts are made of the user's own text
(`gate_prompts.py`), so the gate works for any model.

The best of many settings is partly the best by luck. So the fastest setting within the tolerance is
measured again, on prompts that did not choose it. Only these numbers are reported. (CacheBlend
section 5.1 takes r* = 15 % from the figure of one model.) Errors of the implementation, such as a
missing rotation, show here too.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

import torch

from ragkv.control import gate_result
from ragkv.control.gate_result import GateResult, Point, Tolerance, candidates
from ragkv.engine import Engine
from ragkv.errors import InputError, PromptTooLongError
from ragkv.fusion import Selector, make_selector
from ragkv.model import full_pass, grown
from ragkv.runtime import cpu_features, cpu_model
from ragkv.types import Chunk

RATIOS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)  # Above half, fusing saves too little.
# These are tried besides the config's.
SELECTORS = ("attention", "hkvd", "hkvd-gradual")
NEXT_TOKENS = 16  # tokens of a prompt's question, and as many are compared after it
LEAST_PROMPTS = 6  # that choose, however long they take
CONFIRMED = 3  # settings that are measured again at most, until one keeps the tolerance
# A full recompute is sure of a token whose logit is `SURE` above the next: twice as likely.
SURE = math.log(2)


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt, and the text that comes next."""

    chunks: tuple[Chunk, ...]
    question: tuple[int, ...]
    # goes on right behind the chunks and the question; empty: the answer counts
    following: tuple[int, ...] = ()

    @classmethod
    def of(cls, chunks: Sequence[Chunk], text: Sequence[int]) -> Self:
        """The start of `text` (at least one token) is the question, and what follows in it the next
        tokens.
        """
        question = min(NEXT_TOKENS, len(text) // 2)
        return cls(
            tuple(chunks), tuple(text[:question]), tuple(text[question : question + NEXT_TOKENS])
        )


class GateSetting(NamedTuple):
    """What is tried."""

    selector: Selector
    ratio: float


class _ProbePass(NamedTuple):
    """One prefill of a probe."""

    log_probs: torch.Tensor  # (A, V): of the next tokens
    first_token_s: float


@dataclass(frozen=True, slots=True)
class _Measurements:
    """What was measured of one setting, one value per prompt."""

    kls: list[float] = field(default_factory=list)  # nats per token
    # without the prompts where full prefill is never sure
    agreements: list[float] = field(default_factory=list)
    sure: list[int] = field(default_factory=list)  # tokens of these that were compared
    fused_s: list[float] = field(default_factory=list)
    full_s: list[float] = field(default_factory=list)

    def add(self, full: _ProbePass, fused: _ProbePass) -> None:
        """Passes over one prompt."""
        self.kls.append(
            float((full.log_probs.exp() * (full.log_probs - fused.log_probs)).sum(-1).mean())
        )
        equal = _equal(full.log_probs, fused.log_probs)
        if len(equal):
            self.agreements.append(float(equal.float().mean()))
            self.sure.append(len(equal))
        self.fused_s.append(fused.first_token_s)
        self.full_s.append(full.first_token_s)

    def point(self, setting: GateSetting) -> Point:
        """Means and one-sided 95 % bounds, and medians of times."""
        # A few prompts without any difference do not prove that there is none: the bound counts one
        # more prompt, in which one token differs.
        doubted = (
            [*self.agreements, 1.0 - 1.0 / statistics.fmean(self.sure)] if self.sure else [0.0]
        )
        return Point(
            selector=setting.selector.name,
            ratio=setting.ratio,
            kl=statistics.fmean(self.kls),
            kl_bound=statistics.fmean(self.kls) + _margin(self.kls),
            agreement=statistics.fmean(self.agreements) if self.agreements else 0.0,
            agreement_bound=statistics.fmean(doubted) - _margin(doubted),
            sooner=statistics.median(
                full / fused for full, fused in zip(self.full_s, self.fused_s, strict=True)
            ),
            fused_s=statistics.median(self.fused_s),
            full_s=statistics.median(self.full_s),
            prompts=len(self.kls),
        )


def gate(
    engine: Engine,
    probes: Sequence[Probe],
    *,
    source: str = "retrieved passages",
    selectors: Sequence[str | Selector] = (),
    ratios: Sequence[float] = RATIOS,
    tolerance: Tolerance | None = None,
    limit_s: float = math.inf,
    on_progress: Callable[[int, int], None] | None = None,
) -> GateResult:
    """The fastest setting of `engine` that keeps `tolerance` over `probes`: half of them choose,
    half confirm.

    `source` says in the result what the probes were made of. Without `selectors`, the
    config's is tried and those of `SELECTORS`. After `limit_s` the gate goes on with the prompts
    that it has measured by then. `on_progress(done, total)` is called after each prompt. Prompts
    that are longer than the model's context are left out and counted. Raises `InputError` without
    probes, and `PromptTooLongError` if fewer than six fit.
    """
    began = time.monotonic()
    tolerance = tolerance or Tolerance()
    if not probes:
        raise InputError(
            "The gate has no prompts: it needs documents with at least three passages, and "
            "questions that find two."
        )
    fitting = _fitting(engine, probes)
    settings = _settings(engine, selectors, ratios)
    # the same every time: neighbours in a corpus choose and confirm
    random.Random(0).shuffle(fitting)
    choosing = fitting[::2]
    confirming = fitting[1::2] or fitting
    done = 0

    def on_probe() -> None:
        nonlocal done
        done += 1
        if on_progress is not None:
            on_progress(min(done, len(fitting)), len(fitting))

    points = _measured(engine, choosing, settings, began + 0.7 * limit_s, on_probe)
    confirmations: list[Point] = []
    by_words = {point.setting: setting for point, setting in zip(points, settings, strict=True)}
    faster = [point for point in candidates(points, tolerance) if point.sooner > 1.0]
    for found in faster[:CONFIRMED]:
        until_s = max(began + limit_s, time.monotonic() + 0.1 * limit_s)
        confirmations += _measured(engine, confirming, [by_words[found.setting]], until_s, on_probe)
        if confirmations[-1].keeps(tolerance):
            break
    left_out = len(probes) - len(fitting)
    return GateResult(
        tolerance, tuple(points), tuple(confirmations), source, _machine(engine), left_out
    )


def save(engine: Engine, result: GateResult) -> Path | None:
    """Apply `result` to `engine` from now on, and save it for later engines like it on the same
    store directory.

    Returns the file, or `None` if the engine has no directory.
    """
    engine.parts.controller.methods.gate_result = result
    directory = engine.config.store.directory
    measured_as = engine.entries.identity
    return (
        None
        if directory is None
        else gate_result.save(result, directory, measured_as, engine.config.fusion)
    )


def _measured(
    engine: Engine,
    probes: Sequence[Probe],
    settings: Sequence[GateSetting],
    until_s: float,
    on_probe: Callable[[], None],
) -> list[Point]:
    """All settings on each probe, between two passes of full recompute, whose mean time counts."""
    found = [_Measurements() for _ in settings]
    for number, probe in enumerate(probes):
        if number >= LEAST_PROMPTS and time.monotonic() > until_s:
            break
        engine.entries.encode(probe.chunks)
        # The first chunk gets its exact KV:
        engine.prefill(probe.question or (0,), probe.chunks, ratio=0.0)
        engine.flush()  # the first setting would not find it, and the others would.
        text = probe.following
        if not text:
            text = engine.answer(
                probe.question, probe.chunks, reuse="none", max_new_tokens=NEXT_TOKENS
            ).token_ids
        before = _next_tokens(engine, probe, text, None)
        # rotated, so that no setting is always measured right behind a full prefill
        at = number % len(settings)
        fused = {
            index: _next_tokens(engine, probe, text, settings[index])
            for index in range(-at, len(settings) - at)
        }
        after_s = _next_tokens(engine, probe, text, None).first_token_s
        full = before._replace(first_token_s=(before.first_token_s + after_s) / 2)
        for index, one in fused.items():
            found[index].add(full, one)
        on_probe()
    return [one.point(setting) for one, setting in zip(found, settings, strict=True)]


def _settings(
    engine: Engine, selectors: Sequence[str | Selector], ratios: Sequence[float]
) -> list[GateSetting]:
    """Every selector at every ratio; ratio 0, at which they choose alike, only with the first."""
    tried = selectors or (engine.method().selector.name, *SELECTORS)
    first, *others = {one.name: one for one in map(make_selector, tried)}.values()
    ascending = sorted(set(ratios))
    return [
        *(GateSetting(first, ratio) for ratio in ascending),
        *(GateSetting(one, ratio) for one in others for ratio in ascending if ratio),
    ]


def _fitting(engine: Engine, probes: Sequence[Probe]) -> list[Probe]:
    """The probes that fit the model's context with the tokens compared behind them.

    Raises `PromptTooLongError` if some do not, and the others are fewer than `LEAST_PROMPTS`.
    """
    context = engine.model.adapter.context_length
    runs = engine.parts.intake.runs
    others = len(runs.before_documents) + len(runs.after_question) + NEXT_TOKENS
    separator = len(engine.parts.intake.separator)

    def length(probe: Probe) -> int:
        return (
            others
            + max(1, len(probe.question))
            + sum(len(chunk) + separator for chunk in probe.chunks)
        )

    fitting = [probe for probe in probes if context is None or length(probe) <= context]
    if len(fitting) < min(LEAST_PROMPTS, len(probes)):
        raise PromptTooLongError(
            f"{len(probes) - len(fitting)} of the gate's {len(probes)} prompts are longer than "
            "the model's context of "
            f"{context} tokens, and the others are too few to measure. Use fewer (-k) or shorter "
            "passages."
        )
    return fitting


@torch.no_grad()
def _next_tokens(
    engine: Engine, probe: Probe, text: tuple[int, ...], setting: GateSetting | None
) -> _ProbePass:
    """A prefill with `setting`, `None` for full recompute, and what it expects of each token of
    `text`.
    """
    question = probe.question or text[:1]
    if setting is None:
        prefill = engine.prefill(question, probe.chunks, reuse="none")
    else:
        prefill = engine.prefill(
            question, probe.chunks, ratio=setting.ratio, selector=setting.selector
        )
    kv = prefill.kv
    adapter = engine.model.adapter
    logits = list[torch.Tensor]()
    if probe.following:  # the template's tail is left out: the text goes on right behind the chunks
        kv.length = (
            len(prefill.token_ids) - len(question) - len(engine.parts.intake.runs.after_question)
        )
        text = probe.question + text
    else:
        logits = [prefill.logits[None]]
    if text:
        kv = grown(kv, len(text))
        hidden = full_pass(adapter, torch.tensor(text, device=adapter.device), kv, start=kv.length)
        logits.append(adapter.logits(hidden).cpu())
    log_probs = torch.cat(logits).log_softmax(-1)
    return _ProbePass(log_probs, prefill.timing.first_token_s)


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
    device = engine.model.adapter.device
    cpu = f"{cpu_model()} ({', '.join(cpu_features()) or 'no known extensions'})"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    return f"{where}, {torch.get_num_threads()} threads, {engine.model.identity.dtype}"
