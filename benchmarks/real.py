"""Quality and first token on a real language model, against its own full prefill: the judge of every default.

    python -m benchmarks.real --model MODEL --data FOLDER                       # XQuAD, dev questions
    python -m benchmarks.real --model MODEL --data FOLDER --sets xquad long --half test --questions 200
    python -m benchmarks.real --model MODEL --data FOLDER --methods full reuse hkvd@.15 sensitivity@.05

MODEL is a folder, a GGUF file or a hub id. FOLDER has the sets as published (see `real_sets.py`). For each question the
full prefill decodes its first tokens; every method then predicts the same tokens from its own KV. Constants are chosen
on dev questions alone. Results are appended question by question to `--out`, and the same command goes on where a
killed run stopped.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.real_sets import SETS, Asked, questions
from ragkv import Engine, EngineConfig, FusionConfig, PromptConfig, StoreConfig
from ragkv.model.loading import load
from ragkv.runtime.rates import Rate

ANSWER_TOKENS = 12  # The first tokens of the full prefill's answer, over which KL and agreement are means.
METHODS = ("full", "none", "reuse", *(f"{s}@{r}" for r in (".05", ".15") for s in ("first-k", "hkvd", "sensitivity")))
INSTRUCTION = "\nAnswer with a few words from the text."
RESAMPLES = 2_000  # of the questions, for the intervals of a mean


@dataclass(frozen=True)
class Method:
    """How one prompt is prefilled, and its name in the table."""

    name: str
    options: dict[str, Any]
    with_passages: bool = True

    @classmethod
    def of(cls, name: str) -> "Method":
        """`full`, `prefix`, `none` (no passages), `reuse` (nothing recomputed), or `SELECTOR@RATIO`."""
        if name == "full":
            return cls(name, {"reuse": "none"})
        if name == "prefix":
            return cls(name, {"reuse": "prefix"})
        if name == "none":
            return cls(name, {"reuse": "none"}, with_passages=False)
        if name == "reuse":
            return cls(name, {"selector": "none", "ratio": 0.0})
        selector, _, ratio = name.partition("@")
        return cls(name, {"selector": selector, "ratio": float(ratio)})


class Judge:
    """One model; each question is answered from the KV of every method."""

    def __init__(self, model: str, dtype: str, selectors: Sequence[str]) -> None:
        scored = any(name.startswith("sensitivity") for name in selectors)
        fusion = FusionConfig(selector="sensitivity" if scored else "hkvd", ratio=0.15)
        store = StoreConfig(memory_bytes=2 << 30)
        config = EngineConfig(dtype=dtype, fusion=fusion, prompt=PromptConfig(chunk_end="\n\n"), store=store)
        self._model, self._tokenizer = load(model, "cpu", dtype)
        self.engine = Engine(self._model, self._tokenizer, config)

    def close(self) -> None:
        self.engine.close()

    def ask(self, asked: Asked, methods: Sequence[Method]) -> Iterator[dict[str, Any]]:
        """What every method gives for the question, the full prefill first."""
        chunks = [self.engine.chunk(text) for text in asked.passages]
        self.engine.warm(chunks)
        question = asked.question + INSTRUCTION
        gold = self._tokenizer(asked.golds[0], add_special_tokens=False).input_ids[:32]
        answer: list[int] = []
        reference = torch.empty(0)
        for method in methods:
            began = time.perf_counter()
            prefill = self.engine.prefill(question, chunks if method.with_passages else (), **method.options)
            first_token_s = time.perf_counter() - began
            if method.name == "full":
                answer = self._decoded(prefill)
                reference = self._log_probabilities(prefill, answer)
            own = self._log_probabilities(prefill, answer)
            kl = (reference.exp() * (reference - own)).sum(-1)
            likelihood = self._log_probabilities(prefill, gold).gather(1, torch.tensor(gold)[:, None]).mean()
            yield {
                "question": asked.key,
                "method": method.name,
                "kl": float(kl.mean()),
                "agreement": float((reference.argmax(-1) == own.argmax(-1)).float().mean()),
                "gold": float(likelihood),
                "compute": prefill.reuse.compute,
                "first_token_s": first_token_s,
                "tokens": len(prefill.token_ids),
            }
        self.engine.delete(chunks)

    @torch.inference_mode()
    def _decoded(self, prefill: Any) -> list[int]:
        """The first tokens of the greedy answer."""
        cache, logits, found = prefill.cache, prefill.logits, list[int]()
        for _ in range(ANSWER_TOKENS):
            found.append(int(logits.argmax()))
            logits = self._model(torch.tensor([found[-1:]]), past_key_values=cache).logits[0, -1]
        return found

    @torch.inference_mode()
    def _log_probabilities(self, prefill: Any, ids: Sequence[int]) -> torch.Tensor:
        """Of every token at each place of `ids` (N,), each behind the ones before it: (N, V) float32."""
        rest = self._model(torch.tensor([list(ids[:-1])]), past_key_values=prefill.cache).logits[0] if ids[1:] else None
        logits = prefill.logits[None] if rest is None else torch.cat((prefill.logits[None], rest.float()))
        return torch.log_softmax(logits.float(), -1)


def main() -> None:
    made = report.parser(__doc__, "four questions of each set", threads=1)
    made.add_argument("--model", required=True)
    made.add_argument("--data", type=Path, required=True, help="the folder with the question sets")
    made.add_argument("--sets", nargs="+", choices=[*SETS], default=["xquad"])
    made.add_argument("--half", choices=["dev", "test"], default="dev")
    made.add_argument("--questions", type=int, default=30, help="of each set")
    made.add_argument("--methods", nargs="+", default=[*METHODS])
    made.add_argument("--dtype", default="float32")
    made.add_argument("--out", type=Path, default=report.RESULTS / "real.jsonl")
    options = made.parse_args()
    torch.set_num_threads(options.threads)
    names = list(dict.fromkeys(("full", "none", "reuse", *options.methods)))
    judge = Judge(options.model, options.dtype, names)
    for name in options.sets:
        _run(judge, name, [Method.of(one) for one in names], options)
    judge.close()


def _run(judge: Judge, name: str, methods: Sequence[Method], options: argparse.Namespace) -> None:
    """Ask what is missing of one set, then print its table."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    label = {"model": options.model, "set": name, "half": options.half, "dtype": options.dtype}
    asked = questions(name, options.data, options.half, 4 if options.quick else options.questions)
    rows = [row for row in _rows(options.out) if all(row[key] == value for key, value in label.items())]
    done = {(row["question"], row["method"]) for row in rows}
    rate = Rate()
    for number, one in enumerate(asked, 1):
        missing = [method for method in methods if (one.key, method.name) not in done]
        if missing:
            needed = missing if missing[0].name == "full" else [methods[0], *missing]
            new = [{**label, **row} for row in judge.ask(one, needed) if (one.key, row["method"]) not in done]
            with options.out.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in new)
            rows += new
        rate.update(number, len(asked))
        print(f"{name} {number}/{len(asked)}{rate.left}", flush=True)
    keys = {one.key for one in asked}
    _print([row for row in rows if row["question"] in keys], [method.name for method in methods])


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def _print(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """One line a method: means over the questions, with 95 % intervals of the gap closed and of the likelihood."""
    by = {(row["method"], row["question"]): row for row in rows}
    keys = [key for key in dict.fromkeys(row["question"] for row in rows) if all((name, key) in by for name in names)]

    def values(name: str, field: str) -> list[float]:
        return [by[name, key][field] for key in keys]

    def closed(name: str, chosen: Sequence[int]) -> float:
        own, reuse = values(name, "kl"), values("reuse", "kl")
        return 1 - sum(own[at] for at in chosen) / sum(reuse[at] for at in chosen)

    def retained(name: str, chosen: Sequence[int]) -> float:
        own, full, none = (values(one, "gold") for one in (name, "full", "none"))
        return sum(own[at] - none[at] for at in chosen) / sum(full[at] - none[at] for at in chosen)

    rng, every = random.Random(0), range(len(keys))
    samples = [rng.choices(every, k=len(keys)) for _ in range(RESAMPLES)]
    lines = []
    for name in names:
        first = statistics.median(values(name, "first_token_s"))
        lines.append(
            (
                name,
                statistics.mean(values(name, "kl")),
                _interval(closed(name, every), [closed(name, one) for one in samples]),
                statistics.mean(values(name, "agreement")),
                _interval(retained(name, every), [retained(name, one) for one in samples]),
                statistics.mean(values(name, "compute")),
                first,
            )
        )
    tokens = statistics.mean(values("full", "tokens"))
    print(f"\n{len(keys)} questions, {tokens:.0f} tokens a prompt, {report.machine()['cpu']}")
    headings = ("method", "KL", "gap closed", "agreement", "likelihood retained", "compute", "first token (s)")
    report.table(headings, lines)


def _interval(mean: float, resampled: Sequence[float]) -> str:
    ordered = sorted(resampled)
    return f"{mean:.2f} [{ordered[len(ordered) // 40]:.2f}, {ordered[-1 - len(ordered) // 40]:.2f}]"


if __name__ == "__main__":
    main()
