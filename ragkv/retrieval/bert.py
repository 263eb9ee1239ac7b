"""A BERT encoder in numpy: the vectors of a sentence-transformers model without torch.

Otherwise a command that embeds one question would spend most of its time importing packages. The
encoder reads models like all-MiniLM-L6-v2: BERT with absolute positions, and the normalised mean of
the tokens' vectors. `can_read` says whether a folder holds such a model. Any other model is left to
sentence-transformers.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file
from tokenizers import Tokenizer

Array = npt.NDArray[np.float32]

# The modules that such a model has, by the last part of their type, and the settings that matter.
_MODULES = ["Transformer", "Pooling", "Normalize"]
_BERT = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
_HEADS = ("query", "key", "value")
# The error function by Abramowitz and Stegun, 7.1.26: within 1.5e-7, which float32 hardly sees.
_ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def can_read(folder: Path) -> bool:
    """Whether `Bert` gives the vectors of the model in `folder`."""
    try:
        modules = json.loads((folder / "modules.json").read_text("utf-8"))
        config = json.loads((folder / "config.json").read_text("utf-8"))
        pooling = json.loads((folder / modules[1]["path"] / "config.json").read_text("utf-8"))
        prompts = _optional(folder / "config_sentence_transformers.json").get("prompts") or {}
        kinds = [str(one["type"]).rpartition(".")[2] for one in modules]
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        return False
    # of newer and of older versions of sentence-transformers
    pools = (
        [pooling["pooling_mode"]]
        if "pooling_mode" in pooling
        else [name for name, value in pooling.items() if name.startswith("pooling_mode_") and value]
    )
    return (
        kinds == _MODULES
        and all(config.get(name, value) == value for name, value in _BERT.items())
        and pools in (["mean"], ["pooling_mode_mean_tokens"])
        and not any(prompts.values())
        and all((folder / name).is_file() for name in ("model.safetensors", "tokenizer.json"))
    )


class Bert:
    """The model in a folder that `can_read`. Not thread-safe: the tokenizer is not."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        most = _optional(folder / "sentence_bert_config.json").get("max_seq_length")
        self.dimension = int(config["hidden_size"])
        self.max_tokens = int(most or config["max_position_embeddings"])
        self._heads = int(config["num_attention_heads"])
        self._eps = float(config.get("layer_norm_eps", 1e-12))
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        weights = load_file(folder / "model.safetensors")
        self._weights: dict[str, Array] = {
            name.removeprefix("bert."): np.asarray(one, np.float32) for name, one in weights.items()
        }
        self._layers = int(config["num_hidden_layers"])

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """The (start, end) of each token of a text, without special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).offsets)

    @property
    def special_tokens(self) -> int:
        """How many tokens stand around every text."""
        return self._tokenizer.num_special_tokens_to_add(False)

    def encode(self, text: str) -> Array:
        """The unit vector (D,) of a text; tokens after `max_tokens` are not read."""
        ids = self._tokenizer.encode(text).ids
        if len(ids) > self.max_tokens:
            ids = [*ids[: self.max_tokens - 1], ids[-1]]
        hidden = self._embedded(np.asarray(ids))  # (S, E)
        for number in range(self._layers):
            hidden = self._layer(hidden, f"encoder.layer.{number}")
        mean = hidden.mean(axis=0)
        return np.asarray(mean / max(float(np.linalg.norm(mean)), 1e-12), np.float32)

    def _embedded(self, ids: npt.NDArray[Any]) -> Array:
        table = "embeddings.{}_embeddings.weight"
        words = self._weights[table.format("word")][ids]
        places = self._weights[table.format("position")][: len(ids)]
        kind = self._weights[table.format("token_type")][0]
        return self._normalised(words + places + kind, "embeddings.LayerNorm")

    def _layer(self, hidden: Array, name: str) -> Array:
        """(S, E) through one layer: attention, then the feed-forward network."""
        parts = [self._linear(hidden, f"{name}.attention.self.{one}") for one in _HEADS]
        # (H, S, D) each
        queries, keys, values = (
            part.reshape(len(hidden), self._heads, -1).transpose(1, 0, 2) for part in parts
        )
        scores = queries @ keys.transpose(0, 2, 1) / np.sqrt(np.float32(queries.shape[-1]))
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = (scores / scores.sum(axis=-1, keepdims=True)) @ values
        joined = mixed.transpose(1, 0, 2).reshape(len(hidden), -1)  # (S, E)
        attended = self._linear(joined, f"{name}.attention.output.dense")
        hidden = self._normalised(hidden + attended, f"{name}.attention.output.LayerNorm")
        inner = _gelu(self._linear(hidden, f"{name}.intermediate.dense"))
        outer = self._linear(inner, f"{name}.output.dense")
        return self._normalised(hidden + outer, f"{name}.output.LayerNorm")

    def _linear(self, hidden: Array, name: str) -> Array:
        made: Array = hidden @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]
        return made

    def _normalised(self, hidden: Array, name: str) -> Array:
        centred = hidden - hidden.mean(axis=-1, keepdims=True)
        spread = np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + np.float32(self._eps))
        made: Array = centred / spread * self._weights[f"{name}.weight"]
        return made + self._weights[f"{name}.bias"]


def _gelu(x: Array) -> Array:
    """x times the share of a normal distribution below x."""
    scaled = np.abs(x) * np.float32(2**-0.5)
    t = np.float32(1) / (np.float32(1) + np.float32(0.3275911) * scaled)
    powers: Array = np.zeros_like(t)
    for factor in reversed(_ERF):
        powers = (powers + np.float32(factor)) * t
    erf = np.sign(x) * (np.float32(1) - powers * np.exp(-scaled * scaled))
    made: Array = np.float32(0.5) * x * (np.float32(1) + erf)
    return made


def _optional(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    return found
