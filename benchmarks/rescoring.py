"""What becomes of a filled home when scores are learned: nothing is lost or encoded, and questions are answered.

    python -m benchmarks.rescoring [--quick]

The bundled reader without its learned scores fills a store directory with the chunks of held-out worlds, scored by the
variance. Then every stored chunk is scored by the reader's own network, while a thread asks questions of the worlds one
after another. Counted are the entries and the bytes of their KV before and after, the chunks that were encoded, the
share of scored chunks over time, and right answers before, meanwhile and afterwards, at one low ratio. The time to
encode the same chunks anew, which learned scores cost in earlier versions, is measured, too.
"""

import hashlib
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.quality_data import Context, Question, worlds
from ragkv import Chunk, Engine, EngineConfig, FusionConfig, StoreConfig
from ragkv.fusion import ScoreModel
from ragkv.fusion.learned import FILE_NAME
from ragkv.lab.metrics import best, exact_match
from ragkv.model.loading import READER

RATIO = 0.06


@dataclass(slots=True)
class Asked:
    """Answers of one phase."""

    right: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    notes: set[str] = field(default_factory=set)

    def row(self, phase: str) -> list[Any]:
        """The phase's line of the table."""
        if not self.right:
            return [phase, 0, float("nan"), float("nan")]
        return [phase, len(self.right), statistics.mean(self.right), statistics.median(self.first_token_s) * 1e3]


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        model, home = Path(folder) / "model", Path(folder) / "kv"
        shutil.copytree(READER, model, ignore=shutil.ignore_patterns(FILE_NAME))
        network = ScoreModel.from_bytes((Path(READER) / FILE_NAME).read_bytes())
        config = EngineConfig(store=StoreConfig(directory=str(home)), fusion=FusionConfig(ratio=RATIO))
        with Engine.from_pretrained(str(model), config) as engine:
            results = _measured(engine, network, home, worlds(options.worlds, seed=5, level=3))
    name = f"rescoring{'-quick' if options.quick else ''}"
    print("written:", report.save(name, results))


def _measured(engine: Engine, network: ScoreModel, home: Path, contexts: Sequence[Context]) -> dict[str, Any]:
    prompts = [(context, [engine.chunk(text) for text in context.chunks]) for context in contexts]
    questions = [(question, chunks) for context, chunks in prompts for question in context.questions]
    questions = [pair for pair in questions if not pair[0].history]
    documents = [chunk for _, chunks in prompts for chunk in chunks]
    began = time.perf_counter()
    engine.warm(documents)
    encoding_s = time.perf_counter() - began
    before, asked, share = _kv_digests(home), [Asked(), Asked(), Asked()], [(0.0, 0.0)]
    _ask(engine, iter(questions), asked[0], threading.Event())
    ended = threading.Event()
    thread = threading.Thread(target=_ask, args=(engine, cycle(questions), asked[1], ended))
    thread.start()
    began = time.perf_counter()

    def on_progress(done: int, total: int) -> None:
        share.append((time.perf_counter() - began, done / total))

    scored = engine.rescore(network, documents, on_progress)
    scoring_s = time.perf_counter() - began
    ended.set()
    thread.join()
    after = _kv_digests(home)
    warmed = engine.warm(documents)
    _ask(engine, iter(questions), asked[2], threading.Event())
    lost = sum(after.get(name) != digest for name, digest in before.items())
    print(
        f"{len(before)} entries before, {len(after)} after, {lost} lost or changed; {warmed.encoded} encoded again; "
        f"{scored.scored} scored from their KV in {scoring_s:.1f} s while questions are answered "
        f"(encoding and scoring them took {encoding_s:.1f} s)"
    )
    quarters = [next(at for at, part in share if part >= quarter / 4) for quarter in range(1, 5)]
    print("scored: " + ", ".join(f"{25 * n} % after {at:.1f} s" for n, at in enumerate(quarters, 1)))
    rows = [one.row(phase) for one, phase in zip(asked, ("before", "meanwhile", "afterwards"), strict=True)]
    report.table((f"ratio {RATIO}", "questions", "exact match", "first token ms"), rows)
    print("notes meanwhile:", sorted(asked[1].notes) or "none")
    return {"entries": len(before), "lost": lost, "encoded": warmed.encoded, "scored": scored.scored, "rows": rows} | {
        "scoring_s": scoring_s,
        "encoding_s": encoding_s,
        "share_over_time": share,
        "notes": sorted(asked[1].notes),
    }


def _ask(
    engine: Engine, questions: Iterator[tuple[Question, list[Chunk]]], asked: Asked, ended: threading.Event
) -> None:
    """Ask until the questions or the phase end."""
    for question, chunks in questions:
        if ended.is_set():
            return
        answer = engine.answer(question.text, chunks, max_new_tokens=12)
        asked.right.append(best(exact_match, answer.text, question.golds))
        asked.first_token_s.append(answer.timing.first_token_s)
        asked.notes.update(note for note in answer.reuse.notes if "floor" not in note)


def _kv_digests(home: Path) -> dict[str, str]:
    """A digest of every file of KV; scores are other files."""
    files = home.glob(f"entries/*/{'?' * 64}.safetensors")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _options() -> Any:
    parser = report.parser(__doc__, "fewer worlds", threads=2, runs=1)
    parser.add_argument("--worlds", type=int, default=40)
    options = parser.parse_args()
    if options.quick:
        options.worlds = min(options.worlds, 6)
    return options


if __name__ == "__main__":
    main()
