"""What an adapter finds of a model once: views of its layers, its sizes, windows and rotary tables.
Running the layers needs none of this again.
"""

from typing import Any, ClassVar

import torch

from .cpu.packing import with_copies
from .layer_views import TilePause, attending_view, register
from .layers import PlainLayer
from .promptkv import KVShape
from .recording import Recording
from .rope import Rope


class ModelParts:
    """The parts of a decoder-only model with the llama architecture."""

    model_types: ClassVar[tuple[str, ...]] = (
        # one kind of layer
        *("llama", "mistral", "mixtral", "qwen3_moe", "starcoder2", "phi3", "olmo2"),
        *("qwen2", "qwen3"),  # `layer_types` names the sliding layers
        # RoPE rotates the first dimensions of each head, as many as the table has
        *("glm4", "stablelm"),
    )
    attention_name: ClassVar[str] = "self_attn"
    cache_argument: ClassVar[str] = "past_key_values"
    # G and D, which configs have under many names; the adapter measures them
    kv_heads: int
    head_dim: int
    kv_shape: KVShape

    def __init__(self, model: Any, packed_bytes: int) -> None:
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
        self._plain: list[PlainLayer] | None = None  # the same layers, called directly

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
