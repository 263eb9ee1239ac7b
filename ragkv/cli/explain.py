"""`ragkv explain`: the loading controller's decision for a question, or for a request described by its size."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from ragkv.config import ReuseMode
from ragkv.errors import InputError, ProfileError

from . import output
from .options import AsJson, EngineOptions, Passages, SelectorName, require_index, with_engine_options
from .output import console, milliseconds, print_json, print_note

if TYPE_CHECKING:
    from ragkv.engine import Engine
    from ragkv.lab.break_even import Kind
    from ragkv.retrieval.rag import Rag


TierName = Literal["memory", "disk", "redis", "s3"]
USES_CHUNKS = 6  # An entry's uses are counted in prompts of so many chunks.


@with_engine_options
def explain(
    options: EngineOptions,
    question: Annotated[str | None, typer.Argument(help="The question; without one, describe a request.")] = None,
    chunks: Annotated[int | None, typer.Option(min=1, help="Described request: its chunks.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Described request: tokens of each chunk.")] = 512,
    tier: Annotated[TierName, typer.Option(help="Described request: the tier of its chunks.")] = "disk",
    question_tokens: Annotated[int, typer.Option(min=1, help="Described request: tokens of its question.")] = 32,
    k: Passages = 6,
    selector: SelectorName = None,
    as_json: AsJson = False,
) -> None:
    """Explain the recompute ratio, the chunks computed instead of loaded and the cheapest tier; compare the times."""
    if (question is None) == (chunks is None):
        raise InputError('Give a question, `ragkv explain "Who ...?"`, or a description: `--chunks 6 --tokens 512`.')
    if question is None:
        assert chunks is not None
        with options.engine(reads=True) as engine:
            found = _explain_description(engine, chunks, tokens, tier, question_tokens, selector)
    else:
        require_index(options.home)
        with options.rag(reads=True) as rag:
            found = _explain_question(rag, question, k, selector)
            rag.engine.flush()
    if as_json:
        print_json(found)
        return
    for sentence in found["decision"]:
        console.print(sentence)
    for note in found["notes"]:
        print_note(note)
    if found["break_even"]:
        console.print(_break_even_sentence(found["break_even"]))
    table = Table("", "estimate", "measured")
    for name, (estimate, measured) in found["times_s"].items():
        table.add_row(name, *("" if value is None else milliseconds(value) for value in (estimate, measured)))
    if table.rows:
        console.print(table)
    for name, usd in found["usd_a_month"].items():
        console.print(f"stored in {name}: ${usd:.2g} a month", style="dim")


def _explain_description(
    engine: "Engine", chunks: int, tokens: int, tier: str, question_tokens: int, selector: str | None
) -> dict[str, Any]:
    """The decision for a request of equal chunks. The first chunk follows the prefix directly, so it is exact."""
    from ragkv.fusion.controller import decide
    from ragkv.fusion.estimators import Load, Shape, load_s, recompute_s
    from ragkv.lab.break_even import Kind
    from ragkv.prompt import selection_of

    control, how = engine.load_control, engine.intake.method({"ratio": None, "selector": selector})
    profile = control.profile
    loads = [Load(tier, tokens, fused=number > 0) for number in range(chunks)]
    shape = Shape((chunks - 1) * tokens, question_tokens, chunks * tokens + question_tokens, selection_of(how.selector))
    decision = decide(profile, shape, loads, how.ratio, control.prices)
    full_s = profile.prefill.at(shape.prompt_tokens)
    return {
        "recommended": recommended(decision.ttft_s, full_s),
        "ratio": decision.ratio,
        "computed_chunks": decision.computed,
        "tier": decision.tier,
        "decision": (_compare(decision.ttft_s, full_s), *decision.why, *_kcache(engine, shape.prompt_tokens)),
        "notes": how.notes,
        "break_even": _break_even(engine, Kind(tier, how.ratio, tokens, question_tokens, shape.selection)),
        "times_s": {
            "a layer: loading all": (load_s(profile, loads).layer_s, None),
            f"a layer: recompute at r* = {how.ratio:.0%}": (recompute_s(profile, how.ratio, shape).layer_s, None),
            f"first token, at {decision.ratio:.0%}": (decision.ttft_s, None),
            "first token, full prefill": (full_s, None),
        },
        "usd_a_month": _costs(engine, chunks * tokens),
    }


def _explain_question(rag: "Rag", question: str, k: int, selector: str | None) -> dict[str, Any]:
    """The decision for a question, with the estimated times and the times measured while it was answered."""
    from ragkv.fusion.estimators import recompute_s, ttft_s
    from ragkv.lab.break_even import Kind

    engine = rag.engine
    engine.prefill(question)  # the first prefill of a process is slower than all later ones
    answer = rag.ask(question, k, ratio=None, selector=selector, max_new_tokens=1).answer
    reuse, timing = answer.reuse, answer.timing
    found: dict[str, Any] = {
        "ratio": reuse.ratio,
        "recommended": None,  # not without a profile
        "decision": reuse.decision,
        "notes": reuse.notes,
        "break_even": None,
        "times_s": {},
        "usd_a_month": {},
        "reuse": output.plain(reuse),
    }
    try:
        profile = engine.load_control.profile
    except ProfileError:
        return found  # a note of the report says that there is no profile
    shape, loads = engine.load_control.seen(reuse)
    total, without_loading = ttft_s(profile, shape, reuse.ratio, loads), ttft_s(profile, shape, reuse.ratio, [])
    placing = profile.place_token_layer_s * shape.placed_tokens * max(1, profile.layers - 1)
    recompute = recompute_s(profile, reuse.ratio, shape).total_s
    full_s = profile.prefill.at(reuse.tokens)
    found["recommended"] = recommended(total, full_s)
    found["decision"] = (_compare(total, full_s), *reuse.decision, *_kcache(engine, shape.prompt_tokens))
    found["times_s"] = {
        "waiting for slices": (total - without_loading, timing.load_s),
        "placing": (placing, timing.fuse_s),
        "computing": (recompute - placing + profile.start_s, timing.prefill_s - timing.load_s - timing.fuse_s),
        "first token": (total, timing.first_token_s),
        "first token, full prefill": (full_s, None),
    }
    found["usd_a_month"] = _costs(engine, sum(load.tokens for load in loads))
    if chunks := [span for span in answer.spans if span.chunk is not None]:
        tier = max(loads, key=lambda load: load.tokens).tier if loads else "memory"
        longest = max(span.tokens for span in chunks)
        question_tokens = reuse.tokens - sum(span.tokens for span in chunks)
        ratio = engine.intake.method({"ratio": None, "selector": selector}).ratio
        found["break_even"] = _break_even(engine, Kind(tier, ratio, longest, question_tokens, shape.selection))
    return found


def recommended(fused_s: float, full_s: float) -> ReuseMode:
    """The setting of `reuse` with the earlier first token, by the estimates."""
    return "fused" if fused_s < full_s else "none"


def _compare(fused_s: float, full_s: float) -> str:
    """A sentence that recommends fusing or a full prefill, with both estimates."""
    fused, full = f"fused {milliseconds(fused_s)}", f"full prefill {milliseconds(full_s)}"
    if recommended(fused_s, full_s) == "fused":
        return f"fusing is estimated to be {full_s / fused_s:.1f}x faster to the first token: {fused}, {full}"
    return f"fusing is not faster here by these estimates, use `--reuse none`: {fused}, {full} to the first token"


def _break_even(engine: "Engine", kind: "Kind") -> dict[str, Any]:
    """From how many tokens on requests of a kind gain by fusing, and after how many uses an entry is paid for."""
    from ragkv.fusion.estimators import recompute_ttft_s, ttft_s
    from ragkv.lab.break_even import least_tokens, request, uses_until_paid

    profile, passes = engine.load_control.profile, engine.entries.encoder.passes
    shape, loads = request(kind, USES_CHUNKS * kind.chunk_tokens)
    gain_s = recompute_ttft_s(profile, shape, loads) - ttft_s(profile, shape, kind.ratio, loads)
    return {
        "tokens": least_tokens(profile, kind),
        "tier": kind.tier,
        "ratio": kind.ratio,
        "entry_tokens": kind.chunk_tokens,
        "uses": uses_until_paid(profile, kind.chunk_tokens, passes, gain_s / (USES_CHUNKS - 1)),
    }


def _break_even_sentence(found: dict[str, Any]) -> str:
    """Both numbers in a sentence."""
    at = f"from {found['tier']} at {found['ratio']:.0%}"
    pays = (
        f"fusing does not pay here at any length {at}"
        if found["tokens"] is None
        else f"fusing pays here from about {found['tokens']} tokens of chunks on, {at}"
    )
    entry = f"an entry of {found['entry_tokens']} tokens"
    if found["uses"] is None:
        return f"{pays}; {entry} never saves the time it took to make"
    return f"{pays}; {entry} has saved the time it took to make after {found['uses']} uses in prompts of {USES_CHUNKS}"


def _kcache(engine: "Engine", tokens: int) -> tuple[str, ...]:
    """Advice on decoding with V in host memory, if the settings have it."""
    from ragkv.lab.kcache_gain import advise

    if engine.config.kcache is None:
        return ()
    adapter = engine.model.adapter
    group = adapter.config.num_attention_heads // adapter.kv_heads
    return advise(engine.load_control.profile, engine.config.kcache, tokens, group).why


def _costs(engine: "Engine", tokens: int) -> dict[str, float]:
    """USD a month for storing `tokens` tokens, by tier."""
    from ragkv.fusion.estimators import storage_cost

    control = engine.load_control
    return {name: storage_cost(control.profile, tokens, name, control.prices) for name in control.profile.tiers}
