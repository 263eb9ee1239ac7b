"""The fusor: builds the KV of one prompt from many entries, layer by layer (CacheBlend sections
4.2, 4.3 and 5.1).

For each layer it takes the stored slices from the reader, rotates their keys to their positions and
places them in the prompt's KV. A checking selector then narrows its tokens down. The layer runs
over the selected and the computed rows, whose fresh KV overwrites the stored KV. An asking selector
needs two passes: the first places everything and measures the question's attention, the second
recomputes the chosen tokens and loads nothing. Rows before the first candidate saw nothing that
changes, and are computed once.

The rows of several prompts may go through the weights in one pass (figure 15c): only attention runs
prompt by prompt.

The fusor knows no text, documents or tiers. It reads entries and never writes them.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ragkv.model import Adapter, LayerPass, PromptKV, Recording, Rows, Watch
from ragkv.model.promptkv import KVRows
from ragkv.model.rows import pausing
from ragkv.runtime import Check, Closing, no_check
from ragkv.store import Lease

from .pipeline import LayerReader, Readers, Speeds
from .plan import Plan, Span
from .selectors import AskingSelector, CheckingSelector, Selector, StaticSelector, budget

# A prompt's rows, their hidden (1, R, E), and cos and sin of their positions, each (1, R, rotary
# dims).
Part = tuple[KVRows, torch.Tensor, torch.Tensor, torch.Tensor]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fused:
    """The result of fusing one prompt."""

    kv: PromptKV  # rotated, S positions valid
    logits: torch.Tensor  # (V,) float32, of the last position
    # L tensors of candidate positions recomputed there, int64, CPU
    selected_by_layer: tuple[torch.Tensor, ...]
    row_layers: int  # rows computed, summed over layers
    bytes_by_tier: dict[str, int]
    load_s: float  # waiting for slices
    read_s: float  # reading them, one after another at the threads' joint bandwidth
    fuse_s: float
    prefill_s: float  # of the whole pass, with others_s
    others_s: float  # spent on decoding steps of other requests, between layers
    prompts: int  # computed in the pass, this one included


class Fusor:
    """Fuses prompts for one model. Holds no state of a request."""

    def __init__(
        self, adapter: Adapter, readers: Readers, read_ahead_layers: int | None, seed: int
    ) -> None:
        """With `read_ahead_layers` None the read-ahead follows the speeds measured in earlier
        requests.
        """
        self.adapter = adapter
        self.seed = seed
        self.speeds = Speeds()
        self.readers = readers
        self._ahead = read_ahead_layers

    @torch.no_grad()
    def fuse(self, prompts: "Sequence[Fusing]", between: Callable[[], None] = lambda: None) -> None:
        """Carry out plans for this model in one pass, also those of other fusors; the caller holds
        the compute lock.

        Each gets its result. One that fails leaves the pass, and the others go on. `between` is
        called between layers and within long ones, so that other requests may compute; an exception
        it raises ends the pass.
        """
        try:
            _JointPass(self, prompts, between).run()
        except Exception as error:
            left = [one for one in prompts if one.error is None]
            if len(left) == 1:
                left[0].error = error
            else:
                log.warning(
                    "A pass over %d prompts failed (%s); each is computed alone.", len(left), error
                )

    def reader(self, leases: Sequence[Lease], rows: int) -> LayerReader:
        """A reader for a pass over `rows` rows; it starts to read ahead at once (CachedAttention
        section 3.2.1).
        """
        layers = self.adapter.layer_count
        ahead = self._ahead
        if ahead is None:
            size = sum(lease.stored_bytes for lease in leases if not lease.in_place)
            ahead = self.speeds.ahead(size, rows * layers, layers)
        return LayerReader(leases, layers, ahead, self.readers, self.adapter.device)


class Fusing(Closing):
    """One prompt while it is fused. Its first layers are read while other requests compute
    (CachedAttention 3.2.1).
    """

    def __init__(
        self,
        fusor: Fusor,
        plan: Plan,
        selector: Selector,
        ratio: float,
        headroom: int = 0,
        record: Recording | None = None,
        check: Check = no_check,
        new_kv: Callable[[int], PromptKV] | None = None,
    ) -> None:
        """Start to read what `plan` needs; `fuse` carries it out, and the caller closes this in any
        case.

        `headroom` positions are allocated for the answer. `record` collects the raw KV of its
        range, placed or computed. What `check` raises ends the pass; it is called between layers,
        and within long ones of one prompt. `new_kv` makes the KV of a given capacity; by default
        the adapter does.
        """
        self.fusor = fusor
        self.check = check
        self._adapter = fusor.adapter
        self._device = fusor.adapter.device
        self._plan = plan
        self._candidates = plan.candidates
        self._ratio = ratio
        self._record = record
        self._length = plan.token_ids.numel()
        wanted = budget(ratio, len(plan.candidates))
        self._new_kv = partial(new_kv or fusor.adapter.new_kv, self._length + headroom)
        self._checking = selector if isinstance(selector, CheckingSelector) and wanted else None
        # until its second pass
        self.asking = selector if isinstance(selector, AskingSelector) and wanted else None
        if isinstance(selector, StaticSelector):
            self._first_choice = selector.select(plan.candidates, ratio, fusor.seed)
        else:
            self._first_choice = torch.arange(len(plan.candidates) if self._checking else 0)
        self._spans = plan.loaded() if self._checking else _not_recomputed(plan, self._first_choice)
        leases = [span.lease for span in self._spans if span.lease is not None]
        # the most that a layer computes
        self.rows = plan.forced.numel() + max(wanted, self._first_choice.numel())
        self.reader = fusor.reader(leases, plan.forced.numel() + wanted)
        self.fused: Fused | None = None
        self.error: Exception | None = None
        self.row_layers = 0
        self._placing_s = 0.0
        # by kind of rotary table
        self._rotations: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def result(self) -> Fused | None:
        """What `fuse` made of it; `None` if a pass over several prompts failed, so that it may be
        tried alone.

        Raises `EntryDamagedError`, and what `check` raised.
        """
        # else it and the frames in it would hold each other, and the KV
        error = self.error
        self.error = None
        try:
            if error is not None:
                raise error
        finally:
            del error
        return self.fused

    def close(self) -> None:
        """Wait for running reads. Safe to call twice."""
        self.reader.close()

    # What `fuse` calls, in this order.

    def start(self) -> None:
        """Allocate the KV and choose the first rows."""
        self._kv = self._new_kv()
        self._tables = self._adapter.rope.tables(self._length)
        asking_rows = self._plan.question_rows - self._plan.unasked_rows
        self._watch = Watch(asking_rows, self._length, self._device) if self.asking else None
        self._choose(self._first_choice)

    def load(self, layer: int) -> None:
        """Place what is stored of `layer`, and narrow the rows down. Raises `EntryDamagedError`."""
        slices = self.reader.layer(layer)
        self._place(layer, self._spans, slices)
        self._narrow(layer, self._spans, slices)

    def part(self, layer: int, *, last_alone: bool = False) -> Part:
        """What `layer` is given of this prompt: the current rows, or only the last of them."""
        rows = self.current
        hidden = self.hidden
        if last_alone and len(rows) > 1:
            rows = Rows.of(rows.positions[-1:])
            hidden = hidden[:, -1:]
        watch = self._watch if layer >= self._adapter.layer_count // 2 else None
        rotation = self._tables.of(self._adapter.rope_kind(layer), rows)
        return KVRows(self._kv, rows, self._adapter.windows, self._record, watch), hidden, *rotation

    def end_layer(self, layer: int) -> None:
        """`layer` was computed; without another pass it is complete. Raises what `check` raises."""
        self._selected_by_layer.append(self._candidates.positions[self._chosen])
        self.row_layers += len(self.current)
        if self.asking is None:
            self._kv.finish_prefill(layer, self._length)
        self.check()

    def choose_by_attention(self) -> None:
        """Start the second pass of an asking selector: over what it chooses by the attention of the
        first one.
        """
        assert self.asking is not None and self._watch is not None
        attention = self._watch.received()[self._candidates.positions]  # (N,)
        chosen = self.asking.select(self._candidates, attention, self._ratio)
        self.asking = self._watch = None
        self._choose(chosen, self._plan.leading_rows)

    def end(self, logits: torch.Tensor, took_s: float, others_s: float, prompts: int) -> None:
        """The pass over `prompts` prompts is over; `logits` (V,) are of the last position."""
        reader = self.reader
        kv = self._kv
        read_bytes, read_s = reader.measured()
        self.fusor.speeds.add_read(read_bytes, read_s)
        kv.length = self._length
        self.fused = Fused(
            kv=kv,
            logits=logits,
            selected_by_layer=tuple(self._selected_by_layer),
            row_layers=self.row_layers,
            bytes_by_tier=reader.bytes_by_tier(),
            load_s=reader.waited_s,
            read_s=read_s,
            fuse_s=self._placing_s,
            prefill_s=took_s,
            others_s=others_s,
            prompts=prompts,
        )

    # The parts of these.

    def _choose(self, chosen: torch.Tensor, done: int = 0) -> None:
        """Start a pass over the forced rows without the first `done`, and the candidates of index
        `chosen` (C,).
        """
        asks = self._watch is not None
        plan = self._plan
        token_ids, self._forced = plan.asking() if asks else (plan.token_ids, plan.forced[done:])
        self._chosen = chosen  # indices of the candidates recomputed in the current layer, CPU
        self._set_rows(self._candidates.positions[chosen])
        # (1, R, E)
        self.hidden = self._adapter.embed(token_ids.to(self._device)[self.current.positions])
        self._selected_by_layer: list[torch.Tensor] = []

    def _place(self, layer: int, spans: Sequence[Span], slices: Sequence[torch.Tensor]) -> None:
        """Rotate each span's slice (2, G, T, D) to its positions and put it into the
        prompt's KV.
        """
        if not spans:
            return
        began = time.perf_counter()
        cos, sin = self._rotation(layer, spans)
        parts = [
            piece[:, :, span.offset :][:, :, : len(span)]
            for span, piece in zip(spans, slices, strict=True)
        ]
        # (1, G, sum T, D): one rotation for all
        k_raw = torch.cat([part[0] for part in parts], dim=1).unsqueeze(0)
        rotated = self._adapter.rotate_in_float32(layer, k_raw, cos, sin)
        k_rots = torch.split(rotated, [len(span) for span in spans], dim=2)
        for span, k_rot, part in zip(spans, k_rots, parts, strict=True):
            self._kv.put(layer, span.start, k_rot, part[1].unsqueeze(0))
            if self._record is not None:
                self._record.put(layer, span.start, part)
        self._placing_s += time.perf_counter() - began

    def _rotation(self, layer: int, spans: Sequence[Span]) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the spans' positions, each (1, sum T, rotary dims); equal in all layers of
        a kind.
        """
        kind = self._adapter.rope_kind(layer)
        if kind not in self._rotations:
            parts = [self._tables.span(kind, span.start, span.stop) for span in spans]
            cos, sin = (torch.cat(tables, dim=1) for tables in zip(*parts, strict=True))
            self._rotations[kind] = cos, sin
        return self._rotations[kind]

    def _narrow(self, layer: int, spans: Sequence[Span], slices: Sequence[torch.Tensor]) -> None:
        """From layer 1 on, keep the rows of a checking selector that deviate most from the stored
        KV.
        """
        if self._checking is None or layer == 0:
            return
        keep = self._checking.keep(
            layer, self._adapter.layer_count, self._ratio, len(self._candidates)
        )
        if keep is None or keep >= len(self._chosen):
            return
        # (C,) of the chosen candidates, on the device
        deviation = self._deviation(layer, spans, slices)
        kept = (
            torch.sort(deviation, descending=True, stable=True).indices[:keep].sort().values.cpu()
        )
        before = self.current.positions
        self._chosen = self._chosen[kept]
        self._set_rows(self._candidates.positions[self._chosen])
        self.hidden = self.hidden[:, torch.searchsorted(before, self.current.positions)]

    def _set_rows(self, selected: torch.Tensor) -> None:
        positions = torch.cat((self._forced, selected)).sort().values
        self.current = Rows.of(positions).on(self._device)

    def _deviation(
        self, layer: int, spans: Sequence[Span], slices: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """sqrt(sum dK^2 + sum dV^2) of each chosen candidate, fresh against stored, K before RoPE,
        in float32.
        """
        positions = self._candidates.positions[self._chosen].to(self._device)
        rows = torch.searchsorted(self.current.positions, positions)
        k_raw, v = self._adapter.project_kv(layer, self.hidden[:, rows], Rows.of(positions))
        fresh = torch.stack((k_raw[0], v[0])).float()  # (2, G, C, D)
        squared = torch.empty(positions.numel(), device=self._device)
        for span, piece in zip(spans, slices, strict=True):
            low, high = torch.searchsorted(
                positions, torch.tensor([span.start, span.stop], device=self._device)
            )
            if low < high:
                stored = piece[:, :, positions[low:high] - span.start + span.offset].float()
                squared[low:high] = (fresh[:, :, low:high] - stored).square().sum(dim=(0, 1, 3))
        return squared.sqrt()


class _JointPass:
    """The passes of some prompts over the layers of a model, as one."""

    def __init__(
        self, fusor: Fusor, prompts: Sequence[Fusing], between: Callable[[], None]
    ) -> None:
        self._fusor = fusor
        self._adapter = fusor.adapter
        self._prompts = prompts
        self._between = between
        self._others_s = 0.0

    def run(self) -> None:
        """Give each prompt its `fused`, or its `error`."""
        began = time.perf_counter()
        prompts = list(self._prompts)
        self._let_others_compute()  # which raises an error if the engine was closed
        self._each(prompts, Fusing.start)
        self._layers(prompts, loads=True)
        # Everything is placed, and the questions' attention to it is known.
        asking = [one for one in prompts if one.asking is not None]
        self._each(asking, Fusing.choose_by_attention)
        self._layers(asking, loads=False)
        prompts = [one for one in prompts if one.error is None]
        if not prompts:
            return
        # (prompts, V)
        logits = self._adapter.logits(torch.cat([one.hidden[:, -1:] for one in prompts], dim=1))
        self._adapter.wait_for_device()
        took_s = time.perf_counter() - began
        for one, own in zip(prompts, logits, strict=True):
            one.end(
                own.clone() if len(prompts) > 1 else own, took_s, self._others_s, len(self._prompts)
            )
        computing_s = took_s - self._others_s - sum(one.reader.waited_s for one in prompts)
        self._fusor.speeds.add_compute(sum(one.row_layers for one in prompts), computing_s)

    def _layers(self, prompts: list[Fusing], *, loads: bool) -> None:
        for layer in range(self._adapter.layer_count):
            if loads:
                self._each(prompts, partial(Fusing.load, layer=layer))
            if not prompts:
                return
            with pausing(partial(self._pause, prompts)):
                _run_layer(self._adapter, layer, prompts)
            self._each(prompts, partial(Fusing.end_layer, layer=layer))
            self._let_others_compute()

    def _each(self, prompts: list[Fusing], act: Callable[[Fusing], None]) -> None:
        """Do `act` for every prompt; one that fails leaves."""
        for one in tuple(prompts):
            try:
                act(one)
            except Exception as error:
                one.error = error
                prompts.remove(one)

    def _pause(self, prompts: Sequence[Fusing]) -> None:
        if len(prompts) == 1:  # within a layer of several none may leave
            prompts[0].check()
        self._let_others_compute()

    def _let_others_compute(self) -> None:
        left = time.perf_counter()
        self._between()
        self._others_s += time.perf_counter() - left


def _run_layer(adapter: Adapter, layer: int, prompts: Sequence[Fusing]) -> None:
    """Run `layer` over the rows of all prompts; in the last layer only each prompt's last row needs
    an output.
    """
    is_last = layer == adapter.layer_count - 1
    if is_last and (several := [one.part(layer) for one in prompts if len(one.current) > 1]):
        adapter.project_kv(layer, *_joined(adapter, layer, several))
    parts = [one.part(layer, last_alone=is_last) for one in prompts]
    hidden = adapter.call_layer(layer, *_joined(adapter, layer, parts))
    for one, own in zip(
        prompts, torch.split(hidden, [len(part[0].rows) for part in parts], 1), strict=True
    ):
        one.hidden = own


def _joined(
    adapter: Adapter, layer: int, parts: Sequence[Part]
) -> tuple[torch.Tensor, Rows, LayerPass]:
    """What `layer` is given of all prompts: their rows behind one another."""
    prompts = [part[0] for part in parts]
    hidden = torch.cat([part[1] for part in parts], dim=1)
    cos = torch.cat([part[2] for part in parts], dim=1)
    sin = torch.cat([part[3] for part in parts], dim=1)
    rows = Rows(torch.cat([own.rows.positions for own in prompts]), None)
    return hidden, rows, adapter.joint_pass(layer, prompts, cos, sin)


def _not_recomputed(plan: Plan, chosen: torch.Tensor) -> tuple[Span, ...]:
    """The loaded spans with at least one token that is neither forced nor `chosen`: only these must
    be read.
    """
    computed = torch.zeros(plan.token_ids.numel(), dtype=torch.bool)
    computed[plan.forced] = True
    computed[plan.candidates.positions[chosen]] = True
    return tuple(span for span in plan.loaded() if not computed[span.start : span.stop].all())
