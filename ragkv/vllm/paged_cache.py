"""vLLM's paged KV cache, written through vLLM's own attention layers.

Every backend has its own layout of a block. `do_kv_cache_update` of the backend writes keys and
values by their slots, as vLLM itself does after computing them, so no layout is known here. `check`
proves at start that vLLM's attention reads what was written.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import CommonAttentionMetadata

from ragkv.errors import UnsupportedModelError
from ragkv.model import Adapter, PromptKV
from ragkv.model.attention import attend_one

from .settings import check_layer

# `NULL_BLOCK` stands for positions that no query sees any more; it is never written.
NULL_BLOCK = 0
MOST_CHECKED_TOKENS = 8192
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class PagedCache:
    """The KV cache of every attention layer, in the order of the layers."""

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, kv_caches: dict[str, torch.Tensor]
    ) -> None:
        """`kv_caches` is what vLLM registers: a tensor (blocks, G, block tokens, 2 D) by the name
        of its layer.
        """
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise UnsupportedModelError(
                f"vLLM keeps this model's KV in {len(groups)} groups of layers; RagKVConnector "
                "supports one."
            )
        self._config = vllm_config
        self._spec = groups[0].kv_cache_spec
        self.block_tokens: int = self._spec.block_size
        layers = vllm_config.compilation_config.static_forward_context
        self._names = sorted(kv_caches, key=extract_layer_index)
        self._layers = [layers[name] for name in self._names]
        self._caches = [kv_caches[name] for name in self._names]
        for name, layer in zip(self._names, self._layers, strict=True):
            if not hasattr(layer.impl, "do_kv_cache_update"):
                raise UnsupportedModelError(
                    f"vLLM's attention backend of {name} ({type(layer.impl).__name__}) writes "
                    "its KV cache in a way "
                    "that RagKVConnector does not know."
                )

    @property
    def first_layer(self) -> tuple[str, Any]:
        """The name and the module of the first attention layer."""
        return self._names[0], self._layers[0]

    def write(self, kv: PromptKV, start: int, stop: int, block_ids: Sequence[int]) -> None:
        """Write the positions start ... stop - 1 of a prompt's KV into its blocks."""
        positions = torch.arange(start, stop)
        blocks = torch.tensor(block_ids, dtype=torch.int64)[positions // self.block_tokens]
        seen = blocks != NULL_BLOCK
        slots = (blocks * self.block_tokens + positions % self.block_tokens)[seen].to(
            self._caches[0].device
        )
        for layer in range(len(self._layers)):
            k_rot, v = kv.view(layer, stop)  # (1, G, stop, D) each
            key, value = (
                part[0, :, start:].transpose(0, 1)[seen].contiguous() for part in (k_rot, v)
            )
            self._put(layer, key, value, slots)  # (tokens, G, D) each

    def check(self, adapter: Adapter) -> None:
        """Compare vLLM's attention over written random KV with ragkv's, in every layer.

        Raises `UnsupportedModelError` if a shape, a window or a number differs.
        """
        if len(self._layers) != adapter.layer_count:
            raise UnsupportedModelError(
                f"vLLM has {len(self._layers)} attention layers and ragkv has "
                f"{adapter.layer_count}; RagKVConnector "
                "cannot serve this model."
            )
        windows = set[int]()
        for layer, attention in enumerate(self._layers):
            check_layer(layer, attention, adapter)
            window = adapter.window(layer)
            tokens = 2 * self.block_tokens + 5
            if window is not None and window not in windows:  # a long prompt once for every window
                windows.add(window)
                tokens = max(tokens, window + 7)
            tokens = min(
                tokens, MOST_CHECKED_TOKENS, (self._caches[layer].shape[0] - 1) * self.block_tokens
            )
            try:
                error = self._difference(layer, tokens, window)
            except Exception as problem:
                raise UnsupportedModelError(
                    f"vLLM's attention of layer {layer} ({type(attention.impl).__name__}) cannot "
                    f"be checked: {problem}"
                ) from problem
            if not error < TOLERANCE.get(adapter.dtype, 0.0):
                raise UnsupportedModelError(
                    f"vLLM's attention of layer {layer} ({type(attention.impl).__name__}) read "
                    "other KV than was "
                    f"written: the results differ by {error:.2g}. RagKVConnector does not "
                    "support this layout."
                )

    @torch.no_grad()
    def _difference(self, layer: int, tokens: int, window: int | None) -> float:
        """The largest difference of one query's attention over `tokens` random keys and values."""
        attention = self._layers[layer]
        cache = self._caches[layer]
        count = -(-tokens // self.block_tokens)
        blocks = torch.arange(cache.shape[0] - count, cache.shape[0])
        blocks = blocks[torch.randperm(count, generator=torch.Generator().manual_seed(0))]
        positions = torch.arange(tokens)
        slots = (
            blocks[positions // self.block_tokens] * self.block_tokens
            + positions % self.block_tokens
        )
        heads = attention.num_heads
        kv_heads = attention.num_kv_heads
        size = attention.head_size
        made = torch.Generator().manual_seed(layer)
        dtype = self._config.model_config.dtype
        device = cache.device

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=made).to(dtype).to(device)

        query = random(1, heads, size)
        key = random(tokens, kv_heads, size)
        value = random(tokens, kv_heads, size)
        self._put(layer, key, value, slots.to(device))
        wanted = attend_one(
            query[None].transpose(1, 2),  # (1, H, 1, D)
            key[None].transpose(1, 2),  # (1, G, tokens, D)
            value[None].transpose(1, 2),
            window,
            attention.impl.scale,
            getattr(attention.impl, "logits_soft_cap", None) or None,
        )
        found = torch.empty_like(query)
        metadata = self._metadata(
            layer, tokens, blocks.to(torch.int32).to(device), slots[-1:].to(device)
        )
        with set_current_vllm_config(self._config):
            attention.impl.forward(
                attention, query, key[-1:], value[-1:], cache, metadata, output=found
            )
        return float((found.flatten().float() - wanted.flatten().float()).abs().max())

    def _metadata(self, layer: int, tokens: int, blocks: torch.Tensor, slot: torch.Tensor) -> Any:
        """The backend's metadata of one request that decodes its last of `tokens` tokens."""
        device = blocks.device
        starts = torch.tensor([0, 1], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor([tokens], dtype=torch.int32, device=device),
            num_reqs=1,
            num_actual_tokens=1,
            max_query_len=1,
            max_seq_len=tokens,
            block_table_tensor=blocks[None],
            slot_mapping=slot,
            seq_lens_cpu_upper_bound=torch.tensor([tokens], dtype=torch.int32),
        )
        with set_current_vllm_config(self._config):
            make = self._layers[layer].attn_backend.get_builder_cls()
            return make(self._spec, self._names, self._config, device).build(0, common)

    def _put(self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Write key and value (T, G, D) at `slots` (T,)."""
        attention = self._layers[layer]
        attention.impl.do_kv_cache_update(attention, key, value, self._caches[layer], slots)
