"""`ragkv ask`: one question, answered by an engine of this process, or by the server that has the home.

Only a server on this machine is asked, and only one that needs no key: a key has documents of its own, which are not
those of the home. Whatever goes wrong, the command reads the home itself. Asking a server loads neither torch nor
`ragkv.retrieval.rag`: the time of a command is otherwise mostly that of loading them.
"""

import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ragkv.config import ReuseMode
from ragkv.errors import InputError
from ragkv.runtime import server_file
from ragkv.types import Answer, Citation, PromptSpan, Reuse, Timing

from . import output
from .options import (
    ANSWER,
    AnswerSchema,
    AsJson,
    EngineOptions,
    MaxNewTokens,
    Passages,
    PromptOrder,
    Ratio,
    Retriever,
    SelectorName,
    Temperature,
    Where,
    answer_options,
    metadata_filter,
    require_index,
    response_format,
    with_engine_options,
)
from .output import console, print_json, print_note

if TYPE_CHECKING:
    from ragkv.retrieval import Hit
    from ragkv.retrieval.rag import RagAnswer
    from ragkv.runtime.server_file import ServerAddress

LIVE_S = 2.0  # The longest wait for /livez, which answers at once.
ANSWER_S = 600.0  # The longest wait for an answer; the server's own deadline is shorter by default.
LABEL_COLUMNS = 26  # The columns of a segment's name in a bar.
MARKS = {"exact": "=", "fused": "-", "recomputed": "#", "computed": "+"}
STYLES = {"exact": "green", "fused": "cyan", "recomputed": "yellow", "computed": "magenta"}
SEGMENT_NAMES = {"question": "question and template", "template": "text between the passages"}


@with_engine_options
def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    options: EngineOptions,
    k: Passages = 6,
    retriever: Retriever = None,
    where: Where = None,
    order: PromptOrder = None,
    ratio: Ratio = None,
    selector: SelectorName = None,
    reuse: Annotated[
        ReuseMode, typer.Option(rich_help_panel=ANSWER, help="Which stored KV is used; none: full recompute.")
    ] = "fused",
    temperature: Temperature = 0.0,
    max_new_tokens: MaxNewTokens = 64,
    schema: AnswerSchema = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also show what became of each part of the prompt, as bars.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Answer a question from the ingested documents. Shows the sources and how much KV was reused.

    Where `ragkv serve` has the home, its server answers.
    """
    if not question.strip():
        raise InputError("The question is empty. Give a question of at least one word.")
    require_index(options.home)
    filters = metadata_filter(where)

    def show(answered: "RagAnswer | ServedAnswer") -> None:
        if as_json:
            print_json({"question": question, **output.plain(answered)})
        else:
            _show(answered, explain)

    if options.uses_server_settings and not temperature and schema is None:
        body: dict[str, Any] = {"question": question, "k": k, "reuse": reuse, "max_tokens": max_new_tokens}
        body |= {"retriever": retriever, "order": order, "selector": selector, "filter": filters or None}
        if ratio is not None:
            body["ratio"] = ratio
        if (answered := ask_server(options.home, options.model, body)) is not None:
            show(answered)
            return
    answering = answer_options(ratio, selector, temperature, max_new_tokens)
    answering["reuse"] = reuse
    if schema is not None:
        answering["response_format"] = response_format(schema)
    with options.rag(reads=True) as rag:
        show(rag.ask(question, k, retriever=retriever, where=filters, order=order, **answering))
        rag.engine.flush()  # after the answer is shown: encodes the chunks that were missed


def _why_nothing_was_reused(spans: Sequence[PromptSpan]) -> list[str]:
    """Each reason once; empty if the prompt has no passages or some of their KV was reused."""
    chunks = [span for span in spans if span.kind == "chunk"]
    if any(span.state != "computed" for span in chunks):
        return []
    return list(dict.fromkeys(span.why for span in chunks if span.why))


def _show(answered: "RagAnswer | ServedAnswer", explain: bool) -> None:
    """Print an answer, its sources, what was reused, and with `explain` the fate of each part of the prompt."""
    if not answered.hits:
        print_note("no passage matches; the model answered without documents.")
    console.print(answered.answer.text, style="bold")
    cited = {citation.chunk for citation in answered.answer.citations}
    for number, hit in enumerate(answered.hits):
        mark = "*" if number in cited else " "
        console.print(f" {mark} [{number + 1}] {output.place(hit.passage)}")
    output.print_reuse(answered.answer)
    if reasons := _why_nothing_was_reused(answered.answer.spans):
        print_note(f"no passage's KV was reused: {'; '.join(reasons)}.")
    if explain:
        for line in prompt_bars(answered.answer.spans, [hit.passage.source for hit in answered.hits], console.width):
            console.print(line)


# The server that has the home


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """A server's answer, with the fields of `RagAnswer`. Token ids and the ids of passages are not known."""

    answer: Answer
    hits: "tuple[Hit, ...]"  # in prompt order


class Refused(Exception):
    """The server gave no answer; the text says why."""


def server_of(home: Path, model: str) -> "ServerAddress | None":
    """Where the server of `home` listens.

    `None` for one with another model, and one whose default collection is not the one that `ragkv ingest` fills.
    """
    address = server_file.load(home)
    if address is None or address.model != model or (home / "collections" / "default").exists():
        return None
    return address


def ask_server(home: Path, model: str, body: Mapping[str, Any]) -> ServedAnswer | None:
    """The answer of the server of `home` to the body of a `/v1/ask`, with a note; `None` if it gives none."""
    if (address := server_of(home, model)) is None:
        return None
    try:
        send(address, "GET", "/livez", None, LIVE_S)
        answered = served_answer(send(address, "POST", "/v1/ask", body, ANSWER_S))
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, Refused) as error:
        print_note(f"the server at {address.url} does not answer this question: {error}")
        return None
    print_note(f"the server at {address.url} (pid {address.pid}), which has this home, answered, with its settings.")
    return answered


def send(
    address: "ServerAddress", method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
) -> dict[str, Any]:
    """The JSON of a response. Raises `Refused` for an error, and if another process answers."""
    connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)  # past any proxy
    try:
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"content-type": "application/json", "accept": "application/json"})
        response = connection.getresponse()
        if response.getheader("x-replica") != address.replica:
            raise Refused("another process listens there")
        found = json.loads(response.read())
        if response.status not in (200, 201):
            raise Refused(str(found["error"]["message"]))
        return dict(found)
    finally:
        connection.close()


def served_answer(found: Mapping[str, Any]) -> ServedAnswer:
    """A response of `/v1/ask` as the values of the library."""
    reuse = {name: value for name, value in found["reuse"].items() if name != "tokens"}
    answer = Answer(
        text=found["answer"],
        token_ids=(),
        finish_reason=found["finish_reason"],
        timing=Timing(**found["timing"]),
        reuse=Reuse(**{**reuse, "notes": tuple(reuse["notes"]), "decision": tuple(reuse["decision"])}),
        citations=tuple(
            Citation(one["number"] - 1, one["start"], one["end"], found["sources"][one["number"] - 1]["source"])
            for one in found["citations"]
        ),
        spans=tuple(_span(one) for one in found["prompt"]),
    )
    return ServedAnswer(answer, hits_of(found["sources"]))


def hits_of(sources: Sequence[Mapping[str, Any]]) -> "tuple[Hit, ...]":
    """The sources of a response as hits, in their order."""
    from ragkv.retrieval import Hit, Passage

    hits = []
    scores = sorted((one["score"] for one in sources), reverse=True)
    for one in sources:
        metadata = {name: one[name] for name in ("title", "page") if one.get(name) is not None}
        passage = Passage("", one["document_id"], one["text"], (one["start"], one["end"]), one["source"], metadata)
        hits.append(Hit(passage, one["score"], scores.index(one["score"]) + 1))
    return tuple(hits)


def _span(one: Mapping[str, Any]) -> PromptSpan:
    chunk = None if one["number"] is None else one["number"] - 1
    recomputed_at = tuple(one["recomputed_at"])
    return PromptSpan(one["kind"], one["start"], one["tokens"], one["state"], recomputed_at, chunk, one["why"])


# The bars of `--explain`


@dataclass(slots=True)
class PromptSegment:
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
    columns = max(10, width - LABEL_COLUMNS - 12)
    per_mark = max(1.0, longest / columns)
    legend = Text(f"prompt of {total} tokens: ")
    for fate, mark in MARKS.items():
        legend.append(f"{mark * 3} {fate}  ", STYLES[fate])
    yield legend
    for one in segments:
        line = Text(f" {_cut(one.name, LABEL_COLUMNS):<{LABEL_COLUMNS}} {one.tokens:>6}  ")
        for fate, count in one.counts.items():
            if count:
                line.append(MARKS[fate] * max(1, round(count / per_mark)), STYLES[fate])
        yield line
        if one.why is not None:
            yield Text(f"   not reused: {one.why}", "dim")
    if per_mark > 1:
        yield Text(f"one mark is about {per_mark:.3g} tokens", "dim")


def _segments(spans: Sequence[PromptSpan], sources: Sequence[str]) -> Iterator[PromptSegment]:
    """Neighbouring spans of one chunk or one kind, joined."""
    last: tuple[str, int | None] | None = None
    segment: PromptSegment | None = None
    for span in spans:
        kind = "question" if span.kind == "template" and last == ("question", None) else span.kind
        if (kind, span.chunk) != last:
            if segment is not None:
                yield segment
            last, segment = (kind, span.chunk), PromptSegment(_name(kind, span.chunk, sources), dict.fromkeys(MARKS, 0))
        assert segment is not None
        segment.counts[span.state] += span.tokens - span.recomputed
        segment.counts["recomputed"] += span.recomputed
        segment.why = segment.why or span.why
    if segment is not None:
        yield segment


def _name(kind: str, chunk: int | None, sources: Sequence[str]) -> str:
    if chunk is None:
        return SEGMENT_NAMES.get(kind, kind)
    return f"[{chunk + 1}] {sources[chunk]}" if chunk < len(sources) else f"[{chunk + 1}]"


def _cut(name: str, columns: int) -> str:
    """`name` in at most `columns` columns: its number and its end, which says most of a path."""
    if len(name) <= columns:
        return name
    number, _, rest = name.partition(" ")
    return f"{number} …{rest[-(columns - len(number) - 2) :]}"
