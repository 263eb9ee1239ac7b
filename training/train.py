"""Makes the reader's weights from a seed: curriculum, throwaway heads, decay to the end, checkpoints to go on from.

    python -m training.train --seed 2 --minutes 60 --compile --out runs/reader

Progress is the share of the minutes used (over all resumed parts), so a slower machine sees fewer worlds but the whole
curriculum. Every few minutes the weights are exported as a transformers folder beside the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from training.batches import HEADS, IGNORE, LOOKS, Batch, Stream
from training.model import Block, Reader, Shape, as_record, bias, export
from training.optimizer import Optimizer
from training.tokenizer import build

# Progress up to which a mix of levels holds; a stage is a stream of its own.
STAGES: tuple[tuple[float, dict[int, float]], ...] = (
    (0.05, {0: 1.0}),
    (0.14, {0: 0.2, 1: 0.8}),
    (0.30, {1: 0.3, 2: 0.7}),
    (0.55, {1: 0.1, 2: 0.5, 3: 0.4}),
    (0.88, {2: 0.35, 3: 0.65}),
    (1.01, {2: 0.2, 3: 0.6, 4: 0.2}),
)
WARMUP_STEPS, DECAY_FROM = 60, 0.45
HEAD_WEIGHTS = {
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
    """How far a run has come."""

    step: int = 0
    worlds: int = 0
    tokens: int = 0
    answers: int = 0
    seconds: float = 0.0


def rate(step: int, progress: float) -> float:
    """The learning rate's share: warmup, flat, then down to nought."""
    down = 1.0 if progress < DECAY_FROM else max(0.0, (1 - progress) / (1 - DECAY_FROM))
    return min(1.0, (step + 1) / WARMUP_STEPS) * (0.02 + 0.98 * down)


def pushes(progress: float) -> tuple[float, float]:
    """How much the throwaway heads and the looks weigh: they start what the answers then carry on."""
    return (1.0 if progress < 0.8 else 0.5), max(0.08, 0.4 * (1 - progress / 0.75))


def losses(reader: Reader, batch: Batch, auxiliary: float, looking: float) -> tuple[Tensor, dict[str, float]]:
    """The loss of a batch, and what the log shows of it."""
    with torch.autocast("cpu", torch.bfloat16):
        mask = bias(batch.branch, torch.bfloat16)
        hidden, tapped = reader(batch.ids, batch.positions, mask, torch.float32)
        learned = batch.targets != IGNORE
        logits, targets = reader.logits(hidden[learned]), batch.targets[learned]
        total = F.cross_entropy(logits, targets)
        shown = {"loss": total.item(), "right": (logits.argmax(-1) == targets).float().mean().item()}
        for number, name in enumerate(HEADS):
            marks = batch.marks[batch.marks[:, 0] == number]
            if not len(marks) or not auxiliary:
                continue
            at = tapped[reader.taps[name]][marks[:, 1], marks[:, 2]]
            for piece in (0, 1) if name != "previous" else (0,):
                guessed = reader.told(number, piece, at)
                total = total + auxiliary * HEAD_WEIGHTS[name] * F.cross_entropy(guessed, marks[:, 3 + piece])
                shown[name] = (guessed.argmax(-1) == marks[:, 3 + piece]).float().mean().item()
        for number, name in enumerate(LOOKS):
            looks = batch.looks[batch.looks[:, 0] == number]
            if len(looks) and looking:
                weights = reader.looks(name, tapped, batch.positions, mask, looks[:, 1:3])
                seen = weights.gather(1, looks[:, 3:]).logsumexp(-1) - (looks[:, 3] == looks[:, 4]) * 0.6931
                total = total - (0.3 if name == "older" else looking) * seen.mean()
                shown[f"look {name}"] = seen.exp().mean().item()
    return total, shown


class Run:
    """One training run, its folder and its log."""

    def __init__(self, out: Path, shape: Shape, seed: int, muon: float, adam: float, rank: int, workers: int) -> None:
        self.out, self.seed, self.shape, self.rank, self.workers = out, seed, shape, rank, workers
        torch.manual_seed(seed)
        self.reader = Reader(shape)
        self.optimizer = Optimizer(self.reader, muon, adam)
        self.progress = Progress()
        out.mkdir(parents=True, exist_ok=True)

    def share(self) -> None:
        """Averages gradients and clocks over the workers, so that all take the same step."""
        if self.workers == 1:
            return
        parameters = [parameter for parameter in self.reader.parameters() if parameter.grad is not None]
        flat = torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
        dist.all_reduce(flat)
        flat /= self.workers
        for parameter, part in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)

    def resume(self) -> None:
        """Goes on from the folder's checkpoint, if it has one."""
        path = self.out / "checkpoint.pt"
        if path.exists():
            kept = torch.load(path, weights_only=True)
            self.reader.load_state_dict(kept["reader"])
            self.optimizer.load(kept["optimizer"])
            self.progress = Progress(**kept["progress"])

    def save(self) -> None:
        """Writes checkpoint and export, each whole or not at all; worker 0 does it for all."""
        if self.rank:
            return
        kept = {
            "reader": self.reader.state_dict(), "optimizer": self.optimizer.state(),
            "progress": vars(self.progress), "shape": as_record(self.shape), "seed": self.seed,
        }  # fmt: skip
        torch.save(kept, self.out / "checkpoint.new")
        (self.out / "checkpoint.new").replace(self.out / "checkpoint.pt")
        save_reader(self.reader, self.out / "export")

    def log(self, values: dict[str, float]) -> None:
        """A line for people, a line for programs; worker 0's share of the batch stands for all."""
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
    """A folder transformers loads: config, bf16 weights, tokenizer, generation settings."""
    folder.mkdir(parents=True, exist_ok=True)
    config, weights = export(reader)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        **config,
    }
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "do_sample": False, "max_new_tokens": 16}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    half = {name: value.to(torch.bfloat16).clone() for name, value in weights.items()}
    save_file(half, str(folder / "model.new"), metadata={"format": "pt"})
    (folder / "model.new").replace(folder / "model.safetensors")
    (folder / "model.safetensors").chmod(0o644)
    build().save_pretrained(str(folder))


def train(run: Run, minutes: float, tokens: int, export_minutes: float, stop: float) -> None:
    """Trains until the minutes are used, or `stop` of them."""
    p, saved = run.progress, time.monotonic()
    clock = Clock(run)
    sums: dict[str, list[float]] = defaultdict(list)
    for end, mix in STAGES:
        if clock.minutes / minutes >= min(end, stop):
            continue
        start = p.worlds - p.worlds % run.workers + run.rank
        stream = Stream(run.seed, mix, tokens // run.workers, start, run.workers)
        for batch in torch.utils.data.DataLoader(stream, batch_size=None, num_workers=1, prefetch_factor=8):
            progress = clock.minutes / minutes
            loss, shown = losses(run.reader, batch, *pushes(progress))
            torch.autograd.backward(loss)
            run.share()
            nn.utils.clip_grad_norm_(run.reader.parameters(), 1.0)
            run.optimizer.step(rate(p.step, progress))
            p.step, p.worlds, p.tokens = p.step + 1, batch.worlds, p.tokens + batch.ids.numel() * run.workers
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
            if clock.minutes / minutes >= min(end, stop, 1.0):
                break
    run.save()


class Clock:
    """Minutes trained, the same for all workers: worker 0 tells the time."""

    def __init__(self, run: Run) -> None:
        self._run, self._before, self._begun = run, run.progress.seconds, time.monotonic()

    @property
    def minutes(self) -> float:
        """Minutes trained until the last step."""
        return self._run.progress.seconds / 60

    def tick(self) -> None:
        """Reads the clock; every worker waits for worker 0's."""
        seconds = torch.tensor(self._before + time.monotonic() - self._begun, dtype=torch.float64)
        if self._run.workers > 1:
            dist.broadcast(seconds, 0)
        self._run.progress.seconds = float(seconds)


def worker(rank: int, options: argparse.Namespace) -> None:
    """One worker's whole life."""
    torch.set_num_threads(options.threads)
    if options.sessions:
        os.setsid()
    if options.workers > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{options.out.resolve()}/rendezvous", rank=rank, world_size=options.workers
        )
    shape = Shape(vocabulary=len(build()), hidden=options.hidden, layers=options.layers, inner=2 * options.hidden)
    run = Run(options.out, shape, options.seed, options.muon, options.adam, rank, options.workers)
    run.resume()
    if options.compile:
        torch._dynamo.config.cache_size_limit = 64
        Block.forward = torch.compile(Block.forward, dynamic=False)  # type: ignore[method-assign]
    train(run, options.minutes, options.tokens, options.export_minutes, options.stop)


def main() -> None:
    """Train, or go on training, the reader."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--stop", type=float, default=1.0, help="stop after this share of the minutes")
    parser.add_argument("--out", type=Path, default=Path("runs/reader"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=4000, help="tokens a step, all workers together")
    parser.add_argument("--threads", type=int, default=1, help="threads a worker")
    parser.add_argument("--workers", type=int, default=2, help="processes that share a step; quicker than threads here")
    parser.add_argument(
        "--sessions", action="store_true", help="a session a worker, for kernels that share time by session"
    )
    parser.add_argument("--export-minutes", type=float, default=8)
    parser.add_argument("--muon", type=float, default=0.006)
    parser.add_argument("--adam", type=float, default=0.004)
    parser.add_argument("--hidden", type=int, default=160)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--compile", action="store_true", help="needs a C++ compiler; about a third quicker")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "rendezvous").unlink(missing_ok=True)
    if options.workers == 1:
        worker(0, options)
    else:
        spawn(worker, (options,), nprocs=options.workers)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
