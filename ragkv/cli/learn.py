"""`ragkv learn`: trains, on the ingested documents, the scores that choose which tokens are recomputed."""

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.runtime import duration

from . import output
from .options import AsJson, EngineOptions, with_engine_options
from .output import console, print_json

if TYPE_CHECKING:
    from ragkv.fusion.learned import ScoreModel
    from ragkv.scheduling.encoding.rescoring import RescoreReport


@with_engine_options
def learn(
    options: EngineOptions,
    steps: Annotated[int, typer.Option(min=1, help="Training steps, each with one prompt of six chunks.")] = 400,
    seed: Annotated[int, typer.Option(help="The same seed and documents give the same network.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train scores on the model's own full prefills of the ingested documents, and score the stored KV with them.

    No KV is computed again or lost. Questions are answered meanwhile, with the scores that were there. Training is in
    float32; `--dtype` is that of the stored KV.
    """
    losses: list[float] = []
    began = time.monotonic()
    network, examples = _trained(replace(options, dtype="float32"), steps, seed, losses)
    trained_s = time.monotonic() - began
    report = _rescored(options, network)
    parts = {"": losses[:steps], "asked_": losses[steps:-steps], "together_": losses[-steps:]}
    if as_json:
        losses_json = {}
        for name, part in parts.items():
            losses_json[f"{name}nats_first"], losses_json[f"{name}nats_last"] = _ends(part)
        times = {"training_s": round(trained_s, 3), "scoring_s": round(time.monotonic() - began - trained_s, 3)}
        stored = output.plain(report)
        print_json({"digest": network.digest, "lessons": examples, **losses_json, **times, "stored": stored})
        return
    alone, asked, together = ("{:.4f} -> {:.4f}".format(*_ends(part)) for part in parts.values())
    console.print(
        f"Trained on {examples} prompts in {steps} steps, {duration(trained_s)}: scores {alone} nats a token; "
        f"attention of questions {asked} nats; both together {together} nats a token."
    )
    console.print(
        f"Stored chunks: {report.scored} scored from their KV, {report.present} scored already, "
        f"{report.unreadable} unreadable, 0 encoded again. The scores are in use. Run `ragkv gate` to measure them."
    )


def _trained(options: EngineOptions, steps: int, seed: int, losses: list[float]) -> "tuple[ScoreModel, int]":
    """The network, and the number of prompts it was trained on."""
    from ragkv.lab.score_training import examples_of, train

    with options.rag() as rag, output.progress("Learning, steps") as show:

        def on_step(done: int, total: int, loss: float) -> None:
            losses.append(loss)
            show(done, total)

        examples = examples_of(rag.chunks())
        return train(rag.engine, examples, steps, seed, on_step), len(examples)


def _rescored(options: EngineOptions, network: "ScoreModel") -> "RescoreReport":
    with options.rag() as rag, output.progress("Scoring stored KV, chunks") as show:
        return rag.engine.entries.rescore(network, rag.chunks(), show)


def _ends(losses: list[float]) -> tuple[float, float]:
    """The means of the first quarter and of the last quarter."""
    part = max(1, len(losses) // 4)
    first, last = (sum(quarter) / len(quarter) for quarter in (losses[:part], losses[-part:]))
    return first, last
