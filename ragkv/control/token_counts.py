"""A prompt as the controller sees it: the number of tokens of each kind, and the
bytes to read.
"""

from dataclasses import dataclass
from typing import Self

from ragkv.fusion import Plan, Selection, Selector, Span, SpanKind, SpanState


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The token counts of a request, which do not depend on the ratio."""

    fused_tokens: int  # N, the candidates: reused, neither exact nor computed
    # computed in every layer: question, template, cache misses, history without KV
    computed_rows: int
    prompt_tokens: int  # S
    selection: Selection = Selection.STATIC
    asked_layers: int = 0  # layers of the first pass of an asking selector
    # computed rows before the first candidate: a second pass leaves them out
    leading_rows: int = 0
    # computed rows that the first pass of an asking selector leaves out
    unasked_rows: int = 0
    early_tokens: int = 0  # candidates that this first pass recomputes: see `Recompute.early`

    @classmethod
    def of(cls, plan: Plan, selector: Selector, layers: int, early: int = 0) -> Self:
        """The counts of a prompt, on a model of so many layers."""
        fused = len(plan.candidates)
        computed = plan.computed.numel()
        return cls(
            fused,
            computed,
            plan.token_ids.numel(),
            selection=selector.selection,
            asked_layers=selector.asked_layers(layers).stop,
            leading_rows=plan.leading_rows,
            unasked_rows=plan.unasked_rows,
            early_tokens=early,
        )

    def __post_init__(self) -> None:
        if (
            self.fused_tokens < 0
            or self.computed_rows < 0
            or self.fused_tokens + self.computed_rows > self.prompt_tokens
        ):
            raise ValueError(
                f"A prompt of {self.prompt_tokens} tokens cannot have {self.fused_tokens} fused "
                "and "
                f"{self.computed_rows} computed tokens."
            )

    @property
    def placed_tokens(self) -> int:
        """Tokens whose stored KV is placed: all that are not computed."""
        return self.prompt_tokens - self.computed_rows


@dataclass(frozen=True, slots=True)
class Load:
    """One entry, or a part of one, to be read."""

    tier: str  # "memory", "disk", "redis", "s3"
    tokens: int
    fused: bool = True  # whether its tokens are candidates; those of an exact chunk are not
    fixed: bool = False  # must not be computed instead: a part of a history


def is_fused_chunk(load: Load) -> bool:
    """Whether the entry belongs to a fused chunk, which may be computed instead."""
    return load.fused and not load.fixed


def loads_of(plan: Plan) -> tuple[list[Span], list[Load]]:
    """The spans of a prompt that are read, without the prefix, which the engine holds."""
    spans: list[Span] = []
    loads: list[Load] = []
    for span in plan.loaded:
        if span.kind is not SpanKind.PREFIX and span.lease is not None:
            is_fused = span.state is SpanState.FUSED
            is_fixed = span.kind is not SpanKind.CHUNK
            spans.append(span)
            loads.append(Load(span.lease.kind, len(span), is_fused, is_fixed))
    return spans, loads
