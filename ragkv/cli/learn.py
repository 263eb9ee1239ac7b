"""`ragkv learn`: trains, on the ingested documents, the scores that choose which tokens are recomputed."""

from pathlib import Path
from typing import Annotated

import typer

from ragkv.errors import InputError

from . import output
from .options import HOME, AsJson, Device, EngineOptions, Home, Settings
from .output import console, print_json


def learn(
    model: Annotated[str, typer.Argument(envvar="RAGKV_MODEL", help="A model folder or a hub id.")],
    home: Home = HOME,
    config: Settings = None,
    device: Device = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps, each with one prompt of six chunks.")] = 400,
    out: Annotated[Path | None, typer.Option(help="File to write.", show_default="in the model folder")] = None,
    seed: Annotated[int, typer.Option(help="The same seed and documents give the same file.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train a model's scores from its own full prefills of the ingested documents. Later entries are scored by them."""
    from ragkv.calibration.score_training import examples_of, train
    from ragkv.fusion.learned import FILE_NAME

    if out is None and not Path(model).is_dir():
        raise InputError(f"{model} is not a folder, so the file cannot be put into it. Give --out FILE.")
    target = out or Path(model) / FILE_NAME
    losses: list[float] = []
    with EngineOptions(home, model, config, device, "float32").rag() as rag, output.progress("learning") as show:

        def on_step(done: int, total: int, loss: float) -> None:
            losses.append(loss)
            show(done, total)

        examples = examples_of(rag.chunks())
        network = train(rag.engine, examples, steps, seed, on_step)
    draft = target.with_name(f"{target.name}.new")
    draft.write_bytes(network.to_bytes())
    draft.replace(target)
    first, last = _ends(losses[:steps])
    question_first, question_last = _ends(losses[steps:])
    if as_json:
        losses_json = {"nats_first": first, "nats_last": last}
        losses_json |= {"asked_nats_first": question_first, "asked_nats_last": question_last}
        print_json({"file": target, "digest": network.digest, "lessons": len(examples), **losses_json})
        return
    console.print(
        f"Trained on {len(examples)} prompts in {steps} steps: {first:.4f} -> {last:.4f} nats a token; "
        f"attention of questions {question_first:.2f} -> {question_last:.2f} nats. Written to {target}.\n"
        "New entries are scored by it. Run `ragkv ingest` to score all chunks now, and `ragkv gate` to measure it."
    )


def _ends(losses: list[float]) -> tuple[float, float]:
    """The means of the first quarter and of the last quarter."""
    part = max(1, len(losses) // 4)
    first, last = (sum(quarter) / len(quarter) for quarter in (losses[:part], losses[-part:]))
    return first, last
