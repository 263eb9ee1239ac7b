"""The engine's values as the service's: sources, citations, spans, reuse, timing."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ragkv.engine import EngineStats
from ragkv.inference import cite
from ragkv.retrieval import Hit
from ragkv.types import Chunk, PromptSpan
from ragkv.types import Reuse as EngineReuse
from ragkv.types import Timing as EngineTiming

from .schemas import Citation, QueueInfo, Reuse, Source, Span, TierInfo, Timing


def source_of(number: int, hit: Hit) -> Source:
    """A passage as the service's callers see it."""
    passage = hit.passage
    title = passage.metadata.get("title")
    start, end = passage.span
    return Source(
        number=number,
        document_id=passage.document_id,
        source=passage.source,
        title=title if isinstance(title, str) else None,
        text=passage.text,
        start=start,
        end=end,
        score=float(hit.score),
    )


def citations_of(answer: str, sources: Sequence[Source]) -> list[Citation]:
    """Where the sources say what `answer` says; numbers of sources that are not there are passed over."""
    chunks = [Chunk((), source.text) for source in sources]
    said = answer.strip()
    begin = answer.find(said) if said else None
    found = []
    for one in cite(answer, chunks):
        source = sources[one.chunk]
        marker = f"[{one.chunk + 1}]"
        start = answer.find(marker) if marker in answer else begin
        length = len(marker) if marker in answer else len(said)
        found.append(
            Citation(
                number=source.number,
                document_id=source.document_id,
                start=one.start,
                end=one.end,
                answer_start=start,
                answer_end=None if start is None else start + length,
            )
        )
    return found


def reuse_of(reuse: EngineReuse) -> Reuse:
    """`Reuse`, with its sum."""
    return Reuse(**_plain(reuse), tokens=reuse.tokens)


def timing_of(timing: EngineTiming) -> Timing:
    """`Timing`."""
    return Timing(**_plain(timing))


def spans_of(spans: Sequence[PromptSpan], numbers: Sequence[int | None]) -> list[Span]:
    """The prompt's spans; `numbers` are the sources that the request's chunks are."""
    return [
        Span(
            kind=span.kind,  # type: ignore[arg-type]
            start=span.start,
            tokens=span.tokens,
            state=span.state,  # type: ignore[arg-type]
            recomputed=span.recomputed,
            recomputed_at=list(span.recomputed_at),
            number=None if span.chunk is None or span.chunk >= len(numbers) else numbers[span.chunk],
        )
        for span in spans
    ]


def tiers_of(stats: EngineStats) -> list[TierInfo]:
    """The store's tiers, fastest first."""
    names = [name for name in TierInfo.model_fields if name != "tier"]
    return [
        TierInfo(tier=tier.kind.value, **{name: getattr(tier, name) for name in names}) for tier in stats.store.tiers
    ]


def queue_of(stats: EngineStats) -> QueueInfo:
    """The queue before the model."""
    return QueueInfo(**dataclasses.asdict(stats.queue))


def _plain(value: Any) -> dict[str, Any]:
    """A dataclass in JSON's types: `bytes_by_tier` has its tiers' names."""
    found = dataclasses.asdict(value)
    return {name: list(item) if isinstance(item, tuple) else item for name, item in found.items()}


__all__ = ["citations_of", "queue_of", "reuse_of", "source_of", "spans_of", "tiers_of", "timing_of"]
