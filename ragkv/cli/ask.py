"""`ragkv ask`: one question, answered by an engine of this process, or by the server that has the
home.
"""

import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ragkv.config import ReuseMode
from ragkv.errors import InputError
from ragkv.runtime import seconds_of
from ragkv.runtime.outside import check_words
from ragkv.types import PromptSpan, TokenEvent

from . import output
from .options import (
    ANSWER,
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
    with_engine_options,
)
from .output import console, print_json, print_note
from .running_server import ServedAnswer, ask_server, served_answer, server_of, start_server

Words = Annotated[
    list[str], typer.Argument(metavar="QUESTION", help="The question, quoted or not.")
]
ReuseChoice = Annotated[
    ReuseMode,
    typer.Option(
        "--reuse",
        rich_help_panel=ANSWER,
        help="Which stored KV is used; none: full recompute.",
    ),
]
Keep = Annotated[
    str | None,
    typer.Option(
        help="Leave a server running, for fast next answers, until it was idle for so long: 10m."
    ),
]


@with_engine_options
def ask(
    words: Words,
    options: EngineOptions,
    k: Passages = 6,
    retriever: Retriever = None,
    where: Where = None,
    order: PromptOrder = None,
    ratio: Ratio = None,
    selector: SelectorName = None,
    reuse: ReuseChoice = "fused",
    temperature: Temperature = 0.0,
    max_new_tokens: MaxNewTokens = 64,
    keep: Keep = None,
    as_json: AsJson = False,
) -> None:
    """Answer a question from the ingested documents. Shows the sources and how much KV was reused.

    Where `ragkv serve` has the home, its server answers: it has loaded the model, which takes most
    of the time.
    """
    question = " ".join(words)
    check_words("question", question)
    require_index(options.home)
    options.config()  # a wrong setting is an error, whoever answers
    search: dict[str, Any] = {
        "retriever": retriever,
        "order": order,
        "filter": metadata_filter(where) or None,
    }
    by_server = options.uses_server_settings and not temperature
    if keep is not None:
        _keep_server(options, keep, by_server)
    answered = None
    if by_server:
        body = {"question": question, "k": k, **search, "reuse": reuse, "selector": selector}
        body["max_tokens"] = max_new_tokens
        if ratio is not None:
            body["ratio"] = ratio
        answered = ask_server(options.home, options.model, "/v1/ask", body, served_answer)
        if answered is None and not as_json:
            print_note(
                "this loads the model, which takes most of the time; with --keep 10m a server "
                "keeps it for the next questions."
            )
    if answered is not None:
        _show(question, answered, as_json)
        return
    answering = answer_options(ratio, selector, temperature, max_new_tokens)
    answering["reuse"] = reuse
    with options.rag(reads=True) as rag:
        how = {"retriever": retriever, "where": search["filter"], "order": order}
        *_, found = rag.stream(question, k, **how, **answering)
        assert not isinstance(found, TokenEvent)
        _show(question, ServedAnswer(found.answer, found.hits), as_json)
        rag.engine.flush()  # after the answer is shown: encodes the chunks that were missed


def _keep_server(options: EngineOptions, keep: str, by_server: bool) -> None:
    """Start a server of the home that ends when it was idle for `keep`, unless one runs. Raises
    `InputError` if the question is for none.
    """
    if not by_server:
        raise InputError(
            "--keep starts a server with the home's settings: leave the model's options and "
            "--temperature out."
        )
    idle_s = seconds_of(keep)
    if server_of(options.home, options.model) is None:
        with output.working("starting a server"):
            start_server(options.home, options.model, options.settings, idle_s)


def _why_nothing_was_reused(spans: Sequence[PromptSpan]) -> list[str]:
    """Each reason once; empty if the prompt has no passages or some of their KV was reused."""
    chunks = [span for span in spans if span.kind == "chunk"]
    if any(span.state != "computed" for span in chunks):
        return []
    return list(dict.fromkeys(span.why for span in chunks if span.why))


def _show(question: str, answered: ServedAnswer, as_json: bool) -> None:
    """Print an answer, its sources and what was reused."""
    if as_json:
        print_json({"question": question, "answer": answered.answer, "hits": answered.hits})
        return
    if not answered.hits:
        print_note("no passage matches; the model answered without documents.")
    console.print(answered.answer.text, style="bold")
    output.print_sources(answered.hits, answered.answer)
    output.print_reuse(answered.answer, time.monotonic() - output.BEGAN)
    if reasons := _why_nothing_was_reused(answered.answer.spans):
        print_note(f"no passage's KV was reused: {'; '.join(reasons)}.")
