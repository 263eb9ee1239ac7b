"""Learned scores: a small network says which of a chunk's tokens are worth computing again, and for whom (ours).

How far a token's KV moves behind other texts says that it depends on what precedes it, not that an answer depends on
it: of a name told by a pronoun and the words after it all move, and one of them is read. The network sees how keys and
values of a token and its neighbours move, layer by layer, and was taught by a model's own full prefills what comes of
computing it again (`calibration/score_training.py`). At ingest it gives each token a score, which takes the place of
`sensitivity`, and what the token is about, a few numbers. At question time its other half reads the question's tokens,
and the tokens that are about the same gain: products of small matrices, no pass of the model. It is some 250,000
numbers, made once for a model and kept beside it. It knows nothing of requests or stores.
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

from ragkv.model import Adapter
from ragkv.model.fingerprint import rounded_digest

FILE_NAME = "ragkv-scores.safetensors"  # in a model's folder
TEXTS = 2  # k of the scorer: the network reads what a chunk does behind two texts
WIDTH = 64
KERNEL = 5  # tokens that a convolution sees
TOPICS = 24  # numbers that say what a token is about
QUESTION_TOKENS = 96  # of a question with what was said before it, the last ones
SEEN = 5  # times a token's values that are looked at
HEARD = 3  # times its keys, for topics alone
FLOOR = 1e-4  # below it a relative squared distance is rounding
SCALE = 3.0  # of the logarithms of distances, which lie between -9 and 3

log = logging.getLogger(__name__)


class Sight(nn.Module):
    """From what is studied of a chunk's tokens to what is noticed of each, its neighbours seen."""

    def __init__(self, layers: int, seen: int) -> None:
        """`seen` are how many of a token's numbers are values and keys."""
        super().__init__()
        self.seen, self.moves = seen, 6 * layers + 3
        self.read = nn.Linear(self.moves, WIDTH)
        self.see = nn.Linear(seen, WIDTH, bias=False)
        self.mix = _convolutions()

    def forward(self, studied: torch.Tensor) -> torch.Tensor:
        """(T, 8 G D + 6 L + 3) -> (T, WIDTH)."""
        return _mixed(self.read(studied[:, -self.moves :] / SCALE) + self.see(studied[:, : self.seen]), self.mix)


class ScoreModel(nn.Module):
    """The network: one for a model's L layers, G D values a token and E numbers a token's embedding."""

    taught_by: torch.Tensor

    def __init__(self, layers: int, values: int, width: int) -> None:
        super().__init__()
        self.shape = (layers, values, width)
        self.worth = Sight(layers, SEEN * values)  # for scores
        self.tell = nn.Linear(WIDTH, 1)
        self.about = Sight(layers, (SEEN + HEARD) * values)  # for topics
        self.name = nn.Linear(WIDTH, TOPICS)
        self.hear = nn.Linear(width, WIDTH)  # for questions
        self.muse = _convolutions()
        self.ask = nn.Linear(WIDTH, TOPICS + 1)
        for numbers in (*self.tell.parameters(), *self.name.parameters()):
            nn.init.zeros_(numbers)  # untaught it says what the variance says, whatever is asked
        self.digest = ""  # of the file it was read from
        self.register_buffer("taught_by", torch.zeros(16, dtype=torch.uint8))  # `rounded_digest` of the model's weights

    @property
    def teacher(self) -> str:
        """`rounded_digest` of the weights it learned from; zeros before it did."""
        return bytes(self.taught_by.tolist()).hex()

    def set_teacher(self, weights: torch.nn.Module) -> None:
        """Note whose prefills teach it."""
        self.taught_by = torch.tensor(list(bytes.fromhex(rounded_digest(weights))), dtype=torch.uint8)

    def score_parameters(self) -> list[nn.Parameter]:
        """The numbers that scores come from; the others say what a question makes of them."""
        return [*self.worth.parameters(), *self.tell.parameters()]

    def question_parameters(self) -> list[nn.Parameter]:
        """The numbers that say what a question makes of scores."""
        return [
            number for part in (self.about, self.name, self.hear, self.muse, self.ask) for number in part.parameters()
        ]

    def forward(self, studied: torch.Tensor) -> torch.Tensor:
        """What is `studied` of a chunk, (T, 8 G D + 6 L + 3), to the log of its scores and its topics, (T, 1 + C)."""
        scores = self.tell(self.worth(studied)) + studied[:, -1:]
        return torch.cat((scores, self.name(self.about(studied))), dim=1)

    def gains(self, topics: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
        """What tokens about `topics` (N, C) gain by a question of embeddings `asked` (Q, E): log factors (N,)."""
        asked = asked / asked.square().mean(dim=1, keepdim=True).sqrt().clamp_min(1e-6)
        wanted = self.ask(_mixed(self.hear(asked), self.muse))  # (Q, C + 1): a topic, and how much it matters
        alike: torch.Tensor = topics @ wanted[:, :-1].t() / TOPICS**0.5 + wanted[:, -1]  # (N, Q)
        return alike.logsumexp(dim=1)

    @torch.no_grad()
    def scores(self, stored: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
        """A score and topics (T, 1 + C) float32 of a chunk's KV (L, 2, G, T, D), which is `others` behind two texts."""
        said = self(token_features(stored, others))
        return torch.cat((said[:, :1].exp(), said[:, 1:]), dim=1)

    @torch.no_grad()
    def weighted_by_question(self, scores: torch.Tensor, topics: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
        """`scores` (N,) of tokens about `topics` (N, C) as a question of embeddings `asked` (Q, E) weighs them.

        Their sum is as it was.
        """
        if not len(scores) or not len(asked):
            return scores
        gains = self.gains(topics, asked.float())
        found = scores * (gains - gains.max()).exp()
        return found * (scores.sum() / found.sum().clamp_min(1e-30))

    def to_bytes(self) -> bytes:
        """As a safetensors file."""
        return save({name: value.contiguous() for name, value in self.state_dict().items()})

    @classmethod
    def from_bytes(cls, data: bytes) -> "ScoreModel":
        """What `to_bytes` gave; raises `ValueError` on anything else."""
        try:
            values = load(data)
            layers, odd = divmod(values["worth.read.weight"].shape[1] - 3, 6)
            seen, uneven = divmod(values["worth.see.weight"].shape[1], SEEN)
            model = cls(layers, seen, values["hear.weight"].shape[1])
            model.load_state_dict(values)
        except (SafetensorError, KeyError, IndexError, RuntimeError) as error:
            raise ValueError(f"not a file of learned scores: {error}") from error
        if odd or uneven or not all(bool(value.isfinite().all()) for value in values.values()):
            raise ValueError("not a file of learned scores: its numbers are of another kind")
        model.digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        return model.eval().requires_grad_(False)


def token_features(stored: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """What the network reads of each token of a chunk with KV (L, 2, G, T, D): (T, 8 G D + 6 L + 3) float32.

    Its values in the first layer, where they say which token it is, and in two layers of the middle, there also how
    they differ between the two `others`; its keys in three later layers, behind the first of them; then logarithms of
    the squared distances between what is stored and the others, each pair, key and value, each layer, in units of the
    layer's mean squared norm; the token's place in its chunk; the log of `sensitivity`.
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
    late = [len(base) // 2, 3 * len(base) // 4, len(base) - 1]
    heard = first[late, 0] / norm[late, 0, 0, None, None, None].sqrt()
    numbers = torch.cat((seen, heard)).transpose(2, 3).flatten(0, 2)  # (8 G D, T)
    return torch.cat([numbers, *moves, (variance + FLOOR).log()[None]]).t()


def load_for(adapter: Adapter) -> ScoreModel | None:
    """The learned scores in the folder the model was loaded from, if it has them; unusable ones are logged.

    Taught by other weights they would choose badly and say nothing of it, so these are not used. In float16, to which
    weights may have been rounded from more, they cannot be told apart.
    """
    name, shape = getattr(adapter.config, "_name_or_path", ""), shape_of(adapter)
    path = Path(name) / FILE_NAME
    if not name or not path.is_file():
        return None
    try:
        model = ScoreModel.from_bytes(path.read_bytes())
        if model.shape != shape:
            raise ValueError(f"they are for {_described(model.shape)}, the model has {_described(shape)}")
        if adapter.dtype is not torch.float16 and model.teacher != rounded_digest(adapter.model):
            raise ValueError("they were learned from other weights; `ragkv learn` makes new ones")
    except (OSError, ValueError) as error:
        log.warning("%s is not used: %s. Scores are what they are without.", path, error)
        return None
    return model.to(adapter.device)


def shape_of(adapter: Adapter) -> tuple[int, int, int]:
    """L, G D and E of a model."""
    return adapter.layer_count, adapter.kv_heads * adapter.head_dim, adapter.width


def _described(shape: tuple[int, int, int]) -> str:
    return "{} layers, {} values a token, embeddings of {}".format(*shape)


def _convolutions() -> nn.ModuleList:
    return nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, KERNEL, padding=KERNEL // 2) for _ in range(2))


def _mixed(x: torch.Tensor, convolutions: nn.ModuleList) -> torch.Tensor:
    """Tokens (T, WIDTH) that have seen their neighbours."""
    x = functional.gelu(x).t()
    for convolution in convolutions:
        x = x + functional.gelu(convolution(x))
    return x.t()
