"""`ragkv search`: the passages that a question retrieves. Needs no model, and no lock on the home."""

import warnings
from typing import Annotated

import typer

from ragkv.errors import InputError

from . import output
from .options import HOME, AsJson, Home, Passages, Retriever, Where, metadata_filter, note_writer, require_index
from .output import console, print_json, print_note


def search(
    query: Annotated[str, typer.Argument(help="A question, or words of the passages.")],
    home: Home = HOME,
    k: Passages = 6,
    retriever: Retriever = None,
    where: Where = None,
    as_json: AsJson = False,
) -> None:
    """Show the passages that a question retrieves, the best first, and their scores."""
    from ragkv.retrieval import Index, resolve_embedder

    if not query.strip():
        raise InputError("The query is empty. Give at least one word.")
    require_index(home)
    note_writer(home)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from other packages; the user cannot fix them
        embedder = None if retriever == "bm25" else resolve_embedder()
        with output.quiet("ragkv.retrieval"), Index(home / "index", embedder=embedder, read_only=True) as index:
            hits = index.search(query, k, retriever=retriever, where=metadata_filter(where))
            notice = None if retriever == "bm25" else index.notice
    if notice:
        print_note(notice)
    if as_json:
        print_json({"query": query, "hits": hits})
        return
    if not hits:
        print_note("no passage matches.")
    for hit in hits:
        console.print(f"[{hit.rank}] {output.place(hit.passage)}  score {hit.score:.3g}", style="bold")
        console.print(f"    {' '.join(hit.passage.text.split())}")
