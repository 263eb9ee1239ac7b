"""The quality gate: is fusion good enough on this model and these documents, and from which recompute ratio on?

It needs no questions and no answers, so it works for any model. It makes prompts from the user's own chunks and from
built-in text, and compares the next tokens under fusion with those under a full prefill, at several ratios. r* is the
lowest ratio from which on even the 95 % bounds keep the tolerance. (CacheBlend section 5.1 takes r* = 15 % from the
figure of one model.) Errors of the implementation, such as a missing rotation, show here too.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ragkv.engine import Engine
from ragkv.errors import InputError
from ragkv.fusion import Selector, gate_result, make_selector
from ragkv.fusion.gate_result import GateResult, Point, Tolerance
from ragkv.model import PromptKV, full_pass
from ragkv.types import Chunk

from .gate_corpus import PASSAGES

RATIOS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
CHUNKS = 5  # of a prompt
NEXT_TOKENS = 16  # compared behind each prompt
MAX_CONTEXTS = 24  # prompts made of the user's chunks
SURE = math.log(2)  # full prefill is sure of a token that is twice as likely as the second best


@dataclass(frozen=True, slots=True)
class _Probe:
    """A prompt and the text that comes next."""

    chunks: tuple[Chunk, ...]
    following: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Measurements:
    """What was measured at one ratio, one value per prompt."""

    kls: list[float] = field(default_factory=list)  # nats per token
    agreements: list[float] = field(default_factory=list)  # without the prompts where full prefill is never sure
    deviations: list[float] = field(default_factory=list)  # that remain per token, if entries have scores

    def point(self, ratio: float) -> Point:
        """Means and one-sided 95 % bounds."""
        agreement = statistics.fmean(self.agreements) if self.agreements else 1.0
        return Point(
            ratio=ratio,
            kl=statistics.fmean(self.kls),
            kl_bound=statistics.fmean(self.kls) + _margin(self.kls),
            agreement=agreement,
            agreement_bound=agreement - _margin(self.agreements),
            remaining_deviation=max(self.deviations, default=None),
        )


def gate(
    engine: Engine,
    chunks: Sequence[Chunk | str | Sequence[int]] = (),
    *,
    selector: str | Selector | None = None,
    tolerance: Tolerance | None = None,
    ratios: Sequence[float] = RATIOS,
    on_progress: Callable[[int, int], None] | None = None,
) -> GateResult:
    """The gate result of `engine`, over prompts of `chunks` and, if it has a tokenizer, of built-in text.

    Without a `selector` it is the config's. `on_progress(done, total)` is called after each prompt. Raises `InputError`
    without any text: no tokenizer and fewer than three chunks.
    """
    chosen = make_selector(engine.config.fusion.selector if selector is None else selector)
    if chosen.needs_scores:
        engine.parts.encoder.make_scores()
    probes = list(_probes(engine, chunks))
    if not probes:
        raise InputError("The gate has no text: give at least three chunks, or an engine with a tokenizer.")
    measured = {ratio: _Measurements() for ratio in sorted(ratios)}
    for done, probe in enumerate(probes, 1):
        engine.warm(probe.chunks)
        full, _ = _next_tokens(engine, probe, "none", 0.0, full=True)
        for ratio, found in measured.items():
            fused, deviation = _next_tokens(engine, probe, chosen, ratio)
            found.kls.append(float((full.exp() * (full - fused)).sum(-1).mean()))
            found.agreements.extend(_agreement(full, fused))
            found.deviations.extend([] if deviation is None else [deviation])
        if on_progress:
            on_progress(done, len(probes))
    points = tuple(found.point(ratio) for ratio, found in measured.items())
    tokens = sum(len(probe.following) for probe in probes)
    return GateResult(chosen.name, tolerance or Tolerance(), points, len(probes), tokens)


def save(engine: Engine, result: GateResult) -> Path | None:
    """Apply `result` to `engine` from now on, and save it for later engines like it on the same store directory.

    Returns the file, or `None` if the engine has no directory.
    """
    engine.parts.intake.apply_gate_result(result)
    directory = engine.config.store.directory
    return None if directory is None else gate_result.save(result, directory, engine.parts.encoder.measured_as)


def _probes(engine: Engine, chunks: Sequence[Chunk | str | Sequence[int]]) -> Iterator[_Probe]:
    own = [chunk if isinstance(chunk, Chunk) else engine.chunk(chunk) for chunk in chunks]
    yield from _windows(own, MAX_CONTEXTS)
    if engine.tokenizer is not None:
        yield from _windows([engine.chunk(text) for text in PASSAGES], len(PASSAGES))


def _windows(chunks: Sequence[Chunk], most: int) -> Iterator[_Probe]:
    """Prompts of consecutive chunks; the chunk after them is to be predicted. Evenly spread, wrapping at the end."""
    size = min(CHUNKS, len(chunks) - 1)
    if size < 2:
        return
    step = max(1, len(chunks) // most)
    for start in range(0, len(chunks), step):
        window = [chunks[(start + place) % len(chunks)] for place in range(size + 1)]
        yield _Probe(tuple(window[:-1]), window[-1].token_ids[:NEXT_TOKENS])


@torch.no_grad()
def _next_tokens(
    engine: Engine, probe: _Probe, selector: str | Selector, ratio: float, full: bool = False
) -> tuple[torch.Tensor, float | None]:
    """Log-probabilities (A, V) behind each token of the probe's following text, and the remaining deviation."""
    prefill = engine.prefill(
        probe.following[:1], probe.chunks, ratio=ratio, selector=selector, reuse="none" if full else "fused"
    )
    kv: PromptKV = prefill.fused.kv
    kv.length = len(prefill.token_ids) - 1 - len(engine.parts.runs.after_question)  # the end of the chunks
    kv.reserve(kv.length + len(probe.following))
    adapter = engine.parts.adapter
    following = torch.tensor(probe.following, device=adapter.device)
    logits = adapter.logits(full_pass(adapter, following, kv, start=kv.length))
    return logits.log_softmax(-1).cpu(), prefill.fused.remaining_deviation


def _agreement(full: torch.Tensor, fused: torch.Tensor) -> list[float]:
    """The share of equal predictions, among the tokens (A, V) of which full prefill is sure; empty without any."""
    best = full.topk(2, dim=-1)
    sure = best.values[:, 0] - best.values[:, 1] >= SURE
    equal = fused.argmax(-1)[sure] == best.indices[sure, 0]
    return [float(equal.float().mean())] if bool(sure.any()) else []


def _margin(values: list[float]) -> float:
    """Half the one-sided 95 % interval of a mean."""
    return 1.645 * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
