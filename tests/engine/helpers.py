"""Helpers of the engine's tests: three chunks, a question, and functions that look into an
engine.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from ragkv import Engine, EngineConfig
from tests import reference, tiny_models
from tests.fixed import fixed
from tests.toy_tokenizers import VOCABULARY, byte_tokenizer

PREFIX = [1]
A, B, C = (tiny_models.tokens(count, seed) for count, seed in ((9, 1), (7, 2), (8, 3)))
Q = tiny_models.tokens(4, seed=4)
TOKEN_BYTES = 4 * 2 * 2 * 16 * 4  # L x (K, V) x G x D x float32, of a tiny llama

llama = functools.partial(tiny_models.model, "llama")


def engine_of(family: str = "llama", **config: Any) -> Engine:
    return Engine(tiny_models.model(family), config=EngineConfig(**{"fusion": fixed(), **config}))


@functools.cache
def _text_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return dict(transformers.LlamaForCausalLM(_text_config()).state_dict())


def _text_config(**more: Any) -> Any:
    return tiny_models.config("llama", vocab_size=VOCABULARY, **more)


def text_engine(
    chat_template: str | None = None,
    merges: Sequence[tuple[str, str]] = (),
    context_length: int = 512,
    **config: Any,
) -> Engine:
    """An engine on a random llama that reads and writes bytes, and pairs of them that its tokenizer
    merges.
    """
    config_of_model = _text_config(max_position_embeddings=context_length)
    model = transformers.LlamaForCausalLM(config_of_model).eval()
    model.load_state_dict(_text_weights())
    return Engine(
        model,
        byte_tokenizer(chat_template, merges=merges),
        EngineConfig(**{"fusion": fixed(), **config}),
    )


def ids(chunks: Sequence[Sequence[int]], question: Sequence[int] = Q) -> list[int]:
    return [*PREFIX, *(token for chunk in chunks for token in chunk), *question]


def full_prefill(token_ids: Sequence[int], family: str = "llama") -> tuple[torch.Tensor, Any]:
    return reference.full_prefill(tiny_models.model(family), list(token_ids))


def stored(engine: Engine, chunk: Sequence[int]) -> torch.Tensor | None:
    """The stored KV (L, 2, G, T, D) of a chunk, copied; `None` on a miss."""
    lease = engine.parts.store.lease(engine.entries.encoder.identity, tuple(chunk))
    if lease is None:
        return None
    with lease:
        return torch.stack([lease.read_layer(layer).clone() for layer in range(lease.info.layers)])


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def counts(reuse: Any) -> tuple[int, int, int, int]:
    return reuse.exact, reuse.fused, reuse.recomputed, reuse.computed
