"""Passes over a model's layers, for one prompt or for several at once.

Each prompt's `fuse` yields the rows of its next layer. A pass collects the rows of all prompts and
runs the layer once over them, so the weights are read once. Only attention runs prompt by prompt.
Then the pass sends every prompt the output for its rows (CacheBlend figure 15c).
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from ragkv.model import Adapter, LayerPass, PromptKV, Recording, Rows
from ragkv.runtime import Check, no_check
from ragkv.store.tiers import Lease

from .device.staging import StagedReader
from .fuse import Fused, FuseSteps, LayerInput, TokenChoice, fuse
from .pipeline import LayerReader, Readers, Speeds
from .plan import Plan
from .selectors import Recompute

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PassResult:
    """The result of a pass for one prompt, and its times."""

    fused: Fused
    # L tensors of the candidates recomputed in the last pass through that layer, on the host
    selected_by_layer: tuple[torch.Tensor, ...]
    logits: torch.Tensor  # (V,) float32, of the last position
    pass_s: float  # the whole pass took this time, `others_s` included
    # decoding steps and prefills of others, between layers and within them
    others_s: float
    load_s: float  # waiting for slices
    read_s: float  # reading slices, one after another at the reader threads' joint bandwidth
    read_bytes: int  # what the reader threads read; they read no slices that are in memory
    bytes_by_tier: Mapping[str, int]
    prompts: int  # computed in the pass, this one included


class JointPassFailed(Exception):
    """A pass over several prompts failed, and no single prompt is known to be the cause."""


class PreparedPrompt:
    """A prompt that is ready for a pass. There it ends with a result or an error."""

    def __init__(
        self,
        steps: FuseSteps,
        computed: torch.Tensor,
        reader: LayerReader,
        most_rows: int,
        check: Check,
    ) -> None:
        """No selector chose the positions `computed`. A layer computes at most `most_rows` rows. An
        error that `check` raises ends this prompt's part.
        """
        self.steps = steps
        self.computed = computed
        self.reader = reader
        self.most_rows = most_rows
        self.check = check
        self.ended: PassResult | Exception | None = None

    def result(self) -> PassResult:
        """The prompt's result.

        Raises what ended it: `EntryDamagedError`, or what `check` raised. Raises `JointPassFailed`
        if a pass over several prompts failed as a whole.
        """
        ended = self.ended
        self.ended = None  # Otherwise the error and its frames would keep each other and the KV.
        try:
            if ended is None:
                raise JointPassFailed
            if isinstance(ended, Exception):
                raise ended
            return ended
        finally:
            del ended


@dataclass(eq=False)
class Fusor:
    """Fuses prompts for one model. Holds no request's state."""

    adapter: Adapter
    readers: Readers
    read_ahead_layers: int | None  # None: it follows speeds measured in earlier passes
    seed: int
    speeds: Speeds = field(default_factory=Speeds, init=False)

    @contextmanager
    def prepared(
        self,
        plan: Plan,
        recompute: Recompute,
        *,
        headroom: int = 0,
        record: Recording | None = None,
        check: Check = no_check,
        new_kv: Callable[[int], PromptKV] | None = None,
    ) -> Iterator[PreparedPrompt]:
        """A prompt that is ready for `run`; its first layers are read from now on.

        So they are read while other requests compute (CachedAttention section 3.2.1). `headroom`
        positions are allocated for the answer, when the pass begins. `record` collects the raw KV
        of its range. `new_kv` makes the KV of a given capacity; by default the adapter does.
        """
        adapter = self.adapter
        layers = adapter.layer_count
        choice = TokenChoice(plan, recompute, self.seed, layers)
        allocate = partial(new_kv or adapter.new_kv, plan.token_ids.numel() + headroom)
        leases = [span.lease for span in choice.loaded if span.lease is not None]
        ahead = self.read_ahead_layers
        if ahead is None:
            size = sum(lease.stored_bytes for lease in leases if not lease.in_place)
            rows = plan.computed.numel() + choice.budget
            ahead = self.speeds.ahead(size, rows * layers, layers, choice.upper_layers)
        reader = self.reader(leases, ahead)
        steps = fuse(adapter, plan, choice, reader, allocate, record)
        with closing(reader), closing(steps):
            yield PreparedPrompt(steps, plan.computed, reader, choice.most_rows, check)

    def reader(self, leases: Sequence[Lease], ahead: int) -> LayerReader:
        """Begins to read `ahead` layers of the leases."""
        device = self.adapter.device
        read = LayerReader if device.type == "cpu" else StagedReader
        return read(leases, self.adapter.layer_count, ahead, self.readers, device)

    @torch.no_grad()
    def run(self, prompts: Sequence[PreparedPrompt], pause: Callable[[], None]) -> None:
        """Compute all prompts in one pass; the caller holds the compute lock.

        Each gets its result. One that fails leaves the pass, and the others go on. `pause` is
        called between layers and within long ones, so that other requests may compute.
        """
        try:
            _LayerLoop(self.adapter, prompts, pause).run()
        except Exception as error:
            left = [one for one in prompts if one.ended is None]
            if len(left) == 1:
                left[0].ended = error
            elif left:
                log.warning(
                    "A pass over %d prompts failed; each is computed alone.",
                    len(left),
                    exc_info=True,
                )

    def note_speed(self, passed: PassResult) -> None:
        """Let the next read-ahead follow what this pass took."""
        self.speeds.add_read(passed.read_bytes, passed.read_s)
        if passed.prompts == 1:  # The time of a joint pass is that of all its prompts.
            computing_s = passed.pass_s - passed.others_s - passed.load_s
            self.speeds.add_compute(passed.fused.row_layers, computing_s)


class _LayerLoop:
    """Prompts on their way through the layers together."""

    def __init__(
        self, adapter: Adapter, prompts: Sequence[PreparedPrompt], pause: Callable[[], None]
    ) -> None:
        self._adapter = adapter
        self._prompts = prompts
        self._pause = pause
        self._inputs: dict[PreparedPrompt, LayerInput] = {}  # the rows of the next layer
        self._fused: dict[PreparedPrompt, Fused] = {}  # prompts that passed the last layer
        self._others_s = 0.0

    def run(self) -> None:
        """Give each prompt its result or its error."""
        began = time.perf_counter()
        self._let_others_compute()  # which raises an error if the engine was closed
        for prompt in self._prompts:
            self._advance(prompt, None)
        while self._inputs:
            layer = min(one.layer for one in self._inputs.values())
            together = {p: one for p, one in self._inputs.items() if one.layer == layer}
            hidden = self._run_layer(layer, list(together.values()))
            for prompt, own in zip(together, hidden, strict=True):
                self._advance(prompt, own)
            self._let_others_compute()
        if not self._fused:
            return
        last = _cat([fused.last for fused in self._fused.values()], 1)
        logits = self._adapter.logits(last)  # (prompts, V)
        self._adapter.wait_for_device()
        took_s = time.perf_counter() - began
        for (prompt, fused), own in zip(self._fused.items(), logits, strict=True):
            reader = prompt.reader
            prompt.ended = PassResult(
                fused,
                selected_by_layer=_selected(fused.rows_by_layer, prompt.computed),
                logits=own.clone() if len(self._fused) > 1 else own,
                pass_s=took_s,
                others_s=self._others_s,
                load_s=reader.waited_s,
                read_s=reader.read_s,
                read_bytes=reader.read_bytes,
                bytes_by_tier=reader.bytes_by_tier(),
                prompts=len(self._prompts),
            )

    def _advance(self, prompt: PreparedPrompt, hidden: torch.Tensor | None) -> None:
        """Send `hidden` to a prompt, and take the rows of its next layer; one that fails leaves."""
        self._inputs.pop(prompt, None)
        try:
            prompt.check()
            # sending None starts the generator
            self._inputs[prompt] = prompt.steps.send(hidden)  # type: ignore[arg-type]
        except StopIteration as end:
            self._fused[prompt] = end.value
        except Exception as error:
            prompt.ended = error

    def _run_layer(self, layer: int, inputs: Sequence[LayerInput]) -> Sequence[torch.Tensor]:
        """Run `layer` over the rows of all prompts: hidden (1, R, E) of each.

        In the last layer only each prompt's last row needs an output.
        """
        if layer == self._adapter.layer_count - 1:
            several = [one for one in inputs if len(one.part.rows) > 1]
            if several:
                self._adapter.project_kv(layer, *self._joined(several))
            inputs = [one.last_row() for one in inputs]
        hidden = self._adapter.call_layer(layer, *self._joined(inputs))
        return torch.split(hidden, [len(one.part.rows) for one in inputs], 1)

    def _joined(self, inputs: Sequence[LayerInput]) -> tuple[torch.Tensor, Rows, LayerPass]:
        """The layer's input: the rows of all prompts, one prompt after another."""
        hidden = _cat([one.hidden for one in inputs], 1)
        cos = _cat([one.cos for one in inputs], 1)
        sin = _cat([one.sin for one in inputs], 1)
        parts = [one.part for one in inputs]
        positions = Rows(_cat([part.rows.positions for part in parts], 0), None)
        step = self._adapter.joint_pass(inputs[0].layer, parts, cos, sin, self._pause_within)
        return hidden, positions, step

    def _pause_within(self) -> None:
        if len(self._inputs) == 1:  # No prompt may leave within a layer of several.
            next(iter(self._inputs)).check()
        self._let_others_compute()

    def _let_others_compute(self) -> None:
        paused_at = time.perf_counter()
        self._pause()
        self._others_s += time.perf_counter() - paused_at


def _selected(
    rows_by_layer: Sequence[torch.Tensor], computed: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The positions of each layer's rows that are not `computed`; the layers share most of them."""
    there = {id(rows): rows.cpu() for rows in rows_by_layer}
    chosen = {key: rows[~torch.isin(rows, computed)] for key, rows in there.items()}
    return tuple(chosen[id(rows)] for rows in rows_by_layer)


def _cat(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]
