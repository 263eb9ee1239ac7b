"""KCache for plain transformers models: a cache layer and an attention function, both transformers' interfaces.

    model.set_attn_implementation(ATTENTION)
    model.generate(ids, past_key_values=kcache(model.config, KCacheConfig(top_n=128)))

A pass over several tokens uses SDPA over all values. A single token uses the N largest weights once there are more keys
than N. Layers with a window keep transformers' own cache, which holds no more than the window.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ragkv.config import KCacheConfig
from ragkv.errors import ConfigError

from .topn import attend_top, choose
from .values import STAGED_ROWS, HostValues, copy_stream

ATTENTION = "ragkv_kcache"


def kcache(model_config: Any, config: KCacheConfig) -> DynamicCache:
    """An empty cache for `generate`; raises `ConfigError` unless the model uses the attention `ATTENTION`."""
    if model_config._attn_implementation != ATTENTION:
        raise ConfigError(
            f"The model uses the attention {model_config._attn_implementation!r}, which cannot fetch values. Call "
            f"model.set_attn_implementation({ATTENTION!r}) first."
        )
    cache = DynamicCache(config=model_config)
    for at, layer in enumerate(cache.layers):
        if at >= config.resident_layers and type(layer) is DynamicLayer:
            cache.layers[at] = KCacheLayer(config)
    return cache


class KCacheLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer: K on the device and, once there are more keys than N, V in host memory."""

    keys: Any  # a tensor (B, G, S, D) after the first update
    values: Any  # the same, with no positions once V is in host memory

    def __init__(self, config: KCacheConfig, staged_rows: int = STAGED_ROWS) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._config, self._staged_rows = config, staged_rows
        self._on_host: HostValues | None = None
        self.rows_fetched = 0  # from host memory, over all steps; a row is one KV head at one position

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, Any]:
        """Append keys and values (B, G, T, D). Returns all keys, and all values or, for one token, `FetchedValues`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, alone = self.get_seq_length(), key_states.shape[2] == 1
        self.keys = torch.cat((self.keys, key_states), dim=-2)
        stop = self.keys.shape[2]
        if self._on_host is None:
            self.values = values = torch.cat((self.values, value_states), dim=-2)
            if not self._helps(stop):
                return self.keys, values
            self._send()
            return self.keys, FetchedValues(self) if alone else values
        if stop > self._on_host.capacity:
            self._on_host.reserve(2 * stop)
        self._on_host.put(start, value_states.flatten(0, 1))
        return self.keys, FetchedValues(self) if alone else self._all(stop)

    def attend(
        self, query: torch.Tensor, allowed: torch.Tensor | None, scaling: float, softcap: float | None
    ) -> torch.Tensor:
        """Queries (B, H, 1, D) -> (B, H, 1, D). `allowed` (B, 1, 1, S) bool marks the visible keys."""
        assert self._on_host is not None and self._config.top_n is not None
        batch, kv_heads, keys, head_dim = self.keys.shape
        if allowed is not None:
            allowed = allowed[..., :keys].expand(batch, kv_heads, 1, keys).flatten(0, 1)  # (B G, 1, S)
        choice = choose(
            query.reshape(batch * kv_heads, -1, head_dim),
            self.keys.flatten(0, 1),
            self._config.top_n,
            scaling,
            softcap,
            allowed=allowed,
            renormalise=self._config.renormalise,
        )
        return attend_top(choice, self._fetch).reshape(query.shape)

    @property
    def host_bytes(self) -> int:
        """Bytes allocated in host memory."""
        return self._on_host.host_bytes if self._on_host is not None else 0

    @property
    def device_bytes(self) -> int:
        """Bytes allocated on the device: keys, values that have not moved, and staging."""
        if not self.is_initialized:
            return 0
        staged = self._on_host.device_bytes if self._on_host is not None else 0
        held: tuple[torch.Tensor, ...] = (self.keys, self.values)
        return staged + sum(t.numel() * t.element_size() for t in held)

    # Beam search and assisted decoding need these. They are rare, so V returns to the device for them.

    def crop(self, tokens_to_remove: int) -> None:
        """Remove that many of the newest tokens; the number is negative."""
        with self._values_on_device():
            super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the batch."""
        with self._values_on_device():
            super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch."""
        with self._values_on_device():
            super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows of the batch."""
        with self._values_on_device():
            super().batch_select_indices(indices)

    def reset(self) -> None:
        """Remove all tokens."""
        self._on_host = None
        super().reset()

    def _helps(self, keys: int) -> bool:
        top_n = self._config.top_n
        return top_n is not None and (keys > top_n or not self._config.fall_back)

    def _send(self) -> None:
        """Move V to the host."""
        v = self.values.flatten(0, 1)  # (B G, S, D)
        self._on_host = HostValues(v.shape[0], v.shape[2], 2 * v.shape[1], v.dtype, v.device, self._staged_rows)
        self._on_host.load(v, copy_stream(v.device))
        self.values = self.values[:, :, :0]

    def _all(self, stop: int) -> torch.Tensor:
        assert self._on_host is not None
        batch, kv_heads = self.keys.shape[:2]
        return self._on_host.take(0, stop).view(batch, kv_heads, stop, -1)

    @contextmanager
    def _values_on_device(self) -> Iterator[None]:
        if self._on_host is not None:
            self.values, self._on_host = self._all(self.keys.shape[2]), None
        yield
        if self.is_initialized and self._helps(self.get_seq_length()):
            self._send()

    def _fetch(self, rows: torch.Tensor) -> torch.Tensor:
        assert self._on_host is not None
        values, fetched = self._on_host.fetch(rows)
        self.rows_fetched += fetched
        return values


@dataclass(frozen=True, slots=True)
class FetchedValues:
    """Passed to the attention function in place of values that are not on the device."""

    layer: KCacheLayer


def kcache_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: "torch.Tensor | FetchedValues",
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls: query (B, H, R, D) -> (B, R, H, D)."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(value, FetchedValues):
        out = value.layer.attend(query, attention_mask, scaling, softcap)
    elif softcap is not None:  # SDPA has none
        out = _capped(query, key, value, attention_mask, scaling, softcap)
    else:
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
        return found
    return out.transpose(1, 2).contiguous(), None


def _capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float,
) -> torch.Tensor:
    """Soft-capped attention of (B, H, R, D) over keys and values (B, G, S, D)."""
    groups, rows, keys = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.tanh(torch.matmul(query, key.transpose(2, 3)).float() * (scaling / softcap)) * softcap
    if mask is None:
        mask = torch.ones((rows, keys), dtype=torch.bool, device=query.device).tril(keys - rows)
    lowest = torch.finfo(scores.dtype).min  # not -inf, because a padded row sees no key at all
    return torch.matmul(scores.masked_fill(~mask, lowest).softmax(-1).to(value.dtype), value)


AttentionInterface.register(ATTENTION, kcache_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
