"""Trains the reader from a seed: curriculum, auxiliary losses, learning rate decay, checkpoints to
resume from.

    python -m training.train --seed 2 --minutes 60 --compile --out runs/reader

Progress is the share of the minutes used (over all resumed parts), so a slower machine sees fewer
worlds but the whole curriculum; with `--steps` it is the share of the steps, whatever the machine
and its load. Every few minutes the weights are exported as a transformers folder next to the
checkpoint.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from training.batches import ATTENTION_TARGETS, AUXILIARY_HEADS, IGNORE, Batch, Stream
from training.model import Block, Reader, Shape, bias, export
from training.optimizer import Optimizer, Rates
from training.tokenizer import build

# `STAGES` is the curriculum: the progress at which each stage ends, and its mix of levels. Each
# stage is a new stream.
STAGES: tuple[tuple[float, dict[int, float]], ...] = (
    (0.05, {0: 1.0}),
    (0.14, {0: 0.2, 1: 0.8}),
    (0.30, {1: 0.3, 2: 0.7}),
    (0.55, {1: 0.1, 2: 0.5, 3: 0.4}),
    (0.88, {2: 0.35, 3: 0.65}),
    (1.01, {2: 0.2, 3: 0.6, 4: 0.2}),
)
WARMUP_STEPS = 60
DECAY_FROM = 0.45
AUXILIARY_WEIGHTS = {
    "previous": 0.2,
    "reference": 0.3,
    "subject": 0.3,
    "object": 0.2,
    "bridge": 0.3,
    "asked": 0.2,
    "described": 0.3,
}


@dataclass
class Progress:
    """The progress of a run, as saved in its checkpoint."""

    step: int = 0
    worlds: int = 0
    tokens: int = 0
    answers: int = 0
    seconds: float = 0.0


def rate(step: int, progress: float) -> float:
    """The share of the peak learning rate: warmup, constant, then linear decay to 2 %."""
    down = 1.0 if progress < DECAY_FROM else max(0.0, (1 - progress) / (1 - DECAY_FROM))
    return min(1.0, (step + 1) / WARMUP_STEPS) * (0.02 + 0.98 * down)


def auxiliary_weights(progress: float) -> tuple[float, float]:
    """The weights of the auxiliary heads and of the attention targets: largest early, when answers
    teach little yet.
    """
    return (1.0 if progress < 0.8 else 0.5), max(0.08, 0.4 * (1 - progress / 0.75))


def losses(
    reader: Reader, batch: Batch, auxiliary: float, attention: float
) -> tuple[Tensor, dict[str, float]]:
    """The loss of a batch, and the values to log."""
    with torch.autocast("cpu", torch.bfloat16):
        mask = bias(batch.branch, torch.bfloat16)
        hidden, tapped = reader(batch.ids, batch.positions, mask, torch.float32)
        learned = batch.targets != IGNORE
        logits = reader.logits(hidden[learned])
        targets = batch.targets[learned]
        total = F.cross_entropy(logits, targets)
        shown = {
            "loss": total.item(),
            "accuracy": (logits.argmax(-1) == targets).float().mean().item(),
        }
        for number, name in enumerate(AUXILIARY_HEADS):
            labels = batch.labels[batch.labels[:, 0] == number]
            if not len(labels) or not auxiliary:
                continue
            at = tapped[reader.auxiliary_layers[name]][labels[:, 1], labels[:, 2]]
            for piece in (0, 1) if name != "previous" else (0,):
                guessed = reader.auxiliary_logits(number, piece, at)
                total = total + auxiliary * AUXILIARY_WEIGHTS[name] * F.cross_entropy(
                    guessed, labels[:, 3 + piece]
                )
                shown[name] = (guessed.argmax(-1) == labels[:, 3 + piece]).float().mean().item()
        for number, name in enumerate(ATTENTION_TARGETS):
            marked = batch.attention_targets[batch.attention_targets[:, 0] == number]
            if len(marked) and attention:
                weights = reader.attention_log_weights(
                    name, tapped, batch.positions, mask, marked[:, 1:3]
                )
                seen = (
                    weights.gather(1, marked[:, 3:]).logsumexp(-1)
                    - (marked[:, 3] == marked[:, 4]) * 0.6931
                )
                total = total - (0.3 if name == "older" else attention) * seen.mean()
                shown[f"attention {name}"] = seen.exp().mean().item()
    return total, shown


class Run:
    """One training run, its folder and its log."""

    def __init__(
        self, out: Path, shape: Shape, seed: int, rates: Rates, rank: int, workers: int
    ) -> None:
        self.out = out
        self.seed = seed
        self.shape = shape
        self.rank = rank
        self.workers = workers
        torch.manual_seed(seed)
        self.reader = Reader(shape)
        self.optimizer = Optimizer(self.reader, rates)
        self.progress = Progress()
        out.mkdir(parents=True, exist_ok=True)

    def average_gradients(self) -> None:
        """Averages the gradients over the workers, so that all take the same step."""
        if self.workers == 1:
            return
        parameters = [
            parameter for parameter in self.reader.parameters() if parameter.grad is not None
        ]
        flat = torch.cat(
            [parameter.grad.flatten() for parameter in parameters if parameter.grad is not None]
        )
        dist.all_reduce(flat)
        flat /= self.workers
        for parameter, part in zip(
            parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True
        ):
            parameter.grad = part.view_as(parameter)

    def resume(self) -> None:
        """Resumes from the folder's checkpoint, if it has one."""
        path = self.out / "checkpoint.pt"
        if path.exists():
            checkpoint = torch.load(path, weights_only=True)
            self.reader.load_state_dict(checkpoint["reader"])
            self.optimizer.load(checkpoint["optimizer"])
            self.progress = Progress(**checkpoint["progress"])

    def save(self) -> None:
        """Writes checkpoint and export, each atomically. Only worker 0 writes."""
        if self.rank:
            return
        checkpoint = {
            "reader": self.reader.state_dict(), "optimizer": self.optimizer.state(),
            "progress": vars(self.progress), "shape": asdict(self.shape), "seed": self.seed,
        }  # fmt: skip
        torch.save(checkpoint, self.out / "checkpoint.new")
        (self.out / "checkpoint.new").replace(self.out / "checkpoint.pt")
        save_reader(self.reader, self.out / "export")

    def log(self, values: dict[str, float]) -> None:
        """Prints the values and appends them to log.jsonl. Only worker 0 logs, from its own share
        of the batch.
        """
        if self.rank:
            return
        p = self.progress
        line = {
            "step": p.step,
            "minutes": round(p.seconds / 60, 2),
            "tokens": p.tokens,
            **{k: round(v, 4) for k, v in values.items()},
        }
        with (self.out / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        print("  ".join(f"{name} {value}" for name, value in line.items()), flush=True)


def save_reader(reader: Reader, folder: Path) -> None:
    """Writes a folder that transformers loads: config, bf16 weights, tokenizer, generation
    settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config, weights = export(reader)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        **config,
    }
    generation = {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "do_sample": False,
        "max_new_tokens": 16,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    half = {name: value.to(torch.bfloat16).clone() for name, value in weights.items()}
    save_file(half, str(folder / "model.new"), metadata={"format": "pt"})
    (folder / "model.new").replace(folder / "model.safetensors")
    (folder / "model.safetensors").chmod(0o644)
    build().save_pretrained(str(folder))


def train(
    run: Run, minutes: float, steps: int | None, tokens: int, export_minutes: float, stop: float
) -> None:
    """Trains until the minutes (or the steps, if given) are used, or `stop` of them."""
    p = run.progress
    saved = time.monotonic()
    clock = Clock(run)

    def used() -> float:
        return p.step / steps if steps else clock.minutes / minutes

    sums: dict[str, list[float]] = defaultdict(list)
    for end, mix in STAGES:
        if used() >= min(end, stop):
            continue
        start = p.worlds - p.worlds % run.workers + run.rank
        stream = Stream(run.seed, mix, tokens // run.workers, start, run.workers)
        for batch in torch.utils.data.DataLoader(
            stream, batch_size=None, num_workers=1, prefetch_factor=8
        ):
            progress = used()
            loss, shown = losses(run.reader, batch, *auxiliary_weights(progress))
            torch.autograd.backward(loss)
            run.average_gradients()
            nn.utils.clip_grad_norm_(run.reader.parameters(), 1.0)
            run.optimizer.step(rate(p.step, progress))
            p.step, p.worlds, p.tokens = (
                p.step + 1,
                batch.worlds,
                p.tokens + batch.ids.numel() * run.workers,
            )
            p.answers += int((batch.targets != IGNORE).sum()) * run.workers
            clock.tick()
            for name, value in shown.items():
                sums[name].append(value)
            if p.step % 25 == 0:
                run.log({name: sum(values) / len(values) for name, values in sums.items()})
                sums.clear()
            if time.monotonic() - saved > 60 * export_minutes:
                run.save()
                saved = time.monotonic()
            if used() >= min(end, stop, 1.0):
                break
    run.save()


class Clock:
    """Minutes trained, the same for all workers: they take the time of worker 0."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._before = run.progress.seconds
        self._begun = time.monotonic()

    @property
    def minutes(self) -> float:
        """Minutes trained up to the last step."""
        return self._run.progress.seconds / 60

    def tick(self) -> None:
        """Reads the clock; every worker waits for the time of worker 0."""
        seconds = torch.tensor(self._before + time.monotonic() - self._begun, dtype=torch.float64)
        if self._run.workers > 1:
            dist.broadcast(seconds, 0)
        self._run.progress.seconds = float(seconds)


def _shape(options: argparse.Namespace) -> Shape:
    return Shape(
        vocabulary=len(build()),
        hidden=options.hidden,
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.kv_heads,
        inner=2 * options.hidden,
    )


def worker(rank: int, options: argparse.Namespace) -> None:
    """Runs one worker process."""
    torch.set_num_threads(options.threads)
    if options.workers > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{options.out.resolve()}/rendezvous",
            rank=rank,
            world_size=options.workers,
        )
    run = Run(options.out, _shape(options), options.seed, Rates(), rank, options.workers)
    run.resume()
    if options.compile:
        torch._dynamo.config.cache_size_limit = 64
        Block.forward = torch.compile(Block.forward, dynamic=False)  # type: ignore[method-assign]
    train(run, options.minutes, options.steps, options.tokens, options.export_minutes, options.stop)


def main() -> None:
    """Train the reader, or resume its training."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--steps", type=int, help="count progress in steps, not in minutes")
    parser.add_argument(
        "--stop", type=float, default=1.0, help="stop after this share of the minutes or steps"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/reader"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--tokens", type=int, default=4000, help="tokens per step, of all workers together"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads per worker")
    parser.add_argument(
        "--workers",
        type=int,
        default=2,
        help="processes that share a step; faster than threads here",
    )
    parser.add_argument("--export-minutes", type=float, default=8)
    parser.add_argument("--hidden", type=int, default=160)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument(
        "--compile", action="store_true", help="needs a C++ compiler; about a third faster"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "rendezvous").unlink(missing_ok=True)
    if options.workers == 1:
        worker(0, options)
    else:
        spawn(worker, (options,), nprocs=options.workers)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
