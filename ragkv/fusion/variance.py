"""The variance of a chunk's KV behind several texts: the measure of how much each token depends on what precedes it.

Only a few layers of the middle of the model are compared, so passes behind texts need not go further. This file knows
no texts and no networks.
"""

from collections.abc import Sequence

import torch


def scored_layers(layers: int) -> range:
    """The layers whose KV is compared: the last eighth of the first five eighths.

    Passes behind texts end there, and scores are as good as those of the later half of the layers (docs/selection.md).
    """
    last = 5 * layers // 8
    return range(last + 1 - max(1, layers // 8), last + 1)


def variance(stored: torch.Tensor, behind_texts: Sequence[torch.Tensor]) -> torch.Tensor:
    """How much the KV of a chunk varies with the text before it, (T,) float32.

    `stored` is its KV (L, 2, G, T, D), `behind_texts` that of the first layers, up to the last of `scored_layers`,
    behind each text. The score is the variance over the texts, in units of the squared norm of the stored KV. The
    distance from the stored KV is used only if there is one text: it is high at the start of every chunk, behind any
    text, and recomputing these tokens changes nothing. Computed where the KV behind the texts lies.
    """
    layers = scored_layers(len(stored))
    base = stored[layers.start : layers.stop].to(behind_texts[0].device).float()  # (L', 2, G, T, D)
    norm = base.square().sum(dim=(2, 4)).mean(dim=-1, keepdim=True).clamp_min(1e-12)  # (L', 2, 1)
    behind = [kv[layers.start : layers.stop].float() for kv in behind_texts]
    centre = base if len(behind) == 1 else torch.stack(behind).mean(dim=0)
    return torch.stack([_relative(kv - centre, norm) for kv in behind]).sum(dim=0) / max(1, len(behind) - 1)


def _relative(difference: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """|dK|^2 / mean |K|^2 + |dV|^2 / mean |V|^2, summed over layers: (L', 2, G, T, D), (L', 2, 1) -> (T,)."""
    return (difference.square().sum(dim=(2, 4)) / norm).sum(dim=(0, 1))
