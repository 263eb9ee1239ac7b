"""The quality gate: is fusion good enough on this model and these documents, and from which recompute ratio on?

No questions or answers are needed, so any model can be asked: over prompts made of the user's own chunks and of a small
text of ours, the next tokens under fusion are compared with those under a full prefill, over a sweep of ratios. The
least ratio from which on even the 95 % bounds keep the tolerance is r* (CacheBlend section 5.1 takes r* = 15 % from one
model's figure). What full prefill cannot notice, such as a rotation left out, shows here.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
MAX_CONTEXTS = 24  # of the user's chunks
SURE = math.log(2)  # full prefill is sure of a token that is twice as likely as the next best


@dataclass(frozen=True, slots=True)
class _Probe:
    """A prompt and the text that comes next."""

    chunks: tuple[Chunk, ...]
    following: tuple[int, ...]


def gate(
    engine: Engine,
    chunks: Sequence[Chunk | str | Sequence[int]] = (),
    *,
    selector: str | Selector | None = None,
    tolerance: Tolerance | None = None,
    ratios: Sequence[float] = RATIOS,
    on_progress: Callable[[int, int], None] | None = None,
) -> GateResult:
    """The verdict on `engine`, over prompts of `chunks` and, if it has a tokenizer, of built-in text.

    `selector` left out is the config's. `on_progress(done, total)` is called after each prompt. Raises `InputError` if
    there is nothing to ask: no tokenizer and fewer than three chunks.
    """
    chosen = make_selector(engine.config.fusion.selector if selector is None else selector)
    probes = list(_probes(engine, chunks))
    if not probes:
        raise InputError("The gate has no text: give at least three chunks, or an engine with a tokenizer.")
    kls: dict[float, list[float]] = {ratio: [] for ratio in sorted(ratios)}
    agreements: dict[float, list[float]] = {ratio: [] for ratio in sorted(ratios)}
    lefts: dict[float, list[float]] = {ratio: [] for ratio in sorted(ratios)}
    for done, probe in enumerate(probes, 1):
        engine.warm(probe.chunks)
        wanted = _next_tokens(engine, probe, "none", 0.0, full=True)[0]
        for ratio in kls:
            got, left = _next_tokens(engine, probe, chosen, ratio)
            kls[ratio].append(float((wanted.exp() * (wanted - got)).sum(-1).mean()))
            agreements[ratio] += _agreement(wanted, got)
            lefts[ratio] += [] if left is None else [left]
        if on_progress:
            on_progress(done, len(probes))
    points = tuple(_point(ratio, kls[ratio], agreements[ratio], lefts[ratio]) for ratio in kls)
    tokens = sum(len(probe.following) for probe in probes)
    return GateResult(chosen.name, tolerance or Tolerance(), points, len(probes), tokens)


def save(engine: Engine, verdict: GateResult) -> Path | None:
    """Let `engine` go by `verdict` from now on, and every later engine like it on the same store directory.

    The verdict's file, or `None` if the engine has no directory.
    """
    engine.parts.intake.apply_gate_result(verdict)
    directory = engine.config.store.directory
    return None if directory is None else gate_result.save(verdict, directory, engine.parts.encoder.identity)


def _probes(engine: Engine, chunks: Sequence[Chunk | str | Sequence[int]]) -> Iterator[_Probe]:
    own = [chunk if isinstance(chunk, Chunk) else engine.chunk(chunk) for chunk in chunks]
    yield from _windows(own, MAX_CONTEXTS)
    if engine.tokenizer is not None:
        yield from _windows([engine.chunk(text) for text in PASSAGES], len(PASSAGES))


def _windows(chunks: Sequence[Chunk], most: int) -> Iterator[_Probe]:
    """Prompts of consecutive chunks, the one after them to be foretold; spread evenly, around the end."""
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
    """Log-probabilities (A, V) behind each token of the probe's following text, and the deviation left."""
    prefill = engine.prefill(
        probe.following[:1], probe.chunks, ratio=ratio, selector=selector, reuse="none" if full else "fused"
    )
    kv: PromptKV = prefill.fused.kv
    kv.length = len(prefill.token_ids) - 1 - len(engine.parts.runs.after_question)  # the chunks' end
    kv.reserve(kv.length + len(probe.following))
    adapter = engine.parts.adapter
    following = torch.tensor(probe.following, device=adapter.device)
    logits = adapter.logits(full_pass(adapter, following, kv, start=kv.length))
    return logits.log_softmax(-1).cpu(), prefill.fused.remaining_deviation


def _agreement(wanted: torch.Tensor, got: torch.Tensor) -> list[float]:
    """Share of the tokens (A, V) foretold alike, of those of which full prefill is sure; empty if of none."""
    best = wanted.topk(2, dim=-1)
    sure = best.values[:, 0] - best.values[:, 1] >= SURE
    alike = got.argmax(-1)[sure] == best.indices[sure, 0]
    return [float(alike.float().mean())] if bool(sure.any()) else []


def _point(ratio: float, kls: list[float], agreements: list[float], lefts: list[float]) -> Point:
    return Point(
        ratio,
        statistics.fmean(kls),
        statistics.fmean(kls) + _margin(kls),
        statistics.fmean(agreements) if agreements else 1.0,
        statistics.fmean(agreements) - _margin(agreements) if agreements else 1.0,
        max(lefts) if lefts else None,
    )


def _margin(values: list[float]) -> float:
    """Half the one-sided 95 % interval of a mean."""
    return 1.645 * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
