"""`ragkv explain`: what the loading controller decides for a question, or for a request that is only described."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ragkv.errors import InputError

from . import output
from .options import HOME, AsJson, Device, Dtype, Home, Model, Settings
from .output import console, milliseconds, print_json
from .workplace import Workplace, notice

if TYPE_CHECKING:
    from ragkv.engine import Engine
    from ragkv.rag import Rag

QUESTION_TOKENS = 32


def explain(
    question: Annotated[str | None, typer.Argument(help="The question; none to describe a request instead.")] = None,
    chunks: Annotated[int | None, typer.Option(min=1, help="Of a described request: its chunks.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Of a described request: tokens of a chunk.")] = 512,
    tier: Annotated[str, typer.Option(help="Of a described request: where its chunks lie.")] = "disk",
    question_tokens: Annotated[int, typer.Option(min=1, help="Of a described request.")] = QUESTION_TOKENS,
    home: Home = HOME,
    model: Model = "reader",
    config: Settings = None,
    device: Device = None,
    dtype: Dtype = None,
    k: Annotated[int, typer.Option("--k", "-k", min=1, help="Passages to retrieve.")] = 6,
    selector: Annotated[str | None, typer.Option(help="Which tokens are recomputed [default: the settings']")] = None,
    as_json: AsJson = False,
) -> None:
    """Why this ratio, which chunks are computed rather than loaded, which tier is cheapest; estimates beside times."""
    if (question is None) == (chunks is None):
        raise InputError(
            'Give a question, `ragkv explain "Who ...?"`, or describe a request: `--chunks 6 --tokens 512`.'
        )
    place = Workplace(home, model, config, device, dtype)
    if question is None:
        assert chunks is not None
        with place.engine() as engine:
            found = _described(engine, chunks, tokens, tier, question_tokens, selector)
    else:
        if not (home / "index").is_dir():
            raise InputError(f"Nothing was ingested at {home}: run `ragkv ingest PATH --home {home}` first.")
        with place.rag() as rag:
            found = _asked(rag, question, k, selector)
            rag.engine.flush()
    if as_json:
        print_json(found)
        return
    for sentence in found["decision"]:
        console.print(sentence)
    for note in found["notes"]:
        notice(note)
    table = Table("", "estimate", "measured")
    for name, (estimate, measured) in found["times_s"].items():
        table.add_row(name, *("" if value is None else milliseconds(value) for value in (estimate, measured)))
    if table.rows:
        console.print(table)
    for name, usd in found["usd_a_month"].items():
        console.print(f"kept in {name}: ${usd:.2g} a month", style="dim")


def _described(
    engine: "Engine", chunks: int, tokens: int, tier: str, question_tokens: int, selector: str | None
) -> dict[str, Any]:
    """The decision on a request of equal chunks, the first one right behind the prefix and so exact."""
    from ragkv.fusion.controller import decide
    from ragkv.fusion.estimators import Load, Shape, load_s, recompute_s
    from ragkv.inference import selection_of

    profile, how = engine.parts.load_control.profile, engine.parts.intake.how(None, selector, "fused")
    loads = [Load(tier, tokens, fused=number > 0) for number in range(chunks)]
    fused = (chunks - 1) * tokens
    shape = Shape(fused, question_tokens, chunks * tokens + question_tokens, selection_of(how.selector))
    decision = decide(profile, shape, loads, how.ratio, engine.parts.load_control.prices)
    times = {
        "a layer: loading all": load_s(profile, loads).layer_s,
        f"a layer: recompute at r* = {how.ratio:.0%}": recompute_s(profile, how.ratio, shape).layer_s,
        f"first token, at {decision.ratio:.0%}": decision.ttft_s,
        "first token, full prefill": profile.prefill.at(shape.prompt_tokens),
    }
    return {
        "ratio": decision.ratio,
        "computed_chunks": decision.computed,
        "tier": decision.tier,
        "decision": (*decision.why, *_kcache(engine, shape.prompt_tokens)),
        "notes": how.notes,
        "times_s": {name: (seconds, None) for name, seconds in times.items()},
        "usd_a_month": _costs(engine, chunks * tokens),
    }


def _asked(rag: "Rag", question: str, k: int, selector: str | None) -> dict[str, Any]:
    """The decision on a question, and its estimates beside what was measured while it was answered."""
    from ragkv.errors import ProfileError
    from ragkv.fusion.estimators import recompute_s, ttft_s

    engine = rag.engine
    engine.prefill(question)  # the first pass of a process pays for things that no request after it pays for
    answer = rag.ask(question, k, ratio=None, selector=selector, max_new_tokens=1).answer
    reuse, timing = answer.reuse, answer.timing
    found: dict[str, Any] = {
        "ratio": reuse.ratio,
        "decision": reuse.decision,
        "notes": reuse.notes,
        "times_s": {},
        "usd_a_month": {},
        "reuse": output.plain(reuse),
    }
    try:
        profile = engine.parts.load_control.profile
    except ProfileError:
        return found  # a note of the report says so
    shape, loads = engine.parts.load_control.seen(reuse)
    found["decision"] = (*reuse.decision, *_kcache(engine, shape.prompt_tokens))
    whole, unwaiting = ttft_s(profile, shape, reuse.ratio, loads), ttft_s(profile, shape, reuse.ratio, [])
    placing = profile.place_token_layer_s * shape.placed_tokens * max(1, profile.layers - 1)
    recompute = recompute_s(profile, reuse.ratio, shape).total_s
    found["times_s"] = {
        "waiting for slices": (whole - unwaiting, timing.load_s),
        "placing": (placing, timing.fuse_s),
        "computing": (recompute - placing + profile.start_s, timing.prefill_s - timing.load_s - timing.fuse_s),
        "first token": (whole, timing.first_token_s),
        "first token, full prefill": (profile.prefill.at(reuse.tokens), None),
    }
    found["usd_a_month"] = _costs(engine, sum(load.tokens for load in loads))
    return found


def _kcache(engine: "Engine", tokens: int) -> tuple[str, ...]:
    """Whether decoding with V in host memory pays, if the settings have it."""
    from ragkv.fusion.kcache_gain import advise

    if engine.config.kcache is None:
        return ()
    adapter = engine.parts.adapter
    group = adapter.config.num_attention_heads // adapter.kv_heads
    return advise(engine.parts.load_control.profile, engine.config.kcache, tokens, group).why


def _costs(engine: "Engine", tokens: int) -> dict[str, float]:
    """USD a month of keeping so many tokens, by tier."""
    from ragkv.fusion.estimators import HOURS_PER_MONTH, storage_cost

    control = engine.parts.load_control
    return {
        name: storage_cost(control.profile, tokens, name, control.prices, HOURS_PER_MONTH)
        for name in control.profile.tiers
    }
