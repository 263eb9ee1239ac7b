"""`ragkv explain`: the loading controller's decision for a question, and its estimates next to measured times."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ragkv.config import ReuseMode
from ragkv.errors import ProfileError

from . import output
from .options import AsJson, EngineOptions, Passages, SelectorName, require_index, with_engine_options
from .output import console, milliseconds, print_json, print_note

if TYPE_CHECKING:
    from ragkv.engine import Engine
    from ragkv.retrieval.rag import Rag


@with_engine_options
def explain(
    question: Annotated[str, typer.Argument(help="The question.")],
    options: EngineOptions,
    k: Passages = 6,
    selector: SelectorName = None,
    as_json: AsJson = False,
) -> None:
    """Explain the recompute ratio, the chunks computed instead of loaded and the cheapest tier; compare the times."""
    require_index(options.home)
    with options.rag(reads=True) as rag:
        found = _explain(rag, question, k, selector)
        rag.engine.flush()
    if as_json:
        print_json(found)
        return
    for sentence in found["decision"]:
        console.print(sentence)
    for note in found["notes"]:
        print_note(note)
    table = Table("", "estimate", "measured")
    for name, (estimate, measured) in found["times_s"].items():
        table.add_row(name, *("" if value is None else milliseconds(value) for value in (estimate, measured)))
    if table.rows:
        console.print(table)


def _explain(rag: "Rag", question: str, k: int, selector: str | None) -> dict[str, Any]:
    """The decision for a question, with the estimated times and the times measured while it was answered."""
    from ragkv.fusion.estimators import recompute_s, ttft_s

    engine = rag.engine
    engine.prefill(question)  # the first prefill of a process is slower than all later ones
    answer = rag.ask(question, k, ratio=None, selector=selector, max_new_tokens=1).answer
    reuse, timing, control = answer.reuse, answer.timing, engine.load_control
    found: dict[str, Any] = {
        "ratio": reuse.ratio,
        "recommended": None,  # not without a profile
        "decision": reuse.decision,
        "notes": reuse.notes,
        "times_s": {},
        "reuse": output.plain(reuse),
    }
    try:
        profile = control.profile
    except ProfileError:
        return found  # a note of the report says that there is no profile
    shape, loads = control.seen(reuse)
    total, without_loading = ttft_s(profile, shape, reuse.ratio, loads), ttft_s(profile, shape, reuse.ratio, [])
    placing = profile.place_token_layer_s * shape.placed_tokens * max(1, profile.layers - 1)
    recompute = recompute_s(profile, reuse.ratio, shape).total_s
    full_s = profile.prefill.at(reuse.tokens)
    return found | {
        "recommended": recommended(total, full_s),
        "decision": (_compare(total, full_s), *reuse.decision, *_kcache(engine, shape.prompt_tokens)),
        "times_s": {
            "waiting for slices": (total - without_loading, timing.load_s),
            "placing": (placing, timing.fuse_s),
            "computing": (recompute - placing + profile.start_s, timing.prefill_s - timing.load_s - timing.fuse_s),
            "first token": (total, timing.first_token_s),
            "first token, full prefill": (full_s, None),
        },
    }


def recommended(fused_s: float, full_s: float) -> ReuseMode:
    """The setting of `reuse` with the earlier first token, by the estimates."""
    return "fused" if fused_s < full_s else "none"


def _compare(fused_s: float, full_s: float) -> str:
    """A sentence that recommends fusing or a full prefill, with both estimates."""
    fused, full = f"fused {milliseconds(fused_s)}", f"full prefill {milliseconds(full_s)}"
    if recommended(fused_s, full_s) == "fused":
        return f"fusing is estimated to be {full_s / fused_s:.1f}x faster to the first token: {fused}, {full}"
    return f"fusing is not faster here by these estimates, use `--reuse none`: {fused}, {full} to the first token"


def _kcache(engine: "Engine", tokens: int) -> tuple[str, ...]:
    """Advice on decoding with V in host memory, if the settings have it."""
    from ragkv.lab.kcache_gain import advise

    if engine.config.kcache is None:
        return ()
    adapter = engine.model.adapter
    group = adapter.config.num_attention_heads // adapter.kv_heads
    return advise(engine.load_control.profile, engine.config.kcache, tokens, group).why
