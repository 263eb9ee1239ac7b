"""Adapters: run the layers of a transformer one at a time over chosen rows of a prompt.

The base class handles the llama architecture; `families.py` has the differences of other families.
The model is never changed: an adapter works on shallow copies of its layers, which share every
weight and differ in a few modules (see `layer_views.py`). It knows nothing of entries, chunks or
selection.
"""

import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from transformers import Cache

from ragkv.runtime import no_check

from .cpu.packing import with_copies
from .layer_views import (
    CaptureCache,
    Captured,
    TilePause,
    attending_view,
    plain_layers_of,
    register,
)
from .layers import PlainLayer
from .promptkv import KVShape, PromptKV
from .recording import Recording
from .rope import Rope, Rotation
from .rows import JointPass, LayerPass, PassPart, Pause, Rows


class Adapter:
    """Runs the layers of a decoder-only model with the llama architecture."""

    model_types: ClassVar[tuple[str, ...]] = (
        # one kind of layer
        *("llama", "mistral", "mixtral", "qwen3_moe", "starcoder2", "phi3", "olmo2"),
        *("qwen2", "qwen3"),  # `layer_types` names the sliding layers
        # RoPE rotates the first dimensions of each head, as many as the table has
        *("glm4", "stablelm"),
    )
    attention_name: ClassVar[str] = "self_attn"
    cache_argument: ClassVar[str] = "past_key_values"

    def __init__(self, model: Any, packed_bytes: int = 0) -> None:
        """`packed_bytes` limits the memory of copies of weights, see `packing`."""
        register()
        self.model = model
        self.config = model.config
        self.body = self._body()
        self.device: torch.device = next(model.parameters()).device
        self.dtype: torch.dtype = next(model.parameters()).dtype
        on_cpu = self.device.type == "cpu"
        self._tiles = TilePause()
        views = [
            attending_view(layer, self.attention_name, self._tiles if on_cpu else None)
            for layer in self.body.layers
        ]
        (self._head, *self.layers), self.packed_bytes = with_copies(
            [self.model.get_output_embeddings(), *views], packed_bytes, self.device
        )
        self.layer_count = len(self.layers)  # L
        # a config is slow to read
        self.windows = [self.window(layer) for layer in range(self.layer_count)]
        self.rope = Rope(self.body.rotary_emb, self.rope_kinds(), self.device)
        self.rotary_dims: int = self.rope.tables(1).tables[self.rope_kinds()[0]].shape[-1]
        ones = torch.ones((1, 1, self.rotary_dims), dtype=self.dtype, device=self.device)
        self._identity = (ones, torch.zeros_like(ones))
        module = sys.modules[type(self.body).__module__]
        self.rotation = Rotation(module.apply_rotary_pos_emb, self.rotary_dims, self.device)
        self._plain: list[PlainLayer] | None = None  # the same layers, called directly
        # G and D are measured by calling a layer, because configs have many names for them
        self.kv_heads, self.head_dim = self._measure_kv()
        self.kv_shape = KVShape(self.layer_count, self.kv_heads, self.head_dim)
        self._plain = plain_layers_of(self)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return self.layer_count * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def vocabulary(self) -> int:
        """The number of token ids."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def context_length(self) -> int | None:
        """The maximum length of prompt and answer; `None` if the config sets none (dynamic
        RoPE).
        """
        parameters = getattr(self.config, "rope_parameters", None) or {}
        if parameters.get("rope_type") == "dynamic":
            return None
        return getattr(self.config, "max_position_embeddings", None)

    def new_recording(self, start: int, stop: int) -> Recording:
        """An empty recording of the positions `start ... stop - 1`."""
        shape = (self.layer_count, 2, self.kv_heads, stop - start + 1, self.head_dim)
        return Recording(start, stop, torch.empty(shape, dtype=self.dtype, device=self.device))

    def new_kv(self, capacity: int) -> PromptKV:
        """Empty KV of `capacity` positions."""
        return PromptKV(self.kv_shape, capacity, self.dtype, self.device)

    # Families override these

    def _body(self) -> Any:
        return self.model.model

    def window(self, layer: int) -> int | None:
        """Keys a row of `layer` sees, itself included; `None` on full layers."""
        kinds = getattr(self.config, "layer_types", None)
        if kinds is not None and kinds[layer] != "sliding_attention":
            return None
        return getattr(self.config, "sliding_window", None)

    def rope_kinds(self) -> tuple[str, ...]:
        """The kinds of rotary table in the model; ("",) if all layers share one."""
        return ("",)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids (R,) -> hidden (1, R, E), with the model's own scaling."""
        hidden: torch.Tensor = self.body.embed_tokens(token_ids.unsqueeze(0))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Last layer's hidden (1, R, E) -> logits (R, V) float32, after any scaling or capping."""
        return self.scale_logits(self._head(self.body.norm(hidden)))[0].float()

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

    def wait_for_device(self) -> None:
        """Block until the device has computed what this thread queued on its current stream; a CPU
        queues nothing.

        Every pass ends with it. Threads hand over results, and their streams may differ; without
        it, times would be those of queueing kernels.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def rotate(
        self, layer: int, raw: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Rotate queries or keys (1, heads, R, D) by cos, sin (1, R, rotary dims), computed in
        float32.
        """
        return self.rotation(raw, cos, sin) if self.rotates(layer) else raw

    def rotate_in_float32(
        self, layer: int, raw: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Like `rotate`, but the result stays float32 and the caller rounds it; `raw` itself
        without RoPE.
        """
        return self.rotation.in_float32(raw, cos, sin) if self.rotates(layer) else raw

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
        """G and D, measured on one token's keys."""
        token = torch.zeros(1, dtype=torch.int64, device=self.device)
        k_raw, _ = self.project_kv(0, self.embed(token), Rows.span(0, 1, self.device))
        return k_raw.shape[1], k_raw.shape[3]
