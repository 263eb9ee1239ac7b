"""`ragkv learn`: teach the scores that say which tokens are computed again, on the ingested documents."""

from pathlib import Path
from typing import Annotated

import typer

from ragkv.errors import InputError

from . import output
from .options import HOME, AsJson, Device, Home, Settings
from .output import console, print_json
from .workplace import Workplace


def learn(
    model: Annotated[str, typer.Argument(envvar="RAGKV_MODEL", help="A model folder or a hub id.")],
    home: Home = HOME,
    config: Settings = None,
    device: Device = None,
    steps: Annotated[int, typer.Option(min=1, help="Prompts of six chunks to learn from.")] = 400,
    out: Annotated[Path | None, typer.Option(help="File to write [default: in the model's folder].")] = None,
    seed: Annotated[int, typer.Option(help="The same seed and documents give the same file.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Teach a model's scores on the ingested documents by its own full prefills; later entries are scored by them."""
    from ragkv.calibration.score_training import learn as teach
    from ragkv.calibration.score_training import lessons_of
    from ragkv.fusion.learned import FILE_NAME

    if out is None and not Path(model).is_dir():
        raise InputError(f"{model} is no folder that a file could be put into; give --out FILE.")
    target = out or Path(model) / FILE_NAME
    losses: list[float] = []
    with Workplace(home, model, config, device, "float32").rag() as rag, output.progress("learning") as show:

        def on_step(done: int, total: int, loss: float) -> None:
            losses.append(loss)
            show(done, total)

        lessons = lessons_of([rag.chunk(passage) for passage in rag.index.passages()])
        network = teach(rag.engine, lessons, steps, seed, on_step)
    draft = target.with_name(f"{target.name}.new")
    draft.write_bytes(network.to_bytes())
    draft.replace(target)
    first, last = _ends(losses[:steps])
    asked_first, asked_last = _ends(losses[steps:])
    said = {"file": target, "digest": network.digest, "lessons": len(lessons), "nats_first": first, "nats_last": last}
    said |= {"asked_nats_first": asked_first, "asked_nats_last": asked_last}
    if as_json:
        print_json(said)
        return
    console.print(
        f"Learned from {len(lessons)} prompts in {steps} steps: {first:.4f} -> {last:.4f} nats a token; "
        f"what questions attend to {asked_first:.2f} -> {asked_last:.2f} nats. {target}\n"
        "Chunks are scored by it from now on; ingest again to do it ahead of questions, and measure with `ragkv gate`."
    )


def _ends(losses: list[float]) -> tuple[float, float]:
    """The means of the first and of the last quarter."""
    part = max(1, len(losses) // 4)
    first, last = (sum(some) / len(some) for some in (losses[:part], losses[-part:]))
    return first, last
