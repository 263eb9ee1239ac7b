"""`ragkv docs list | show | delete`: the ingested documents; `ragkv search`: the passages that a
question retrieves.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragkv.errors import InputError
from ragkv.home import kept_at
from ragkv.runtime import counted
from ragkv.runtime.outside import check_words

from . import output
from .options import (
    HOME,
    AsJson,
    EngineOptions,
    Home,
    Passages,
    Retriever,
    Where,
    command_group,
    metadata_filter,
    note_writer,
    require_index,
    with_engine_options,
)
from .output import console, print_json, print_note
from .running_server import ask_server, hits_of

if TYPE_CHECKING:
    from pathlib import Path

    from ragkv.retrieval import Hit, Index

ALL = 2**62  # more documents than there are
BEGINNING = 240  # characters of a found passage that are shown

docs = command_group("The ingested documents: list, show, delete.", name="docs")


@docs.command("list")
def list_(home: Home = HOME, as_json: AsJson = False) -> None:
    """List the documents: passages, characters, and the id that `show` and `delete` take."""
    with _index(home) as index:
        found = index.contents.document_page(0, ALL)
    if as_json:
        print_json(found)
        return
    for one in found:
        source = f" (from {one.source})" if one.source not in ("", one.id) else ""
        console.print(
            f"{counted(one.passages, 'passage'):>14} {counted(one.characters, 'character'):>20}  "
            f"{one.id}{source}"
        )
    console.print(f"{counted(len(found), 'document')}.", style="dim")


@docs.command()
def show(
    name: Annotated[str, typer.Argument(help="The id of a document, or the end of its path.")],
    home: Home = HOME,
    as_json: AsJson = False,
) -> None:
    """Print the text of a document."""
    with _index(home) as index:
        document = index.contents.document(_id_of(index, name))
    if as_json:
        print_json(document)
    elif document is not None:
        console.print(document.text)


@docs.command()
@with_engine_options
def delete(
    names: Annotated[
        list[str], typer.Argument(help="Ids of documents, or the ends of their paths.")
    ],
    options: EngineOptions,
    as_json: AsJson = False,
) -> None:
    """Delete documents, their passages and this model's KV of them. `ragkv gc` deletes the KV of
    other models.
    """
    with _index(options.home) as index:
        ids = [_id_of(index, name) for name in names]
    with options.rag(brief=True) as rag:
        removal = rag.corpus.delete(ids)
    if as_json:
        print_json({"deleted": removal.deleted, "passages": len(removal.removed_passages)})
        return
    for deleted in removal.deleted:
        console.print(f"Deleted {deleted}.")
    console.print(f"{counted(len(removal.removed_passages), 'passage')} deleted.", style="dim")


def _found(
    home: "Path", query: str, k: int, retriever: str | None, filters: dict[str, Any]
) -> "Sequence[Hit]":
    """What a search in this process finds. The embedder, whose packages take seconds to load, only
    if it is used.
    """
    from ragkv.retrieval import Index, resolve_embedder

    note_writer(home)
    with warnings.catch_warnings():
        # from other packages; the user cannot fix them
        warnings.simplefilter("ignore", DeprecationWarning)
        embedder = None if retriever == "bm25" else resolve_embedder(kept_at(home).get("embedder"))
        with (
            output.quiet("ragkv.retrieval"),
            Index(home / "index", embedder=embedder, read_only=True) as index,
        ):
            hits = index.search(query, k, retriever=retriever, where=filters)
            if retriever != "bm25" and index.writer.notice:
                print_note(index.writer.notice)
    return hits


@contextmanager
def _index(home: "Path") -> Iterator["Index"]:
    """The index, opened for reading only."""
    from ragkv.retrieval import Index

    require_index(home)
    with Index(home / "index", read_only=True) as index:
        yield index


def _id_of(index: "Index", name: str) -> str:
    """The id of the document that `name` means. Raises `InputError` if there is none, or more than
    one.
    """
    ids = index.contents.document_ids()
    if name in ids:
        return name
    found = [one for one in ids if one.endswith(f"/{name.removeprefix('./')}")]
    if len(found) == 1:
        return found[0]
    if not found:
        raise InputError(f"There is no document {name!r}; `ragkv docs list` shows those there are.")
    some = ", ".join(found[:5])
    raise InputError(f"{len(found)} documents end with {name!r}: {some}. Give more of the path.")


def search(
    words: Annotated[
        list[str], typer.Argument(metavar="QUERY", help="A question, or words of the passages.")
    ],
    home: Home = HOME,
    k: Passages = 6,
    retriever: Retriever = None,
    where: Where = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="Show the whole passages, not their beginnings.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the passages that a question retrieves, the best first, and their scores.

    Needs no model, and no lock on the home.
    """
    query = " ".join(words)
    check_words("query", query)
    require_index(home)
    filters = metadata_filter(where)
    body = {"query": query, "k": k, "retriever": retriever, "filter": filters or None}
    served = ask_server(
        home, "", "/v1/collections/default/search", body, lambda found: hits_of(found["hits"])
    )
    hits = _found(home, query, k, retriever, filters) if served is None else served
    if as_json:
        print_json({"query": query, "hits": hits})
        return
    if not hits:
        print_note("no passage matches.")
    for hit in hits:
        console.print(
            f"[{hit.rank}] {output.place(hit.passage)}  score {hit.score:.3g}", style="bold"
        )
        text = " ".join(hit.passage.text.split())
        console.print(
            f"    {text if whole or len(text) <= BEGINNING else f'{text[:BEGINNING].rstrip()} ... (--whole)'}"
        )
