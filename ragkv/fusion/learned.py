"""Learned scores: a small network says which of a chunk's tokens are worth computing again (ours).

How far a token's KV moves behind other texts says that it depends on what precedes it, not that an answer depends on
it: of a name told by a pronoun and the words after it all move, and one of them is read. The network sees how keys and
values of a token and its neighbours move, layer by layer, and was taught by a model's own full prefills what comes of
computing it again (`ragkv/learning.py`). It is some ten thousand numbers, made once for a model and kept beside it; it
works at ingest, and what it says takes the place of `sensitivity`. It knows nothing of requests or stores.
"""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn
from torch.nn import functional

FILE_NAME = "ragkv-scores.safetensors"  # in a model's folder
TEXTS = 2  # k of the scorer: the network reads what a chunk does behind two texts
WIDTH = 64
KERNEL = 5  # tokens that a convolution sees
SEEN = 5  # times a token's values
FLOOR = 1e-4  # below it a relative squared distance is rounding
SCALE = 3.0  # of the logarithms of distances, which lie between -9 and 3

log = logging.getLogger(__name__)


class ScoreModel(nn.Module):
    """The network: one for a model's L layers and G D values a token."""

    def __init__(self, layers: int, values: int) -> None:
        super().__init__()
        self.layers, self.values = layers, values
        self.read = nn.Linear(6 * layers + 3, WIDTH)
        self.see = nn.Linear(SEEN * values, WIDTH, bias=False)
        self.mix = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, KERNEL, padding=KERNEL // 2) for _ in range(2))
        self.tell = nn.Linear(WIDTH, 1)
        nn.init.zeros_(self.tell.weight)  # untaught it says what the variance says
        nn.init.zeros_(self.tell.bias)
        self.digest = ""  # of the file it was read from

    def forward(self, studied: torch.Tensor) -> torch.Tensor:
        """What is `studied` of a chunk, (T, 5 G D + 6 L + 3), to the logarithm of its scores, (T,)."""
        seen, moves = torch.split(studied, [SEEN * self.values, 6 * self.layers + 3], dim=1)
        x = functional.gelu(self.read(moves / SCALE) + self.see(seen)).t()  # (WIDTH, T)
        for mix in self.mix:
            x = x + functional.gelu(mix(x))
        said: torch.Tensor = self.tell(x.t())[:, 0] + moves[:, -1]
        return said

    @torch.no_grad()
    def scores(self, stored: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
        """The scores (T,) float32 of a chunk's KV (L, 2, G, T, D), which is `others` behind two other texts."""
        said: torch.Tensor = self(study(stored, others)).exp()
        return said

    def to_bytes(self) -> bytes:
        """As a safetensors file."""
        return save({name: value.contiguous() for name, value in self.state_dict().items()})

    @classmethod
    def from_bytes(cls, data: bytes) -> "ScoreModel":
        """What `to_bytes` gave; raises `ValueError` on anything else."""
        try:
            values = load(data)
            layers, odd = divmod(values["read.weight"].shape[1] - 3, 6)
            width, uneven = divmod(values["see.weight"].shape[1], SEEN)
            model = cls(layers, width)
            model.load_state_dict(values)
        except (SafetensorError, KeyError, IndexError, RuntimeError) as error:
            raise ValueError(f"not a file of learned scores: {error}") from error
        if odd or uneven or not all(bool(value.isfinite().all()) for value in values.values()):
            raise ValueError("not a file of learned scores: its numbers are of another kind")
        model.digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        return model.eval().requires_grad_(False)


def study(stored: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """What the network reads of each token of a chunk with KV (L, 2, G, T, D): (T, 5 G D + 6 L + 3) float32.

    Its values in the first layer, where they say which token it is, and in two layers of the middle, there also how
    they differ between the two `others`; then logarithms of the squared distances between what is stored and the
    others, each pair, key and value, each layer, in units of the layer's mean squared norm; the token's place in its
    chunk; the log of `sensitivity`.
    """
    base, first, second = (kv.float() for kv in (stored, *others[:TEXTS]))
    norm = base.square().sum(dim=(2, 4)).mean(dim=-1, keepdim=True).clamp_min(1e-12)  # (L, 2, 1)
    pairs = (first - base, second - base, first - second)
    apart = torch.stack([pair.square().sum(dim=(2, 4)) / norm for pair in pairs])  # (3, L, 2, T)
    tokens = base.shape[3]
    place = torch.arange(tokens, device=base.device, dtype=torch.float32)
    variance = apart[2, base.shape[0] // 2 :].sum(dim=(0, 1)) / 2
    moves = [(apart + FLOOR).log().flatten(0, 2), place[None] / tokens, place.log1p()[None]]
    middle = [3 * len(base) // 8, 5 * len(base) // 8]
    seen = (
        torch.cat((base[[0, *middle], 1], pairs[2][middle, 1]))
        / norm[[0, *middle, *middle], 1, 0, None, None, None].sqrt()
    )
    values = seen.transpose(2, 3).flatten(0, 2)  # (5 G D, T)
    return torch.cat([values, *moves, (variance + FLOOR).log()[None]]).t()


def beside(model_name: str, layers: int, values: int, device: torch.device) -> ScoreModel | None:
    """The learned scores in the folder `model_name`, if it is one and has them; unusable ones are logged."""
    path = Path(model_name) / FILE_NAME
    if not model_name or not path.is_file():
        return None
    try:
        model = ScoreModel.from_bytes(path.read_bytes())
        if (model.layers, model.values) != (layers, values):
            theirs = f"{model.layers} layers of {model.values} values"
            raise ValueError(f"they are for {theirs}, the model has {layers} of {values}")
    except (OSError, ValueError) as error:
        log.warning("%s is not used: %s. Scores are what they are without.", path, error)
        return None
    return model.to(device)
