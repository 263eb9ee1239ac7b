"""Learned scores: a small network predicts which tokens are worth recomputing, and for which
questions (ours).

How far a token's KV moves behind other texts shows that it depends on its context, not that an
answer depends on it: behind a name replaced by a pronoun all words move, but the answer reads one
of them. The network sees, layer by layer, how keys and values of a token and its neighbours move;
it needs no passes but those of the variance. It was trained on a model's own full prefills to
predict the effect of recomputing the token (`training/score_training.py`).

At ingest it gives each token a score, which replaces `sensitivity`, and topics, a few numbers. At
question time its other part reads the question's tokens and raises the scores of the tokens with
matching topics, by products of small matrices, without a pass of the model. It has some 250,000
weights, in a file next to the model's weights, as the bundled reader has it. Without a network the
score is the variance. This file knows nothing of requests.
"""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from safetensors.torch import save as to_safetensors
from torch import nn
from torch.nn import functional

from ragkv.model import Adapter
from ragkv.model.fingerprint import rounded_digest

FILE_NAME = "ragkv-scores.safetensors"  # `FILE_NAME` lies in a model's folder.
TEXTS = 2  # The network reads a chunk's KV behind `TEXTS` texts: k of the scorer.
WIDTH = 64
KERNEL = 5  # A convolution sees `KERNEL` tokens.
TOPICS = 24  # A token has `TOPICS` numbers that a question is matched with: C.
# Of the question and the conversation before it the last `QUESTION_TOKENS` are read.
QUESTION_TOKENS = 96
VALUE_PARTS = 5  # The features of a token have `VALUE_PARTS` vectors of G D values,
KEY_PARTS = 4  # and `KEY_PARTS` vectors of G D keys, which are read for topics only.
FLOOR = 1e-4  # Relative squared distances below `FLOOR` are rounding errors.
SCALE = 3.0  # Logarithms of distances, which lie between -9 and 3, are divided by `SCALE`.

log = logging.getLogger(__name__)


def scored_layers(layers: int) -> range:
    """The layers whose KV is compared: the last eighth of the first five eighths.

    Passes behind texts end there, and scores are as good as those of the later half of the layers
    (docs/selection.md).
    """
    last = 5 * layers // 8
    return range(last + 1 - max(1, layers // 8), last + 1)


def variance(stored: torch.Tensor, behind_texts: Sequence[torch.Tensor]) -> torch.Tensor:
    """How much the KV of a chunk varies with the text before it, (T,) float32.

    `stored` is its KV (L, 2, G, T, D), `behind_texts` that of the first layers, up to the last of
    `scored_layers`, behind each text. The score is the variance over the texts, in units of the
    squared norm of the stored KV. The distance from the stored KV is used only if there is one
    text: it is high at the start of every chunk, behind any text, and recomputing these tokens
    changes nothing. Computed where the KV behind the texts lies.
    """
    layers = scored_layers(len(stored))
    base = stored[layers.start : layers.stop].to(behind_texts[0].device).float()  # (L', 2, G, T, D)
    norm = base.square().sum(dim=(2, 4)).mean(dim=-1, keepdim=True).clamp_min(1e-12)  # (L', 2, 1)
    behind = [kv[layers.start : layers.stop].float() for kv in behind_texts]
    centre = base if len(behind) == 1 else torch.stack(behind).mean(dim=0)
    return torch.stack([_relative(kv - centre, norm) for kv in behind]).sum(dim=0) / max(
        1, len(behind) - 1
    )


def _relative(difference: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """|dK|^2 / mean |K|^2 + |dV|^2 / mean |V|^2, summed over layers: (L', 2, G, T, D), (L', 2, 1)
    -> (T,).
    """
    return (difference.square().sum(dim=(2, 4)) / norm).sum(dim=(0, 1))


class TokenEncoder(nn.Module):
    """Encodes each token of a chunk from its own features and those of its neighbours."""

    def __init__(self, layers: int, vectors: int) -> None:
        """`vectors` is how many of a token's first features, its values and keys, are read."""
        super().__init__()
        self.vectors = vectors
        self.distances = _distances(layers)
        self.read = nn.Linear(self.distances, WIDTH)
        self.see = nn.Linear(vectors, WIDTH, bias=False)
        self.mix = _convolutions()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(T, 9 G D + 6 L' + 4) -> (T, WIDTH)."""
        distances = features[:, -self.distances :]
        vectors = features[:, : self.vectors]
        return _mixed(self.read(distances / SCALE) + self.see(vectors), self.mix)


class ScoreModel(nn.Module):
    """The network for a model with L layers, G D values per token and embeddings of E numbers.

    The names of its parts are tensor names in saved files, so they must not change.
    """

    topics = TOPICS
    question_tokens = QUESTION_TOKENS
    depth: torch.Tensor  # (1,) int32: L
    taught_by: torch.Tensor

    def __init__(self, layers: int, values: int, width: int, teacher: str = 16 * "00") -> None:
        super().__init__()
        self.shape = (layers, values, width)
        self.worth = TokenEncoder(layers, VALUE_PARTS * values)  # for scores
        self.tell = nn.Linear(WIDTH, 1)  # to the log of a score
        self.about = TokenEncoder(layers, (VALUE_PARTS + KEY_PARTS) * values)  # for topics
        self.name = nn.Linear(WIDTH, TOPICS)  # to topics
        self.hear = nn.Linear(width, WIDTH)  # from a question's embeddings
        self.muse = _convolutions()  # over a question's tokens
        # to the topics a question token needs, and a weight
        self.ask = nn.Linear(WIDTH, TOPICS + 1)
        for weights in (*self.tell.parameters(), *self.name.parameters()):
            nn.init.zeros_(weights)  # untrained it returns the variance, whatever the question is
        self.digest = ""  # of the file it was read from
        self.register_buffer(
            "taught_by", torch.tensor(list(bytes.fromhex(teacher)), dtype=torch.uint8)
        )
        self.register_buffer("depth", torch.tensor([layers], dtype=torch.int32))

    @property
    def teacher(self) -> str:
        """`rounded_digest` of the model whose prefills taught it; zeros before training."""
        return bytes(self.taught_by.tolist()).hex()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """The `token_features` of a chunk, (T, 9 G D + 6 L' + 4), to the log of its scores and
        topics, (T, 1 + C).
        """
        scores = self.tell(self.worth(features)) + features[:, -1:]
        return torch.cat((scores, self.name(self.about(features))), dim=1)

    def gains(self, topics: torch.Tensor, question: torch.Tensor) -> torch.Tensor:
        """The log factors (N,) by which a question of embeddings (Q, E) raises tokens with `topics`
        (N, C).
        """
        question = question / question.square().mean(dim=1, keepdim=True).sqrt().clamp_min(1e-6)
        wanted = self.ask(_mixed(self.hear(question), self.muse))  # (Q, C + 1)
        match: torch.Tensor = topics @ wanted[:, :-1].t() / TOPICS**0.5 + wanted[:, -1]  # (N, Q)
        return match.logsumexp(dim=1)

    @torch.no_grad()
    def scores(self, stored: torch.Tensor, behind_texts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Score and topics (T, 1 + C) float32 of a chunk from its KV, stored and behind texts: see
        `token_features`.
        """
        out = self(token_features(stored, behind_texts))
        return torch.cat((out[:, :1].exp(), out[:, 1:]), dim=1)

    @torch.no_grad()
    def weighted_by_question(
        self, scores: torch.Tensor, topics: torch.Tensor, question: torch.Tensor
    ) -> torch.Tensor:
        """`scores` (N,) of tokens with `topics` (N, C), weighted by a question of embeddings (Q,
        E); same sum.
        """
        if not len(scores) or not len(question):
            return scores
        gains = self.gains(topics, question.float())
        found = scores * (gains - gains.max()).exp()
        return found * (scores.sum() / found.sum().clamp_min(1e-30))

    def to_bytes(self) -> bytes:
        """The weights as a safetensors file."""
        return to_safetensors(
            {name: value.contiguous() for name, value in self.state_dict().items()}
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "ScoreModel":
        """Inverse of `to_bytes`; raises `ValueError` on anything else."""
        try:
            tensors = load(data)
            tensors.pop("slot", None)  # of earlier files
            layers = int(tensors["depth"])
            # seen before anything of that size is made
            if tensors["worth.read.weight"].shape[1] != _distances(layers):
                raise ValueError("not a file of learned scores: sizes do not fit")
            values, uneven = divmod(tensors["worth.see.weight"].shape[1], VALUE_PARTS)
            model = cls(layers, values, tensors["hear.weight"].shape[1])
            model.load_state_dict(tensors)
        except (SafetensorError, KeyError, IndexError, RuntimeError) as error:
            raise ValueError(f"not a file of learned scores: {error}") from error
        if uneven or not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            raise ValueError(
                "not a file of learned scores: sizes do not fit or numbers are not finite"
            )
        model.digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        return model.eval().requires_grad_(False)


def token_features(stored: torch.Tensor, behind_texts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The network's input for each token of a chunk with KV (L, 2, G, T, D): (T, 9 G D + 6 L' + 4)
    float32.

    `behind_texts` is its KV (L', 2, G, T, D) in the first L' layers behind each text. In this
    order: its values in the first layer, which identify the token, and in two middle layers; in
    these also the difference between the two texts; its keys behind the first text in two middle
    layers, and its stored keys in two later ones; the logarithms of the squared distances between
    the three versions (stored, behind either text) of each pair, layer, key and value, in units of
    the layer's mean squared norm; whether it differs behind the second text from its stored KV,
    which it has there if it was not computed; the token's place in its chunk; the log of the
    variance, the score without a network.
    """
    layers = len(stored)
    stored = stored.float()
    first, second = (kv.float() for kv in behind_texts[:TEXTS])
    base = stored[: len(first)]
    norm = _squares(stored).mean(dim=-1, keepdim=True).clamp_min(1e-12)  # (L, 2, 1)
    apart = torch.stack(
        [_squares(one - other) for one, other in ((first, base), (second, base), (first, second))]
    )
    apart = apart / norm[: len(first)]  # (3, L', 2, T)
    tokens = base.shape[3]
    place = torch.arange(tokens, device=base.device, dtype=torch.float32)
    moved = (apart[1] > FLOOR).flatten(0, 1).any(dim=0).float()
    # of two texts: half of the squared distance between them
    log_variance = (apart[2, scored_layers(layers).start :].sum(dim=(0, 1)) / 2 + FLOOR).log()
    distances = [
        (apart + FLOOR).log().flatten(0, 2), moved[None], place[None] / tokens, place.log1p()[None], log_variance[None],
    ]  # fmt: skip
    middle = [3 * layers // 8, 5 * layers // 8]
    moved_values = first[middle, 1] - second[middle, 1]
    values = torch.cat((base[[0, *middle], 1], moved_values))  # (5, G, T, D)
    values = values / norm[[0, *middle, *middle], 1, 0, None, None, None].sqrt()
    near = [layers // 2, 5 * layers // 8]
    late = [3 * layers // 4, layers - 1]
    keys = (
        torch.cat((first[near, 0], stored[late, 0]))
        / norm[[*near, *late], 0, 0, None, None, None].sqrt()
    )
    vectors = torch.cat((values, keys)).transpose(2, 3).flatten(0, 2)  # (9 G D, T)
    return torch.cat([vectors, *distances]).t()


def _squares(kv: torch.Tensor) -> torch.Tensor:
    """The squared norms (L, 2, T) of KV (L, 2, G, T, D), both float32."""
    return kv.square().sum(dim=4).sum(dim=2)


def load_for(adapter: Adapter) -> ScoreModel | None:
    """The network in the model's folder; `None` without one. An unusable one is logged and
    ignored.
    """
    folder = getattr(adapter.config, "_name_or_path", "")
    path = Path(folder) / FILE_NAME
    if not folder or not path.is_file():
        return None
    try:
        model = ScoreModel.from_bytes(path.read_bytes())
        if (why := _misfit(adapter, model)) is not None:
            raise ValueError(why)
    except (OSError, ValueError) as error:
        log.warning(
            "The learned scores in %s are not used: %s. Scores are the measured variance.",
            path,
            error,
        )
        return None
    return model.to(adapter.device)


def _misfit(adapter: Adapter, model: ScoreModel) -> str | None:
    """Why the network cannot be used with this model, or `None`.

    One that was trained with other weights would choose badly without any sign of it. A float16
    model is not checked, because its weights may have been rounded from a higher precision.
    """
    if model.shape != (shape := shape_of(adapter)):
        is_for, has = (
            "{} layers, {} values a token, embeddings of {}".format(*one)
            for one in (model.shape, shape)
        )
        return f"it is for {is_for}, the model has {has}"
    if adapter.dtype is not torch.float16 and model.teacher != rounded_digest(adapter.model):
        return "it was trained with other weights"
    return None


def shape_of(adapter: Adapter) -> tuple[int, int, int]:
    """L, G D and E of a model."""
    return (
        adapter.layer_count,
        adapter.kv_heads * adapter.head_dim,
        adapter.model.get_input_embeddings().weight.shape[1],
    )


def _distances(layers: int) -> int:
    """How many of a token's features are neither values nor keys."""
    return 6 * scored_layers(layers).stop + 4


def _convolutions() -> nn.ModuleList:
    return nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, KERNEL, padding=KERNEL // 2) for _ in range(2))


def _mixed(x: torch.Tensor, convolutions: nn.ModuleList) -> torch.Tensor:
    """Mix each of the tokens (T, WIDTH) with its neighbours."""
    x = functional.gelu(x).t()
    for convolution in convolutions:
        x = x + functional.gelu(convolution(x))
    return x.t()
