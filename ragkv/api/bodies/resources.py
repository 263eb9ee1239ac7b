"""The request and response bodies of ragkv's own endpoints; those with documents are in
`documents.py`.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, Field, StringConstraints

from ragkv.config import ReuseMode
from ragkv.entries import EncodeReport
from ragkv.prompt import AnswerOptions
from ragkv.prompt.constraints import ResponseFormat, parse
from ragkv.registry import RETRIEVERS, SELECTORS
from ragkv.types import PromptSpan, Reuse, Timing

from ..errors import ApiError
from .parts import RequestPart, Strict, optional

T = TypeVar("T")

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
SESSION_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:@=+-]{0,127}$"

Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
SessionId = Annotated[str, StringConstraints(pattern=SESSION_PATTERN)]

# The engine refuses an unknown name with a message that lists the known ones.
SelectorName = Annotated[str, Field(max_length=64, json_schema_extra={"enum": sorted(SELECTORS)})]
RetrieverName = Annotated[str, Field(max_length=64, json_schema_extra={"enum": sorted(RETRIEVERS)})]


class ReuseOptions(RequestPart):
    """How the prompt's KV is made, and which stored KV may be used."""

    reuse: ReuseMode = Field(
        default="fused", description="fused; prefix: what is exact; none: full recompute."
    )
    ratio: Annotated[float, Field(ge=0.0, le=1.0)] | None = optional(
        "Share of fused tokens to recompute. null: the load controller chooses; left out: the "
        "setting."
    )
    selector: SelectorName | None = optional(
        "The method that selects these tokens; left out: the setting."
    )

    @property
    def engine_options(self) -> AnswerOptions:
        """The engine's options. A ratio of null is passed on; a ratio that was left out is not."""
        options: AnswerOptions = {"selector": self.selector, "reuse": self.reuse}
        if "ratio" in self.model_fields_set:
            options["ratio"] = self.ratio
        return options


class NamedSchema(RequestPart):
    """A JSON schema with OpenAI's fields around it."""

    name: str | None = optional("Accepted and ignored.", max_length=64, examples=["city"])
    description: str | None = optional("Accepted and ignored.")
    schema_: dict[str, Any] = Field(
        alias="schema",
        description="The schema. One that cannot be kept is refused, and the error names the part.",
        examples=[
            {"type": "object", "properties": {"year": {"type": "integer"}}, "required": ["year"]}
        ],
    )
    strict: bool | None = optional("Ignored: every schema is kept strictly.")


class FormatRequest(RequestPart):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="json_object: any JSON object."
    )
    json_schema: NamedSchema | None = optional("Only with json_schema.")

    @property
    def form(self) -> ResponseFormat | None:
        """The engine's form; `None` for text. Raises `ApiError` and `SchemaError`."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            message = "response_format: give json_schema if type is json_schema, and only then."
            raise ApiError(400, message, param="response_format.json_schema")
        return parse(self.model_dump(by_alias=True))


class Search(Strict):
    """Which passages to find."""

    k: int = Field(default=6, ge=1, le=1000, description="The most passages to find.")
    filter: dict[str, Any] | None = optional(
        "Metadata that must match: a value, a list of values, or comparisons such as `gte`.",
        examples=[{"lang": "en", "year": {"gte": 1900}}],
    )
    retriever: RetrieverName | None = optional(
        "Left out: the best one available.", examples=["bm25"]
    )


class SearchRequest(Search):
    """A search in one collection."""

    query: str = Field(min_length=1, description="What to search for.", examples=["bridge"])


class RetrievalBody(Search):
    """Which passages of which collection to find, and their order in the prompt."""

    collection: Name = Field(
        default="default", description="The collection to search.", examples=["docs"]
    )
    order: Literal["best-last", "score", "document"] | None = optional(
        "Best passage last or first, or as in the documents. Null: best last."
    )


class AskRequest(RetrievalBody, ReuseOptions):
    """A question over a collection."""

    question: str = Field(
        min_length=1, description="The question.", examples=["When was the Iron Bridge opened?"]
    )
    session_id: SessionId | None = optional(
        "The conversation to continue or to start.", examples=["s1"]
    )
    max_tokens: int | None = optional("The most tokens of the answer.", ge=1, lt=2**63)
    response_format: FormatRequest | None = optional("The form of the answer; left out: text.")
    stream: bool = Field(default=False, description="Answer with server-sent events.")


class SourceBody(BaseModel):
    """A passage that was found, or put into the prompt."""

    number: int = Field(description="1 for the first in the prompt; [n] in an answer names it.")
    document_id: str = Field(description="The document's id.")
    source: str = Field(description="Origin of the document, for people.")
    title: str | None = Field(default=None, description="The document's title, if it has one.")
    text: str = Field(description="The passage.")
    start: int = Field(description="Start of the text in the document, in characters.")
    end: int = Field(description="End of the text in the document, in characters.")
    page: int | None = Field(
        default=None, description="The page on which the text begins, of a document with pages."
    )
    score: float | None = Field(description="Comparable within one search only.")


class CitationBody(BaseModel):
    """Where a source says what the answer says."""

    number: int = Field(description="The source's number.")
    document_id: str = Field(description="The source's document.")
    page: int | None = Field(
        default=None, description="The page on which the source begins, if it has pages."
    )
    start: int = Field(description="Start in the source's text, in characters.")
    end: int = Field(description="End in the source's text, in characters.")
    answer_start: int | None = Field(
        description="Start of the cited part of the answer, if it is known."
    )
    answer_end: int | None = Field(
        description="End of the cited part of the answer, if it is known."
    )


@dataclass(frozen=True)
class ReuseBody(Reuse):
    """How the prompt's tokens were obtained. The first four counts are disjoint and sum to
    `tokens`.

    - `exact`: reused, and equal to what a full prefill computes.
    - `fused`: reused as stored, without attention to the tokens before them.
    - `recomputed`: stored, but selected and computed again.
    - `computed`: question, template, cache misses.
    - `tokens`: tokens of the prompt.
    - `bytes_by_tier`: KV bytes read, by tier.
    - `missed_chunks`, `missed_tokens`: chunks without a usable entry, which were computed, and
      their tokens.
    - `ratio`, `selector`: the recompute ratio and the selector in force.
    - `compute`: computed row-layers divided by those of a full prefill.
    - `notes`: remarks on this report, such as damaged entries and fallbacks.
    - `decision`: why the load controller chose this ratio, if it was asked.
    """

    tokens: int = 0


@dataclass(frozen=True)
class SpanBody(PromptSpan):
    """A run of the prompt's tokens with the same state. All spans together sum to `ReuseBody`.

    - `kind`: what it is of the prompt: prefix, history, chunk, question or template.
    - `start`: position of its first token in the prompt.
    - `tokens`: how many tokens it has.
    - `state`: how its KV was obtained, as in `ReuseBody`: exact, fused or computed.
    - `recomputed`: how many tokens of a fused span were computed again.
    - `recomputed_at`: the positions of these tokens, counted from the span's start.
    - `chunk`, `number`: of a chunk its place among the request's chunks, and its source's number.
    - `why`: why a chunk is computed instead of reused.
    """

    recomputed: int = 0
    number: int | None = None


class PrefillReport(BaseModel):
    """A prefill, with the spans of its prompt."""

    timing: Timing
    reuse: ReuseBody
    prompt: list[SpanBody] = Field(description="The spans of the prompt, in order.")


class Basis(BaseModel):
    """What an answer rests on."""

    citations: list[CitationBody] = Field(description="Where the sources say what the answer says.")
    sources: list[SourceBody] = Field(description="The passages in the prompt, in order.")
    session_id: str | None = Field(
        description="The conversation that the answer belongs to, if the request named one."
    )
    notes: list[str] = Field(default=[], description="What was ignored of the request.")


class AnswerReport(PrefillReport, Basis):
    """What an answer rests on, then how it was made: JSON has the fields of the last base first."""


class AskText(BaseModel):
    """An answer without its report."""

    answer: str = Field(description="The answer's text.")
    finish_reason: Literal["stop", "length"] = Field(description="length: `max_tokens` ended it.")
    id: str = Field(description="The answer's id.")


class AskResponse(AnswerReport, AskText):
    """An answer, then its report."""


class IngestResponse(BaseModel):
    """The document ids that an ingestion changed."""

    added: list[str] = Field(description="New documents.")
    changed: list[str] = Field(description="Documents that were replaced.")
    unchanged: list[str] = Field(description="Documents that were stored already, word for word.")
    deleted: list[str] = Field(description="Documents that were removed.")
    chunks: EncodeReport = Field(description="What became of the KV of the chunks.")


class Listed(BaseModel, Generic[T]):
    """A list, as OpenAI's are."""

    object: Literal["list"] = "list"
    data: list[T] = Field(description="What is listed.")


class CollectionIn(Strict):
    """A collection to create."""

    name: Name = Field(description="Its name, which is also its id.", examples=["docs"])


class CollectionBody(BaseModel):
    """A collection."""

    name: str = Field(description="Its name, which is also its id.")
    documents: int = Field(description="How many documents it has.")
    chunks: int = Field(description="How many passages they have.")
    created: float = Field(description="Seconds since the epoch.")


class DocumentInfo(BaseModel):
    """A listed document."""

    id: str = Field(description="The document's id.")
    title: str | None = Field(description="Its title, if it has one.")
    source: str = Field(description="Its origin, for people.")
    characters: int = Field(description="How many characters its text has.")
    chunks: int = Field(description="How many passages it has.")


class DocumentOut(DocumentInfo):
    """A document with its text."""

    text: str = Field(description="Its text.")
    metadata: dict[str, Any] = Field(description="Its metadata, the title included.")


class DocumentList(Listed[DocumentInfo]):
    """A page of documents, in the order in which they were stored."""

    next: str | None = Field(
        description="Send it as `after` for the next page; null: no further page."
    )


class Deleted(BaseModel):
    """The id of what was deleted."""

    id: str = Field(description="What was deleted.")
    deleted: Literal[True] = True


class SearchResponse(BaseModel):
    """Passages, best first."""

    hits: list[SourceBody] = Field(description="The passages.")
