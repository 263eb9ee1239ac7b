"""Naive references that use only the models' own modules: short, slow and obviously right.

Every function takes an unused model, because length-dependent RoPE keeps state, and lists of token
ids.
"""

from typing import Any

import torch
from transformers import Cache, DynamicCache


def body(model: Any) -> Any:
    return getattr(model, "gpt_neox", None) or model.model


def attention_of(layer: Any) -> Any:
    return getattr(layer, "self_attn", None) or layer.attention


def cache_argument(model: Any) -> str:
    return "layer_past" if hasattr(model, "gpt_neox") else "past_key_values"


@torch.no_grad()
def full_prefill(model: Any, ids: list[int]) -> tuple[torch.Tensor, DynamicCache]:
    """Logits of the last token (V,) and the cache of the whole prompt."""
    cache = DynamicCache()
    out = model(torch.tensor([ids]), past_key_values=cache)
    return out.logits[0, -1].float(), cache


def embeddings_at(
    model: Any, layer: int, positions: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's own cos and sin of `layer` at `positions` (R,), with the frequencies of `length`
    tokens.
    """
    rotary = body(model).rotary_emb
    everywhere = torch.arange(length)[None]
    kinds = (model.config.layer_types[layer],) if type(model).__name__.startswith("Gemma3") else ()
    cos, sin = rotary(torch.zeros(1), everywhere, *kinds)
    return cos[:, positions], sin[:, positions]


@torch.no_grad()
def encode_at(
    fresh: Any, prefix: list[int], chunk: list[int], start: int, fresh_long: Any, length: int
) -> DynamicCache:
    """KV of `chunk` encoded behind `prefix` only, with keys rotated to `start` in a prompt of
    `length` tokens.
    """
    inputs: list[torch.Tensor] = []
    hooks = [
        attention_of(layer).register_forward_pre_hook(
            lambda _m, args, kwargs: inputs.append(
                kwargs.get("hidden_states", args[0] if args else None)
            ),
            with_kwargs=True,
        )
        for layer in body(fresh).layers
    ]
    fresh(torch.tensor([prefix + chunk]), past_key_values=DynamicCache())
    for hook in hooks:
        hook.remove()
    moved = DynamicCache()
    positions = torch.arange(start, start + len(chunk))
    for index, layer in enumerate(body(fresh_long).layers):
        hidden = inputs[index][:, len(prefix) :]
        attention_of(layer)(
            hidden_states=hidden,
            position_embeddings=embeddings_at(fresh_long, index, positions, length),
            attention_mask=None,
            **{cache_argument(fresh_long): moved},
        )
    return moved


@torch.no_grad()
def concatenation(
    fresh: Any, prefix: list[int], chunks: list[list[int]], question: list[int]
) -> tuple[Any, ...]:
    """Full KV reuse: chunks are encoded separately and placed, then the question is computed.
    Logits (V,), cache.
    """
    ids = prefix + sum(chunks, []) + question
    _, whole = full_prefill(fresh(), ids)
    joined = DynamicCache()
    start = len(prefix)
    for layer in range(len(whole.layers)):
        joined.update(
            whole.layers[layer].keys[:, :, :start], whole.layers[layer].values[:, :, :start], layer
        )
    for chunk in chunks:
        moved = encode_at(fresh(), prefix, chunk, start, fresh(), len(ids))
        for layer in range(len(whole.layers)):
            joined.update(moved.layers[layer].keys, moved.layers[layer].values, layer)
        start += len(chunk)
    out = fresh()(
        torch.tensor([question]),
        past_key_values=joined,
        position_ids=torch.arange(start, len(ids))[None],
    )
    return out.logits[0, -1].float(), joined


class _Scatter(Cache):
    """Overwrites stored rows with fresh ones and returns all rows."""

    def __init__(self, stored: DynamicCache, rows: torch.Tensor) -> None:
        super().__init__(layers=[])
        self.stored = stored
        self.rows = rows

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *_: Any, **__: Any) -> Any:
        layer = self.stored.layers[layer_idx]
        layer.keys[:, :, self.rows] = key_states
        layer.values[:, :, self.rows] = value_states
        return layer.keys, layer.values


def window_of(model: Any, layer: int) -> int | None:
    kinds = getattr(model.config, "layer_types", None)
    sliding = kinds is None or kinds[layer] == "sliding_attention"
    return getattr(model.config, "sliding_window", None) if sliding else None


@torch.no_grad()
def selective(
    fresh: Any, ids: list[int], stored: DynamicCache, rows: torch.Tensor
) -> tuple[torch.Tensor, DynamicCache]:
    """Recompute `rows` (R,) in every layer over `stored` KV of all positions, with an explicit
    mask. Logits, cache.
    """
    model = fresh()
    model.set_attn_implementation("eager")
    cache = _Scatter(stored, rows)
    hidden = model.get_input_embeddings()(torch.tensor([ids])[:, rows])
    hidden = hidden * getattr(body(model), "embedding_multiplier", 1.0)
    keys = torch.arange(len(ids))
    for index, layer in enumerate(body(model).layers):
        allowed = keys[None] <= rows[:, None]
        if (window := window_of(model, index)) is not None:
            allowed &= keys[None] > rows[:, None] - window
        mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)[
            None, None
        ]
        out = layer(
            hidden,
            attention_mask=mask,
            position_ids=rows[None],
            position_embeddings=embeddings_at(model, index, rows, len(ids)),
            use_cache=True,
            **{cache_argument(model): cache},
        )
        hidden = out[0] if isinstance(out, tuple) else out
    norm = getattr(body(model), "norm", None) or body(model).final_layer_norm
    logits = model.get_output_embeddings()(norm(hidden))[0, -1].float()
    logits = (
        logits * getattr(model, "logit_scale", 1.0) / getattr(model.config, "logits_scaling", 1.0)
    )
    cap = getattr(model.config, "final_logit_softcapping", None)
    return (logits if cap is None else torch.tanh(logits / cap) * cap), stored
