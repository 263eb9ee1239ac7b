"""The sources of an answer, and where it cites them.

A citation marker `[n]` means the n-th source. The model's text is passed on unchanged. If the model
does not name a source that supports the answer, the server adds its marker at the end. A no-break
space before the server's markers tells them from the model's. If a client sends an earlier answer
back, they are removed from it.
"""

import re
from collections.abc import Iterable, Sequence
from urllib.parse import quote

from ragkv.prompt import MARKER, cite
from ragkv.retrieval import Document, DocumentSummary, Hit, Passage
from ragkv.types import Chunk, Citation

from .bodies.chat_answer import Annotation, UrlCitation
from .bodies.resources import AnswerReport, CitationBody, SourceBody

_FINAL = re.compile("\u00a0(?:\\[\\d{1,4}\\])+$")


def title_of(described: Document | DocumentSummary | Passage) -> str | None:
    """The title in the metadata of a document or passage, if it is text."""
    title = described.metadata.get("title")
    return title if isinstance(title, str) else None


def source_of(number: int, passage: Passage, score: float | None = None) -> SourceBody:
    """A passage as a source; one without a score came with the request."""
    return SourceBody(
        number=number,
        document_id=passage.document_id,
        source=passage.source,
        title=title_of(passage),
        text=passage.text,
        start=passage.span[0],
        end=passage.span[1],
        page=passage.page,
        score=score,
    )


def sources_of(hits: Sequence[Hit], first: int = 1) -> list[SourceBody]:
    """Found passages as sources, numbered from `first`."""
    return [
        source_of(number, hit.passage, float(hit.score)) for number, hit in enumerate(hits, first)
    ]


def cited_sources(answer: str, sources: Sequence[SourceBody]) -> tuple[Citation, ...]:
    """Which sources say what `answer` says, and where: `Citation.chunk` is the index of a source.
    Markers of sources that do not exist are ignored.
    """
    return cite(answer, [Chunk((), source.text) for source in sources])


def citations_of(
    answer: str, sources: Sequence[SourceBody], cited: Iterable[Citation]
) -> list[CitationBody]:
    """The `cited` places of the sources, and where `answer` has their markers."""
    stripped = answer.strip()
    begin = answer.find(stripped) if stripped else None
    found = []
    for citation in cited:
        source = sources[citation.chunk]
        marker = f"[{citation.chunk + 1}]"
        start = answer.find(marker) if marker in answer else begin
        length = len(marker) if marker in answer else len(stripped)
        found.append(
            CitationBody(
                number=source.number,
                document_id=source.document_id,
                page=source.page,
                start=citation.start,
                end=citation.end,
                answer_start=start,
                answer_end=None if start is None else start + length,
            )
        )
    return found


def missing_markers(text: str, sources: Sequence[SourceBody], cited: Iterable[Citation]) -> str:
    """The markers to append to `text`: those of cited sources that it does not name."""
    named = {int(number) for number in MARKER.findall(text)}
    numbers = (sources[citation.chunk].number for citation in cited)
    missing = [number for number in numbers if number not in named]
    return "\u00a0" + "".join(f"[{number}]" for number in missing) if missing else ""


def without_markers(text: str) -> str:
    """An earlier answer without the markers that the server appended."""
    return _FINAL.sub("", text)


def annotations_of(
    content: str, report: AnswerReport, collection: str | None, given: int
) -> list[Annotation]:
    """The citations whose marker is in `content`. The first `given` sources came with the request,
    the others are of `collection`.
    """
    found: list[Annotation] = []
    for one in report.citations:
        start, end = one.answer_start, one.answer_end
        if start is None or end is None or content[start:end] != f"[{one.number}]":
            continue
        source = next(each for each in report.sources if each.number == one.number)
        citation = UrlCitation(
            url=address_of(source, collection if one.number > given else None),
            title=source.title or one.document_id,
            start_index=start,
            end_index=end,
        )
        found.append(Annotation(url_citation=citation))
    return found


def address_of(source: SourceBody, collection: str | None) -> str:
    """Where a source can be read: its origin on the web, or its document on this server.

    Clients make links of it, and the author of a document chooses its origin and its id: a click
    may lead nowhere else. `collection`: where it was found; `None`: the request brought it.
    """
    if source.source.lower().startswith(("http://", "https://")):
        return source.source
    if collection is None:
        return f"#{source.number}"
    return f"/v1/collections/{collection}/documents/{quote(source.document_id, safe='')}"
