"""What our own endpoints take and give. Strict: no number for a string, no unknown field, no NaN."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, WithJsonSchema, model_validator

from ragkv.config import ReuseMode
from ragkv.fusion import SELECTORS
from ragkv.retrieval import RETRIEVERS

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
ID_PATTERN = r"^[^\x00-\x1f\x7f]{1,256}$"

SESSION_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:@=+-]{0,127}$"

Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
SessionId = Annotated[str, StringConstraints(pattern=SESSION_PATTERN)]
Id = Annotated[str, StringConstraints(pattern=ID_PATTERN)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


# Others are refused where they are used, which says what there is.
SelectorName = Annotated[str, WithJsonSchema({"type": "string", "enum": sorted(SELECTORS)})]
RetrieverName = Annotated[str, WithJsonSchema({"type": "string", "enum": sorted(RETRIEVERS)})]


class Part(BaseModel):
    """A part of a request's body."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Strict(Part):
    """A request's body."""

    @model_validator(mode="before")
    @classmethod
    def _is_json(cls, values: Any) -> Any:
        """Python's parser takes what is no JSON: NaN, and half of a surrogate pair. Nothing here could keep them."""
        try:
            json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("a text holds half a character (a lone surrogate)") from error
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError("it is not JSON: NaN and Infinity are no numbers, and nesting has an end") from error
        return values


class Retrieval(Strict):
    """Which passages are looked for."""

    collection: Name = Field(default="default", description="The collection that is searched.")
    k: int = Field(default=6, ge=1, le=1000, description="Passages, at most.")
    filter: dict[str, Any] | None = Field(
        default=None, description='Metadata that must match, such as {"lang": "en", "year": {"gte": 2000}}.'
    )
    retriever: RetrieverName | None = Field(default=None, description="Left out, the best there is.")
    order: Literal["score", "document"] = Field(
        default="score", description="Best first, or as the passages stand in the documents."
    )


class AskRequest(Retrieval):
    """A question over a collection."""

    question: str = Field(min_length=1)
    session_id: SessionId | None = Field(default=None, description="The conversation that it goes on with, or begins.")
    max_tokens: int | None = Field(default=None, ge=1, description="Of the answer.")
    ratio: Share | None = Field(
        default=None, description="Share of fused tokens recomputed; null: the controller's; left out: the settings'."
    )
    selector: SelectorName | None = Field(
        default=None, description="Which tokens are recomputed; left out: the settings'."
    )
    reuse: ReuseMode = Field(default="fused", description="fused; prefix: what is exact alone; none: full recompute.")
    stream: bool = Field(default=False, description="Answer with server-sent events.")


class CompareRequest(Retrieval):
    """A question whose prompt is timed both ways."""

    question: str = Field(min_length=1)
    ratio: Share | None = Field(default=None, description="As of /v1/ask.")
    selector: SelectorName | None = Field(default=None, description="As of /v1/ask.")


class Source(BaseModel):
    """A passage, as it was put into the prompt or found."""

    number: int = Field(description="1 for the first in the prompt; what [n] in an answer means.")
    document_id: str
    source: str = Field(description="Where the document came from, for people.")
    title: str | None = None
    text: str
    start: int = Field(description="Where the text begins in the document, in characters.")
    end: int
    score: float | None = Field(description="Comparable within one search only.")


class Citation(BaseModel):
    """Where a source says what the answer says."""

    number: int = Field(description="The source's.")
    document_id: str
    start: int = Field(description="Where in the source's text, in characters.")
    end: int
    answer_start: int | None = Field(description="Which characters of the answer it is about, if that is known.")
    answer_end: int | None


class Reuse(BaseModel):
    """What became of the prompt's tokens. The first four are disjoint and sum to all of them."""

    exact: int = Field(description="Reused, and equal to what a full prefill computes.")
    fused: int = Field(description="Reused as stored, without what precedes them here.")
    recomputed: int = Field(description="Stored, but selected and computed again.")
    computed: int = Field(description="Question, template, misses.")
    tokens: int = Field(description="Of the prompt.")
    bytes_by_tier: dict[str, int] = Field(description="KV bytes read, by tier.")
    missed_chunks: int
    missed_tokens: int
    ratio: float = Field(description="Recompute ratio in force.")
    selector: str = Field(description="Selector in force.")
    compute: float = Field(description="Row-layers computed over a full prefill's.")
    notes: list[str] = Field(description="What a reader of this report should know.")
    decision: list[str] = Field(description="Why the loading controller chose as it did, where it was asked.")


class Timing(BaseModel):
    """Where the time went, in seconds."""

    queue_s: float
    lookup_s: float
    load_s: float
    fuse_s: float
    prefill_s: float
    first_token_s: float = Field(description="TTFT: from when the engine was asked to the first token.")
    decode_s: float


class Span(BaseModel):
    """A run of the prompt's tokens with one fate. Over all spans they sum to `Reuse`."""

    kind: Literal["prefix", "history", "chunk", "question", "template"]
    start: int = Field(description="Position of its first token in the prompt.")
    tokens: int
    state: Literal["exact", "fused", "computed"]
    recomputed: int = Field(description="How many of a fused span's tokens were computed again.")
    recomputed_at: list[int] = Field(description="Which, counted from its start.")
    number: int | None = Field(description="The source it is, for chunks.")


class AskResponse(BaseModel):
    """An answer, what it rests on, and how it was made."""

    id: str
    answer: str
    finish_reason: Literal["stop", "length"]
    citations: list[Citation]
    sources: list[Source]
    reuse: Reuse
    timing: Timing
    prompt: list[Span]
    session_id: str | None


class Measured(BaseModel):
    """One way of making a prompt's KV, timed."""

    timing: Timing
    reuse: Reuse


class CompareResponse(BaseModel):
    """TTFT both ways, the same prompt, one after the other."""

    fused: Measured
    full: Measured


class DocumentIn(Part):
    """A document to be stored."""

    id: Id | None = Field(default=None, description="Left out, it is made from the text.")
    title: str | None = Field(default=None, max_length=1000)
    text: str = Field(min_length=1)
    metadata: dict[str, Any] | None = Field(default=None, description="JSON values, to filter by.")


class DocumentsIn(Strict):
    """Documents to be stored; one that is there already costs nothing, a changed one replaces what was there."""

    documents: list[DocumentIn] = Field(min_length=1)


class DocumentPut(Strict):
    """A document's new contents."""

    title: str | None = Field(default=None, max_length=1000)
    text: str = Field(min_length=1)
    metadata: dict[str, Any] | None = None


class ChunksDone(BaseModel):
    """What became of the chunks' KV."""

    encoded: int = Field(description="Computed and stored now.")
    present: int = Field(description="Stored already.")
    failed: int = Field(description="Not stored; computed when asked for.")


class IngestResponse(BaseModel):
    """What an ingestion changed, by document id."""

    added: list[str]
    changed: list[str]
    unchanged: list[str]
    deleted: list[str]
    chunks: ChunksDone


class CollectionIn(Strict):
    """A collection to be made."""

    name: Name


class Collection(BaseModel):
    """A collection."""

    name: str
    documents: int
    chunks: int
    created: float = Field(description="Seconds since the epoch.")


class CollectionList(BaseModel):
    """Every collection of the caller's, by name."""

    data: list[Collection]


class DocumentInfo(BaseModel):
    """A document as it is listed."""

    id: str
    title: str | None
    source: str
    characters: int
    chunks: int


class DocumentOut(DocumentInfo):
    """A document, whole."""

    text: str
    metadata: dict[str, Any]


class DocumentList(BaseModel):
    """A page of documents."""

    data: list[DocumentInfo]
    next: str | None = Field(description="Give it as `after` for the next page; null: there is none.")


class Deleted(BaseModel):
    """Something is gone."""

    id: str
    deleted: Literal[True] = True


class SearchRequest(Strict):
    """What to look for."""

    query: str = Field(min_length=1)
    k: int = Field(default=6, ge=1, le=1000)
    filter: dict[str, Any] | None = None
    retriever: RetrieverName | None = None


class SearchResponse(BaseModel):
    """Passages, best first."""

    hits: list[Source]


class SessionInfo(BaseModel):
    """A conversation."""

    id: str
    turns: int
    tokens: int = Field(description="Of its history.")
    stored_bytes: int = Field(description="KV of its history that is stored.")
    used_at: float = Field(description="Seconds since the epoch.")


class SessionList(BaseModel):
    """The caller's conversations, the last used first."""

    data: list[SessionInfo]


class KeepTokens(Strict):
    """How a conversation's history is made shorter: its last so many tokens are kept."""

    keep_tokens: int = Field(ge=0)


class Discard(Strict):
    """How a conversation's history is made shorter: as much goes as an overflowing turn would drop, by this list."""

    discard: Literal["oldest", "keep-dialogue"]


class Truncated(BaseModel):
    """What was dropped."""

    id: str
    dropped: int
    tokens: int = Field(description="Of the history that is left.")


class ForkRequest(Strict):
    """Where a copy of a conversation goes."""

    to: SessionId | None = Field(default=None, description="The new one's id; left out, one is made.")


class TierInfo(BaseModel):
    """A tier of the caller's store."""

    tier: str
    entries: int
    used_bytes: int
    capacity_bytes: int
    hits: int
    misses: int
    evictions: int
    damaged: int


class QueueInfo(BaseModel):
    """The caller's queue."""

    waiting: int
    admitted: int
    served: int
    refused: int
    expired: int
    cancelled: int


class StatsResponse(BaseModel):
    """The model, and what the caller's store holds."""

    model: str
    kv_bytes_per_token: int
    context_tokens: int | None
    tiers: list[TierInfo]
    queue: QueueInfo
    ratio: float | None
    selector: str
