"""Adapters: run the layers of a transformer one at a time over chosen rows of a prompt.

The base class handles the llama architecture; `families.py` has the differences of other families.
The model is never changed: an adapter works on shallow copies of its layers, which share every
weight and differ in a few modules (see `layer_views.py`). It knows nothing of entries, chunks or
selection.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import Cache

from ragkv.runtime import no_check

from .attention import Watch
from .cpu.copied import FEW_ROWS
from .device.rotation import rotate_halves
from .layer_views import CaptureCache, Captured, plain_layers_of
from .layers import PlainLayer
from .model_parts import ModelParts
from .promptkv import KVShape, PromptKV, PromptPart
from .recording import Recording
from .rope import RotaryTables
from .rows import JointPass, LayerPass, PassPart, Pause, Rows


class Adapter(ModelParts):
    """Runs the layers of a decoder-only model with the llama architecture."""

    def __init__(self, model: Any, packed_bytes: int = 0) -> None:
        """`packed_bytes` limits the memory of copies of weights, see `packing`."""
        super().__init__(model, packed_bytes)
        module = sys.modules[type(self.body).__module__]
        self._apply_rotary: Callable[..., tuple[torch.Tensor, torch.Tensor]] = (
            module.apply_rotary_pos_emb
        )
        self.rotates_in_halves = self._measure_halves(self.rotary_dims)
        self.kv_heads, self.head_dim = self._measure_kv()
        self.kv_shape = KVShape(self.layer_count, self.kv_heads, self.head_dim)
        self._plain = plain_layers_of(self)

    def new_kv(self, capacity: int) -> PromptKV:
        """Empty KV of `capacity` positions."""
        return PromptKV(self.kv_shape, capacity, self.dtype, self.device)

    # Families override these

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids (R,) -> hidden (1, R, E), with the model's own scaling."""
        hidden: torch.Tensor = self.body.embed_tokens(token_ids.unsqueeze(0))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Last layer's hidden (1, R, E) -> logits (R, V) float32, after any scaling or capping."""
        return self.scale_logits(self._head(self.body.norm(hidden)))[0].float()

    def wait_for_device(self) -> None:
        """Block until the device has computed what this thread queued on its current stream; a CPU
        queues nothing.

        Every pass ends with it. Threads hand over results, and their streams may differ; without
        it, times would be those of queueing kernels.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def scale_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Scale or cap logits as the family does."""
        return logits

    def rotates(self, layer: int) -> bool:
        """Whether `layer` uses RoPE."""
        return True

    def rope_kind(self, layer: int) -> str:
        """The kind of `layer`'s rotary table."""
        return ""

    # Families inherit these

    def rotate(
        self, layer: int, raw: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Rotate queries or keys (1, heads, R, D) by cos, sin (1, R, rotary dims), computed in
        float32.
        """
        if raw.device.type != "cpu" and self.rotates_in_halves and not raw.requires_grad:
            return rotate_halves(raw, cos, sin) if self.rotates(layer) else raw
        return self.rotate_in_float32(layer, raw, cos, sin).type_as(raw)

    def rotate_in_float32(
        self, layer: int, raw: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Like `rotate`, but the result stays float32 and the caller rounds it; `raw` itself
        without RoPE.
        """
        if not self.rotates(layer):
            return raw
        rotary_dims = cos.shape[-1]
        whole = rotary_dims == raw.shape[-1]
        part = (raw if whole else raw[..., :rotary_dims]).float()
        rotated = (
            self._rotate_halves(part, cos, sin)
            if self.rotates_in_halves
            else self._rotate_by_model(part, cos, sin)
        )
        return rotated if whole else torch.cat((rotated, raw[..., rotary_dims:].float()), dim=-1)

    def _rotate_by_model(
        self, raw: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        # zero query heads: only keys are rotated
        _, rotated = self._apply_rotary(raw[:, :0], raw, cos, sin)
        return rotated

    @staticmethod
    def _rotate_halves(raw: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """raw cos + rotate_half(raw) sin; for many rows with half of the memory passes of the
        model's own function.
        """
        raw_first, raw_second = raw.chunk(2, dim=-1)
        rotated = raw * cos
        half = raw.shape[-1] // 2
        if raw.shape[2] <= FEW_ROWS and raw.device.type == "cpu":
            return rotated.addcmul_(torch.cat((-raw_second, raw_first), dim=-1), sin)
        sin_first, sin_second = sin.chunk(2, dim=-1)
        # slices: training may not change chunks
        rotated[..., :half].addcmul_(raw_second, sin_first, value=-1)
        rotated[..., half:].addcmul_(raw_first, sin_second)
        return rotated

    def _measure_halves(self, rotary_dims: int) -> bool:
        """Whether the model's rotary function equals `_rotate_halves`; tested on random numbers."""
        generator = torch.Generator().manual_seed(0)
        raw, cos, sin = (
            torch.randn((1, 3, rotary_dims), generator=generator).to(self.device) for _ in range(3)
        )
        raw = torch.stack((raw, -2 * raw), dim=1)  # (1, 2, 3, rotary dims)
        return rotary_dims % 2 == 0 and torch.allclose(
            self._rotate_by_model(raw, cos, sin), self._rotate_halves(raw, cos, sin), atol=1e-5
        )

    def run_layer(
        self,
        layer: int,
        hidden: torch.Tensor,
        rows: Rows,
        kv: PromptKV,
        tables: RotaryTables,
        record: Recording | None = None,
        watch: Watch | None = None,
    ) -> torch.Tensor:
        """Run `layer` over hidden (1, R, E) of `rows`: writes their KV to `kv`, and they attend
        over all of it.
        """
        part = PromptPart(kv, rows, self.windows, record, watch)
        step = self.joint_pass(layer, [part], *tables.of(self.rope_kind(layer), rows))
        return self.call_layer(layer, hidden, rows, step)

    def joint_pass(
        self,
        layer: int,
        parts: Sequence[PassPart],
        cos: torch.Tensor,
        sin: torch.Tensor,
        pause: Pause = no_check,
    ) -> JointPass:
        """What `layer` is given for the rows of all `parts`; cos and sin, each (1, R, rotary dims),
        are of these. A long layer calls `pause` between its parts.
        """
        return JointPass(layer, parts, lambda raw: self.rotate(layer, raw, cos, sin), pause)

    def project_kv(
        self, layer: int, hidden: torch.Tensor, rows: Rows, step: LayerPass | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Raw keys and values of `layer`, each (1, G, R, D), from hidden (1, R, E), without its
        attention.

        `step` is given them, too.
        """
        plain = self._plain_layer(layer)
        if plain is not None:
            k_raw, v = plain.project_kv(hidden)
            if step is not None:
                step.update(k_raw, v, layer)
            return k_raw, v
        try:
            self._call(self.layers[layer], hidden, rows, CaptureCache(step))
        except Captured as captured:
            return captured.k_raw, captured.v
        raise AssertionError("a layer finished without updating its cache")

    def call_layer(
        self, layer: int, hidden: torch.Tensor, rows: Rows, step: LayerPass
    ) -> torch.Tensor:
        """Call `layer` on hidden (1, R, E): `step` takes its raw queries, keys and values."""
        plain = self._plain_layer(layer)
        if plain is None:
            return self._call(self.layers[layer], hidden, rows, step)
        return plain(hidden, step)

    def _plain_layer(self, layer: int) -> PlainLayer | None:
        plain = None if self._plain is None else self._plain[layer]
        return None if plain is None or any(plain.hooks) else plain

    def _call(
        self, view: torch.nn.Module, hidden: torch.Tensor, rows: Rows, step: Cache
    ) -> torch.Tensor:
        before = self._tiles.pause
        self._tiles.pause = step.pause if isinstance(step, LayerPass) else no_check
        try:
            out = view(
                hidden,
                attention_mask=step,
                position_ids=rows.positions.unsqueeze(0),
                position_embeddings=tuple(
                    table.expand(1, len(rows), -1) for table in self._identity
                ),
                use_cache=True,
                **{self.cache_argument: step},
            )
        finally:
            self._tiles.pause = before
        result: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return result

    @torch.no_grad()
    def _measure_kv(self) -> tuple[int, int]:
        """G and D, measured on one token's keys, because configs use many names for them."""
        token = torch.zeros(1, dtype=torch.int64, device=self.device)
        k_raw, _ = self.project_kv(0, self.embed(token), Rows.span(0, 1, self.device))
        return k_raw.shape[1], k_raw.shape[3]
