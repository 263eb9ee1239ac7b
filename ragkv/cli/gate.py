"""`ragkv gate`: the fastest setting that stays close to full recompute on this corpus and
machine.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from . import output
from .options import AsJson, EngineOptions, Passages, with_engine_options
from .output import console, print_json, print_note

if TYPE_CHECKING:
    from ragkv.control.gate_result import GateResult, Tolerance
    from ragkv.rag import Rag


Questions = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        show_default="pieces of the documents",
        help="Measure on the answers to these: one a line, or JSON lines with the field question.",
    ),
]
Tried = Annotated[
    list[str] | None,
    typer.Option(
        "--selector",
        help="Try only this selector; repeatable.",
        show_default="the settings' and others",
        metavar="NAME",
    ),
]
Differing = Annotated[
    float,
    typer.Option(
        "--tolerance",
        min=0,
        max=1,
        help="Share of the predictions that may differ from full recompute's.",
    ),
]
Divergence = Annotated[
    float,
    typer.Option("--kl", min=0, help="KL to full recompute that is tolerated, nats per token."),
]
Minutes = Annotated[float, typer.Option(min=0, help="About how long to measure at most.")]
Apply = Annotated[
    bool, typer.Option("--apply", help="Keep the answer: engines on this home use it.")
]


@with_engine_options
def gate(
    options: EngineOptions,
    k: Passages = 6,
    questions: Questions = None,
    selector: Tried = None,
    tolerance: Differing = 0.02,
    kl: Divergence = 0.05,
    minutes: Minutes = 5.0,
    apply: Apply = False,
    as_json: AsJson = False,
) -> None:
    """Find the fastest setting within 2 % of full recompute on this corpus, and how fast it is on
    this machine.
    """
    from ragkv.control.gate_result import Tolerance
    from ragkv.lab.gate import save

    with options.rag() as rag:
        tolerated = Tolerance(1.0 - tolerance, kl)
        result = _measured(rag, k, questions, selector or (), tolerated, 60.0 * minutes)
        file = save(rag.engine, result) if apply else None
    if as_json:
        head = {"headline": str(result), "answer": result.answer, "applied": apply}
        print_json({**head, **asdict(result)})
        return
    _show(result)
    if apply:
        console.print(
            f"saved in {file}: engines on this home use it where a request names no other",
            style="dim",
        )
    else:
        print_note("nothing was changed; `ragkv gate --apply` keeps the answer.")


def _measured(
    rag: "Rag",
    k: int,
    questions: Path | None,
    selectors: Sequence[str],
    tolerance: "Tolerance",
    limit_s: float,
) -> "GateResult":
    """Make prompts of a corpus, and compare settings on them with full recompute."""
    from ragkv.lab.gate import gate as measure
    from ragkv.lab.gate_prompts import gate_prompts, read_questions

    with output.working("making prompts"):
        probes = gate_prompts(rag, k, () if questions is None else read_questions(questions))
    source = "retrieved passages" if questions is None else "questions, with the passages they find"
    with output.progress("comparing with full recompute") as on_progress:
        return measure(
            rag.engine,
            probes,
            source=source,
            selectors=selectors,
            tolerance=tolerance,
            limit_s=limit_s,
            on_progress=on_progress,
        )


def _show(result: "GateResult") -> None:
    """The sentence, then all settings, the fastest first."""
    from ragkv.control.gate_result import share

    console.print(f"{result}.", style="bold")
    table = Table("selector", "ratio", "prompts", "sooner", "agreement", "KL", "within", box=None)
    again = [("again", point) for point in result.confirmations]
    for name, point in [
        ("", one) for one in sorted(result.points, key=lambda one: -one.sooner)
    ] + again:
        table.add_row(
            f"{point.selector} {name}",
            share(point.ratio),
            str(point.prompts),
            f"{point.sooner:.1f}x",
            f"{share(point.agreement, 3)} ({share(point.agreement_bound, 3)})",
            f"{share(point.kl, 3)} ({share(point.kl_bound, 3)})",
            "yes" if point.keeps(result.tolerance) else "no",
        )
    console.print(table)
    limits = (
        f"agreement from {share(result.tolerance.agreement, 3)}, KL up to "
        f"{share(result.tolerance.kl, 3)}"
    )
    lines = [
        f"prompts of {result.source}; in brackets the 95 % bounds; within: {limits}, by these "
        "bounds"
    ]
    if result.left_out:
        what = f"prompts longer than the model's context were left out: {result.left_out}"
        lines.append(f"{what}; give fewer passages (-k) to measure them, too")
    for line in (*lines, result.machine):
        console.print(line, style="dim")
