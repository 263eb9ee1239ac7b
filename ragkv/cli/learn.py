"""`ragkv learn`: trains, on the ingested documents, the scores that choose which tokens are recomputed."""

import time
from dataclasses import replace
from typing import Annotated

import typer

from ragkv.runtime import duration

from . import output
from .options import AsJson, EngineOptions, with_engine_options
from .output import console, print_json


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
    from ragkv.lab.score_training import examples_of, train

    losses: list[float] = []
    began = time.monotonic()
    with replace(options, dtype="float32").rag() as rag, output.progress("learning, steps") as show:

        def on_step(done: int, total: int, loss: float) -> None:
            losses.append(loss)
            show(done, total)

        examples = examples_of(rag.chunks())
        network = train(rag.engine, examples, steps, seed, on_step)
    training_s = time.monotonic() - began
    with options.rag() as rag, output.progress("scoring stored KV, chunks") as show:
        stored = rag.engine.entries.rescore(network, rag.chunks(), show)
    first, last = (sum(part) / len(part) for part in (losses[:steps], losses[-steps:]))
    if as_json:
        nats = {"nats_first": first, "nats_last": last}
        times = {"training_s": round(training_s, 3), "scoring_s": round(time.monotonic() - began - training_s, 3)}
        print_json({"digest": network.digest, "lessons": len(examples), **nats, **times, "stored": stored})
        return
    console.print(
        f"Trained on {len(examples)} prompts in {steps} steps, {duration(training_s)}: mean loss {first:.4f} nats a "
        f"token with scores alone, {last:.4f} at last, with what a question adds."
    )
    console.print(
        f"Stored chunks: {stored.scored} scored from their KV, {stored.present} scored already, "
        f"{stored.unreadable} unreadable, 0 encoded again. The scores are in use. Run `ragkv gate` to measure them."
    )
