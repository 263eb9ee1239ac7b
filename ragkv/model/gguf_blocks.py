"""Finds the four-bit blocks of a GGUF file, as grids of a model's linear layers.

transformers unpacks a file to plain weights. A row of the file is found in the model's layers by
comparing its numbers. So nothing here depends on the names of a family, and rows that were
reordered, joined or split are found too. If transformers changed a row, it is not found, and its
layer has no grid.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import gguf
import numpy as np
import torch
import xxhash

from .cpu.int4 import Grid

# Kinds of tensors whose blocks have 16 evenly spaced values, and in how many inputs the low halves
# of bytes come before the high ones.
KINDS = {"Q4_0": 32, "Q4_1": 32, "Q4_K": 64}


def grids_of(tensors: Iterable[Any], model: torch.nn.Module) -> dict[str, Grid]:
    """The grids of the model's linear layers, by their names, from the tensors of gguf's reader.

    The model is what transformers unpacked, in bfloat16.
    """
    # 1. the grids of all rows of the file, joined by their number of inputs
    parts: defaultdict[int, list[Grid]] = defaultdict(list)
    places: defaultdict[int, dict[bytes, int]] = defaultdict(dict)  # of a row among the joined ones
    for tensor in tensors:
        if tensor.tensor_type.name in KINDS and len(tensor.shape) == 2:
            weights = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
            inputs = weights.shape[1]
            first = sum(len(part.counts) for part in parts[inputs])
            digests = enumerate(_digests(weights.bfloat16()), first)
            places[inputs] |= {digest: row for row, digest in digests}
            counts = torch.from_numpy(_counts(tensor.data, tensor.tensor_type))
            parts[inputs].append(Grid.through(counts, weights))
    joined = {
        inputs: Grid(*map(torch.cat, zip(*some, strict=True))) for inputs, some in parts.items()
    }
    # 2. those of each layer, if all of its rows are known
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and layer.weight.dtype is torch.bfloat16:
            known = places[layer.weight.shape[1]]
            rows = [known.get(digest) for digest in _digests(layer.weight.detach())]
            if None not in rows:
                found[name] = Grid(*(part[rows] for part in joined[layer.weight.shape[1]]))
    return found


def _counts(data: np.ndarray[Any, Any], kind: Any) -> np.ndarray[Any, Any]:
    """The counts (out, in) uint8, 0 to 15, in the blocks of a tensor (out, bytes)."""
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.ascontiguousarray(data).view(np.uint8).reshape(-1, size)
    halves = KINDS[kind.name] // 2
    packed = blocks[:, size - numbers // 2 :].reshape(-1, halves)  # scales come first
    return np.concatenate([packed & 15, packed >> 4], axis=1).reshape(len(data), -1)


def _digests(weights: torch.Tensor) -> Iterable[bytes]:
    """A digest of each row of weights (out, in)."""
    rows = weights.contiguous().view(torch.uint8).numpy()
    return (xxhash.xxh3_128_digest(row.data) for row in rows)
