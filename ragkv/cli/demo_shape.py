"""The demo at a real size: times of a real architecture's shape, as much of it as this machine computes in time."""

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import output

if TYPE_CHECKING:
    from ragkv.engine import Engine

BUDGET_S = 45.0  # for the passes of this step; building the weights comes on top
CHUNK_TOKENS, QUESTION_TOKENS = 512, 32
PROBE_TOKENS = 128  # of the prefill from which the time is estimated
WAYS: dict[str, dict[str, Any]] = {
    "full": {"reuse": "none"},
    "prefix": {"reuse": "prefix"},
    "warm": {"selector": "random"},  # chooses other tokens than scores would, in the same time
    "reuse alone": {"ratio": 0.0},
}
PASSES = 2.5  # full prefills that the four ways take together, about


@dataclass(frozen=True, slots=True)
class Size:
    """What is timed."""

    chunks: int
    runs: int  # of each way; the median is shown
    layers: int

    @property
    def tokens(self) -> int:
        """S, of the prompt."""
        return self.chunks * CHUNK_TOKENS + QUESTION_TOKENS

    def seconds(self, row_layer_s: float) -> float:
        """An estimate of all passes, from the time of a row in a layer of a short prefill."""
        attention = 1 + self.tokens / 6000  # a longer prompt's rows attend over more keys
        return (1 + self.runs * PASSES) * self.tokens * self.layers * row_layer_s * attention


def sizes(layers: int) -> list[Size]:
    """From the whole step to the smallest: first fewer chunks, then fewer runs, at last fewer layers."""
    shorter = [Size(chunks, 2, layers) for chunks in (6, 4, 3, 2)]
    fewer = [Size(2, 1, max(2, layers // parts)) for parts in (1, 2, 4, 8, 16)]
    return [*shorter, *fewer]


def time_shape(shape: str, show: Callable[[str], None], budget_s: float = BUDGET_S) -> dict[str, Any]:
    """Print the times to the first token of that shape with random weights, and return them in seconds."""
    import torch

    from ragkv.config import EngineConfig
    from ragkv.model.dtype_choice import faster_dtype
    from ragkv.model.shapes import shape_config

    config = shape_config(shape)
    choice = faster_dtype(config, torch.bfloat16, 0, EngineConfig().packed_bytes)
    show(f"\nThe same at a real size: {shape} with random weights, which do not change times.")
    show(f"Its dtype: {choice.why}.")
    whole, *_ = known = sizes(config.num_hidden_layers)
    engine = _engine(shape, choice.name, whole.layers)
    row_layer_s = _row_layer_s(engine)
    wanted = next((size for size in known if size.seconds(row_layer_s) <= budget_s), known[-1])
    if wanted != whole:
        show(f"All of it ({_words(whole, whole)}) would take {whole.seconds(row_layer_s):.0f} s here, so it is cut.")
    if wanted.layers != whole.layers:
        engine.close()
        del engine
        gc.collect()  # before as many weights are made again
        engine = _engine(shape, choice.name, wanted.layers)
    with engine:
        medians = _medians(engine, wanted)
    show(
        f"{_words(wanted, whole)}. First token: {output.times(medians)}. "
        f"Speedup over full: warm {medians['full'] / medians['warm']:.1f}x, "
        f"without recompute {medians['full'] / medians['reuse alone']:.1f}x."
    )
    return {**medians, "chunks": wanted.chunks, "runs": wanted.runs, "layers": wanted.layers, "dtype": choice.name}


def _words(size: Size, whole: Size) -> str:
    """A size in words."""
    runs = "medians of 2" if size.runs > 1 else "one run"
    layers = "" if size.layers == whole.layers else f", {size.layers} of {whole.layers} layers"
    return f"{size.chunks} chunks of {CHUNK_TOKENS} tokens + {QUESTION_TOKENS}, {runs}{layers}"


def _engine(shape: str, dtype: str, layers: int) -> "Engine":
    from ragkv.config import EngineConfig, FusionConfig
    from ragkv.engine import Engine
    from ragkv.model.loading import float_dtype
    from ragkv.model.shapes import random_model

    with output.working("making random weights"):
        unscored = EngineConfig(fusion=FusionConfig(sensitivity_prefixes=0))  # scores would triple the time to encode
        return Engine(random_model(shape, float_dtype(dtype), layers=layers), config=unscored)


def _row_layer_s(engine: "Engine") -> float:
    """Seconds of a row in a layer, in a prefill of `PROBE_TOKENS`; the second one, because the first is slower."""
    with output.working("measuring this machine"):
        took = [engine.prefill(_ids(engine, PROBE_TOKENS), reuse="none").timing.first_token_s for _ in range(2)]
    return took[-1] / (PROBE_TOKENS * engine.stats().layers)


def _medians(engine: "Engine", size: Size) -> dict[str, float]:
    """Median times to the first token, by way."""
    ids = _ids(engine, size.tokens)
    *chunks, question = (ids[at : at + CHUNK_TOKENS] for at in range(0, len(ids), CHUNK_TOKENS))
    with output.progress("encoding KV") as on_encode:
        engine.warm(chunks, on_encode)
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    with output.progress("timing") as on_run:
        for run in range(size.runs):
            for number, (name, options) in enumerate(WAYS.items(), 1):
                times[name].append(engine.prefill(question, chunks, **options).timing.first_token_s)
                on_run(run * len(WAYS) + number, size.runs * len(WAYS))
    return {name: statistics.median(several) for name, several in times.items()}


def _ids(engine: "Engine", count: int) -> list[int]:
    """Random token ids, always the same."""
    import torch

    generator = torch.Generator().manual_seed(0)
    vocabulary = engine.parts.adapter.vocabulary
    return torch.randint(3, vocabulary, (count,), generator=generator).tolist()
