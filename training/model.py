"""The reader as it is trained: a Llama in plain torch, fast on a small CPU, with auxiliary heads
for training only.

The exported weights load into `LlamaForCausalLM` and give the same logits (`tests/training` checks
that). Projections of the same input are one matrix here. This file knows nothing of worlds.

Shapes: B rows, S positions, H query heads, G KV heads, D head dim, E hidden.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from training.batches import ATTENTION_TARGETS, AUXILIARY_HEADS


@dataclass(frozen=True)
class Shape:
    """The size of a reader."""

    vocabulary: int = 1664
    hidden: int = 160
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    inner: int = 320
    rope_theta: float = 10000.0
    eps: float = 1e-5
    positions: int = 2048  # the longest prompt, in tokens


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (..., D) with its two halves rotated by cos, sin (..., D/2)."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Block(nn.Module):
    """Attention and MLP of one layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = nn.Parameter(torch.randn(rows, shape.hidden) * shape.hidden**-0.5)
        self.out = nn.Parameter(torch.zeros(shape.hidden, shape.heads * shape.head_dim))
        self.gate_up = nn.Parameter(torch.randn(2 * shape.inner, shape.hidden) * shape.hidden**-0.5)
        self.down = nn.Parameter(torch.zeros(shape.hidden, shape.inner))
        self.norm1 = nn.Parameter(torch.ones(shape.hidden))
        self.norm2 = nn.Parameter(torch.ones(shape.hidden))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, bias: Tensor) -> Tensor:
        """x (B, S, E); cos, sin (B, S, 1, D/2); bias (B, 1, S, S), added to the scores."""
        s = self.shape
        heads = s.heads
        groups = s.kv_heads
        dim = s.head_dim
        rows, length, _ = x.shape
        normed = F.rms_norm(x, (s.hidden,), self.norm1.to(x.dtype), s.eps)
        qkv = F.linear(normed, self.qkv).view(rows, length, heads + 2 * groups, dim)
        rotated = rotate(qkv[:, :, : heads + groups], cos, sin)
        query, key = torch.split(rotated.transpose(1, 2), [heads, groups], 1)
        key, value = (
            part.repeat_interleave(heads // groups, 1)
            for part in (key, qkv[:, :, heads + groups :].transpose(1, 2))
        )
        mixed = F.scaled_dot_product_attention(
            query, key.to(query.dtype), value.to(query.dtype), bias.to(query.dtype)
        )
        mixed = mixed.transpose(1, 2).reshape(rows, length, heads * dim)
        x = x + F.linear(mixed, self.out)
        gate, up = F.linear(
            F.rms_norm(x, (s.hidden,), self.norm2.to(x.dtype), s.eps), self.gate_up
        ).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)


class Reader(nn.Module):
    """Embedding, blocks, output head, and the auxiliary heads of training."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Parameter(torch.randn(shape.vocabulary, shape.hidden))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        # small, since the head is the embedding
        self.norm = nn.Parameter(torch.full((shape.hidden,), 0.1))
        self.auxiliary = nn.Parameter(
            torch.zeros(len(AUXILIARY_HEADS), 2, shape.hidden, shape.hidden)
        )
        self.attention_layers = self._layers(ATTENTION_TARGETS, (2, 5, 6, 3, 7))
        self.auxiliary_layers = self._layers(AUXILIARY_HEADS, (1, 3, 5, 5, 6, 3, 4))

    def _layers(self, names: Sequence[str], layers_of_8: Sequence[int]) -> dict[str, int]:
        """The layer of each name, given for a reader of 8 layers."""
        return {
            name: round(n * self.shape.layers / 8)
            for name, n in zip(names, layers_of_8, strict=True)
        }

    def forward(
        self, ids: Tensor, positions: Tensor, bias: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The last hidden states (B, S, E), and those after the layers with auxiliary losses; bias
        (B, 1, S, S).
        """
        cos, sin = (part[:, :, None] for part in self.rotation(positions, dtype))  # (B, S, 1, D/2)
        x = F.embedding(ids, self.embed).to(dtype)
        tapped = {}
        for number, block in enumerate(self.blocks, start=1):
            x = block(x, cos, sin, bias)
            if number in self.auxiliary_layers.values() or number in self.attention_layers.values():
                tapped[number] = x
        return F.rms_norm(x, (self.shape.hidden,), self.norm.to(x.dtype), self.shape.eps), tapped

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, E) -> (N, V), float32; the output head is the embedding, so a circuit that copies one
        word copies all.
        """
        return F.linear(hidden, self.embed).float()

    def attention_log_weights(
        self, target: str, tapped: dict[int, Tensor], positions: Tensor, bias: Tensor, at: Tensor
    ) -> Tensor:
        """Log attention weights (N, S) of head 0 in the block of this target, at (row, position)
        `at` (N, 2).
        """
        layer = self.attention_layers[target]
        block = self.blocks[layer]
        assert isinstance(block, Block)
        heads = self.shape.heads
        dim = self.shape.head_dim
        normed = F.rms_norm(tapped[layer], (self.shape.hidden,), block.norm1, self.shape.eps)
        cos, sin = self.rotation(positions, torch.float32)
        # (B, S, D)
        key = rotate(F.linear(normed, block.qkv[heads * dim : (heads + 1) * dim]), cos, sin)
        rows = at[:, 0]
        places = at[:, 1]
        # (N, D)
        query = rotate(
            F.linear(normed[rows, places], block.qkv[:dim]), cos[rows, places], sin[rows, places]
        )
        scores: Tensor = torch.einsum("nd,nsd->ns", query, key[rows]).float() * dim**-0.5
        return F.log_softmax(scores + bias[rows, 0, places].float(), dim=-1)

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(..., S) -> cosines and sines (..., S, D/2)."""
        frequency = self.shape.rope_theta ** -(
            torch.arange(0, self.shape.head_dim, 2).float() / self.shape.head_dim
        )
        angle = positions[..., None].float() * frequency
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def auxiliary_logits(self, head: int, piece: int, hidden: Tensor) -> Tensor:
        """(N, E) after an auxiliary head's layer -> (N, V): the name that the head predicts."""
        normed = F.rms_norm(hidden, (self.shape.hidden,))
        return self.logits(F.linear(normed, self.auxiliary[head, piece]))


def bias(branch: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, S) branch numbers -> (B, 1, S, S): 0 where a position may attend, very negative
    elsewhere.
    """
    length = branch.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    same = branch[:, :, None] == branch[:, None, :]
    allowed = causal & (same | (branch[:, None, :] == 0))
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, -30000.0)[:, None]


def export(reader: Reader) -> tuple[dict[str, object], dict[str, Tensor]]:
    """The transformers config and weights (views) of this reader, without the auxiliary heads."""
    shape = reader.shape
    dim = shape.head_dim
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    weights: dict[str, Tensor] = {
        "model.embed_tokens.weight": reader.embed,
        "model.norm.weight": reader.norm,
    }
    for number, block in enumerate(reader.blocks):
        assert isinstance(block, Block)
        query, key, value = torch.split(block.qkv, [queries, keys, keys])
        gate, up = block.gate_up.chunk(2)
        names = {
            "self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": value,
            "self_attn.o_proj": block.out,
            "mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": block.down,
            "input_layernorm": block.norm1, "post_attention_layernorm": block.norm2,
        }  # fmt: skip
        weights.update(
            {f"model.layers.{number}.{name}.weight": value for name, value in names.items()}
        )
    config = {
        "vocab_size": shape.vocabulary, "hidden_size": shape.hidden, "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": dim, "rms_norm_eps": shape.eps, "max_position_embeddings": shape.positions,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return config, {name: value.detach() for name, value in weights.items()}


def load(folder: Path) -> Reader:
    """The reader of a transformers folder that `export` wrote, in float32, without
    auxiliary heads.
    """
    config = json.loads((folder / "config.json").read_text())
    shape = Shape(
        config["vocab_size"], config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"],
        config["num_key_value_heads"], config["head_dim"], config["intermediate_size"],
        config["rope_parameters"]["rope_theta"], config["rms_norm_eps"], config["max_position_embeddings"],
    )  # fmt: skip
    reader = Reader(shape)
    with safe_open(str(folder / "model.safetensors"), framework="pt") as stored, torch.no_grad():
        for name, value in export(reader)[1].items():
            value.copy_(stored.get_tensor(name))
    return reader
