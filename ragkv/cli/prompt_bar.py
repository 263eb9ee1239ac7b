"""The fate of a prompt as bars of text: one line a segment, readable in 80 columns and without colours."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from ragkv.types import PromptSpan

LABEL = 26  # columns of a segment's name
MARKS = {"exact": "=", "fused": "-", "recomputed": "#", "computed": "+"}
STYLES = {"exact": "green", "fused": "cyan", "recomputed": "yellow", "computed": "magenta"}
NAMES = {"question": "question and template", "template": "text between the passages"}


@dataclass(slots=True)
class Segment:
    """A passage, or another part of the prompt, with its tokens by fate."""

    name: str
    counts: dict[str, int]
    why: str | None = None  # why its stored KV is not used

    @property
    def tokens(self) -> int:
        return sum(self.counts.values())


def prompt_bars(spans: Sequence[PromptSpan], sources: Sequence[str], width: int) -> Iterator[Text]:
    """A legend, then one line for each segment of the prompt, at most `width` columns where a reason needs no more.

    `sources` are the names of the request's chunks. A mark stands for the same number of tokens in every line; a fate
    with any token has at least one mark.
    """
    segments = list(_segments(spans, sources))
    total, longest = sum(one.tokens for one in segments), max((one.tokens for one in segments), default=1)
    columns = max(10, width - LABEL - 12)
    per_mark = max(1.0, longest / columns)
    legend = Text(f"prompt of {total} tokens: ")
    for fate, mark in MARKS.items():
        legend.append(f"{mark * 3} {fate}  ", STYLES[fate])
    yield legend
    for one in segments:
        line = Text(f" {_cut(one.name, LABEL):<{LABEL}} {one.tokens:>6}  ")
        for fate, count in one.counts.items():
            if count:
                line.append(MARKS[fate] * max(1, round(count / per_mark)), STYLES[fate])
        yield line
        if one.why is not None:
            yield Text(f"   not reused: {one.why}", "dim")
    if per_mark > 1:
        yield Text(f"one mark is about {per_mark:.3g} tokens", "dim")


def _segments(spans: Sequence[PromptSpan], sources: Sequence[str]) -> Iterator[Segment]:
    """Neighbouring spans of one chunk or one kind, joined."""
    last: tuple[str, int | None] | None = None
    segment: Segment | None = None
    for span in spans:
        kind = "question" if span.kind == "template" and last == ("question", None) else span.kind
        if (kind, span.chunk) != last:
            if segment is not None:
                yield segment
            last, segment = (kind, span.chunk), Segment(_name(kind, span.chunk, sources), dict.fromkeys(MARKS, 0))
        assert segment is not None
        segment.counts[span.state] += span.tokens - span.recomputed
        segment.counts["recomputed"] += span.recomputed
        segment.why = segment.why or span.why
    if segment is not None:
        yield segment


def _name(kind: str, chunk: int | None, sources: Sequence[str]) -> str:
    if chunk is None:
        return NAMES.get(kind, kind)
    return f"[{chunk + 1}] {sources[chunk]}" if chunk < len(sources) else f"[{chunk + 1}]"


def _cut(name: str, columns: int) -> str:
    """`name` in at most `columns` columns: its number and its end, which says most of a path."""
    if len(name) <= columns:
        return name
    number, _, rest = name.partition(" ")
    return f"{number} …{rest[-(columns - len(number) - 2) :]}"
