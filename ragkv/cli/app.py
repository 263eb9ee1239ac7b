"""The commands."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragkv import __version__
from ragkv.errors import ConfigError, DocumentError, InputError

from . import output
from .chat import chat
from .explain import explain
from .keys import keys
from .learn import learn
from .options import HOME, AsJson, Device, Dtype, Home, Model, Settings
from .output import console, print_json
from .profile import profile
from .serve import serve
from .workplace import Workplace, notice

if TYPE_CHECKING:
    from ragkv.rag import Sourced

app = typer.Typer(
    name="ragkv",
    help="Answer questions over documents from stored KV: chunks are computed once and fused at question time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(profile)
app.command()(explain)
app.command()(chat)
app.command()(learn)
app.command()(serve)
app.add_typer(keys, name="keys")


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"ragkv {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,  # noqa: ARG001
) -> None:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


@app.command()
def ingest(
    paths: Annotated[list[Path], typer.Argument(help="Files or folders: .txt .md .html .jsonl .pdf")],
    home: Home = HOME,
    model: Model = "reader",
    config: Settings = None,
    device: Device = None,
    dtype: Dtype = None,
    chunk_tokens: Annotated[int | None, typer.Option(help="Most tokens of a chunk [default: 512; reader: 128]")] = None,
    prune: Annotated[bool, typer.Option(help="Delete indexed documents that are not among these.")] = False,
    skip_unreadable: Annotated[bool, typer.Option(help="Report unreadable files and go on.")] = False,
    index_only: Annotated[bool, typer.Option(help="Do not compute KV now; questions will.")] = False,
    as_json: AsJson = False,
) -> None:
    """Index documents and compute the KV of their chunks; what is unchanged costs nothing."""
    from ragkv.retrieval import load_documents

    skipped: list[str] = []

    def skip(error: DocumentError) -> None:
        skipped.append(str(error))
        notice(f"skipped: {error}")

    documents = list(load_documents(paths, on_error=skip if skip_unreadable else None))
    if not documents:
        raise InputError(f"No documents in {', '.join(map(str, paths))}: nothing was changed.")
    with (
        Workplace(home, model, config, device, dtype).rag(chunk_tokens) as rag,
        output.progress("embedding") as on_embed,
        output.progress("encoding KV") as on_encode,
    ):
        done = rag.ingest(documents, prune=prune, encode=not index_only, on_embed=on_embed, on_encode=on_encode)
        if rag.index.notice:
            notice(rag.index.notice)
    if done.kv.failed:
        notice(f"{done.kv.failed} entries could not be stored; their chunks will be computed when asked for.")
    if as_json:
        print_json({**output.plain(done), "skipped": skipped})
        return
    index, kv = done.index, done.kv
    parts = {"added": index.added, "changed": index.changed, "unchanged": index.unchanged, "deleted": index.deleted}
    counts = ", ".join(f"{len(ids)} {what}" for what, ids in {**parts, "skipped": skipped}.items() if ids)
    console.print(
        f"Documents: {counts}. "
        f"Chunks: {kv.encoded} encoded, {kv.present} already stored, {done.deleted_entries} dropped."
    )


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    home: Home = HOME,
    model: Model = "reader",
    config: Settings = None,
    device: Device = None,
    dtype: Dtype = None,
    k: Annotated[int, typer.Option("--k", "-k", min=1, help="Passages to retrieve.")] = 6,
    retriever: Annotated[str | None, typer.Option(help="bm25, dense or fused.")] = None,
    where: Annotated[list[str] | None, typer.Option(help="Metadata filter name=value; repeat for more.")] = None,
    ratio: Annotated[float | None, typer.Option(min=0, max=1, help="Recompute ratio.")] = None,
    selector: Annotated[str | None, typer.Option(help="Which tokens are recomputed.")] = None,
    reuse: Annotated[str, typer.Option(help="fused, prefix or none.")] = "fused",
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    as_json: AsJson = False,
) -> None:
    """Answer a question from the ingested documents, with sources and a line on what was reused."""
    _need_home(home)
    how: dict[str, Any] = {"selector": selector, "reuse": reuse, "max_new_tokens": max_new_tokens}
    if ratio is not None:
        how["ratio"] = ratio
    with Workplace(home, model, config, device, dtype).rag() as rag:
        found = rag.ask(question, k, retriever=retriever, where=_filters(where or []), **how)
        if as_json:
            print_json({"question": question, **output.plain(found)})
        else:
            _show(found)
        rag.engine.flush()  # what was missed is encoded for the next question, once this one has its answer


def _show(found: "Sourced") -> None:
    """An answer, its sources, and what was reused."""
    if not found.hits:
        notice("no passage matches; the answer rests on the model alone.")
    console.print(found.answer.text, style="bold")
    cited = {citation.chunk for citation in found.answer.citations}
    for number, hit in enumerate(found.hits):
        mark = "*" if number in cited else " "
        start, end = hit.passage.span
        console.print(f" {mark} [{number + 1}] {hit.passage.source or hit.passage.document_id} ({start}-{end})")
    console.print(output.reuse_line(found.answer), style="dim")
    for note in found.answer.reuse.notes:
        notice(note)


@app.command()
def stats(home: Home = HOME, as_json: AsJson = False) -> None:
    """What the index and the store hold."""
    from ragkv.config import StoreConfig
    from ragkv.retrieval import Index
    from ragkv.store import Store

    _need_home(home)
    with output.quiet("ragkv.retrieval"), Index(home / "index", read_only=True) as index:
        holds = index.stats()  # an index that is only counted needs no embedder
    settings = StoreConfig(directory=str(home / "kv"), memory_bytes=0, read_only=True)
    with Store.open(settings) as store:
        tiers = store.stats().tiers
        tokens = sum(info.tokens for info in store.infos())
    if as_json:
        print_json({"index": output.plain(holds), "tiers": output.plain(tiers), "tokens": tokens})
        return
    console.print(
        f"{holds.documents} documents, {holds.passages} passages, embedder: {holds.embedder or 'none (BM25)'}"
    )
    for tier in tiers:
        console.print(f"{tier.kind.value}: {tier.entries} entries, {tokens} tokens, {output.size(tier.used_bytes)}")


@app.command()
def size(
    model: Annotated[
        str, typer.Argument(help="'reader', a model folder, a hub id or a known shape such as llama-3-8b.")
    ],
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a chunk.")] = 512,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of the corpus.")] = 10_000,
    dtype: Annotated[str, typer.Option(help="dtype the KV would be kept in.")] = "bfloat16",
    codec: Annotated[str, typer.Option(help="How it would be kept: raw, or int8.")] = "raw",
    as_json: AsJson = False,
) -> None:
    """How many bytes the KV of a model takes: per token, per chunk, for a corpus."""
    from ragkv.model.loading import float_dtype, kv_shape
    from ragkv.store import CODECS

    if codec not in CODECS:
        raise ConfigError(f"codec is {codec!r}; it must be one of: {', '.join(CODECS)}.")
    kind, (layers, kv_heads, head_dim) = float_dtype(dtype), kv_shape(model)
    per_chunk = layers * CODECS[codec].layout((2, kv_heads, chunk_tokens, head_dim), kind).nbytes
    numbers = {"token": round(per_chunk / chunk_tokens), "chunk": per_chunk, "corpus": per_chunk * chunks}
    if as_json:
        print_json({"model": model, "dtype": dtype, "codec": codec, "bytes_per": numbers})
        return
    console.print(f"{output.size(numbers['token'])} per token")
    console.print(f"{output.size(numbers['chunk'])} per chunk of {chunk_tokens} tokens")
    console.print(f"{output.size(numbers['corpus'])} for {chunks:,} chunks")


@app.command()
def gc(
    home: Home = HOME, model: Model = "reader", config: Settings = None, device: Device = None, dtype: Dtype = None
) -> None:
    """Drop the KV that other models and gone documents left behind."""
    _need_home(home)
    with Workplace(home, model, config, device, dtype).rag() as rag:
        freed, swept = rag.engine.gc(), rag.sweep()
        console.print(f"{output.size(freed)} of other models freed, {swept} entries without a document dropped.")


@app.command()
def simulate(
    trace: Annotated[str, typer.Option(help="rows.csv, a published trace, or birth-death or sharegpt-like.")],
    policy: Annotated[str, typer.Option(help="Policies, with commas between.")] = "lru,t-lru,t-lru-guarded,tail-belady",
    capacity_blocks: Annotated[int | None, typer.Option(help="Capacity in blocks.")] = None,
    capacity_share: Annotated[float | None, typer.Option(help="Capacity as a share of the peak live blocks.")] = None,
    memory: Annotated[str | None, typer.Option(help="Capacity in bytes, such as 128G.")] = None,
    disk: Annotated[str | None, typer.Option(help="A tier below, in bytes, such as 10T.")] = None,
    xi: Annotated[str | None, typer.Option(help="Threshold: tokens (2000), a TTFT target (200ms), or auto.")] = None,
    xi_blocks: Annotated[int | None, typer.Option(help="Threshold in blocks.")] = None,
    new_blocks: Annotated[int | None, typer.Option(help="Blocks a turn is expected to add [default: the mean]")] = None,
    block_tokens: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
    kv_bytes_per_token: Annotated[int, typer.Option(help="For --memory and --disk; see `ragkv size`.")] = 131_072,
    slo_ms: Annotated[float, typer.Option(help="TTFT above which a request misses.")] = 200.0,
    profile: Annotated[Path | None, typer.Option(help="JSON: token_ms, fixed_ms, load_token_ms.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Only the first so many requests.")] = None,
    forced: Annotated[bool, typer.Option(help="Forced caching: what was just served stays.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a plot here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Replay a trace through eviction policies: hits, TTFT, TEL, beside each other."""
    from ragkv.simulate.command import Options, run

    options = {name: value for name, value in locals().items() if name in Options.__dataclass_fields__}
    run(Options(policies=policy, **options), as_json, console)


@app.command()
def gate(
    model: Annotated[
        str, typer.Argument(envvar="RAGKV_MODEL", help="'reader', a model folder or a hub id.")
    ] = "reader",
    home: Home = HOME,
    config: Settings = None,
    device: Device = None,
    dtype: Dtype = None,
    selector: Annotated[str | None, typer.Option(help="Which tokens are recomputed [default: the settings']")] = None,
    kl: Annotated[float, typer.Option(min=0, help="Tolerance: nats a token, full prefill against fused.")] = 0.05,
    agreement: Annotated[float, typer.Option(min=0, max=1, help="Tolerance: share of tokens foretold alike.")] = 0.95,
    as_json: AsJson = False,
) -> None:
    """Measure from which ratio on fusion is good enough on this model and corpus; engines on this home go by it."""
    from ragkv.calibration.gate import gate as measure
    from ragkv.calibration.gate import save
    from ragkv.fusion.gate_result import Tolerance

    place = Workplace(home, model, config, device, dtype)
    with place.rag() as rag, output.progress("comparing with full prefill") as on_progress:
        own = [rag.chunk(passage) for passage in rag.index.passages()]
        limits = Tolerance(kl, agreement)
        verdict = measure(rag.engine, own, selector=selector, tolerance=limits, on_progress=on_progress)
        save(rag.engine, verdict)
    if as_json:
        print_json({**output.plain(verdict), "ratio": verdict.ratio, "verdict": str(verdict)})
        return
    for point in verdict.points:
        console.print(f"ratio {point.ratio:.2f}: KL {point.kl:.4f}, agreement {point.agreement:.3f}")
    console.print(f"{verdict} ({verdict.contexts} prompts, {verdict.tokens} tokens).")


@app.command()
def demo(
    model: Model = "reader",
    home: Annotated[Path | None, typer.Option(help="Keep index and KV here [default: a temporary folder].")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each timing; the median is shown.")] = 3,
    shape: Annotated[str | None, typer.Option(help="Time this shape too, random weights: qwen2.5-0.5b.")] = None,
    as_json: AsJson = False,
) -> None:
    """Ingest the example corpus and answer its questions four ways: full, exact-prefix, cold and warm fused."""
    from .demo import run

    run(model, home, repeats, shape, as_json)


def _need_home(home: Path) -> None:
    if not (home / "index").is_dir():
        raise InputError(f"Nothing was ingested at {home}: run `ragkv ingest PATH --home {home}` first.")


def _filters(pairs: Sequence[str]) -> dict[str, Any]:
    filters: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--where {pair!r} is not of the form name=value.")
        filters[name] = value
    return filters
