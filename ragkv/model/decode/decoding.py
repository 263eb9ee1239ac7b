"""Decoding: one row per step over the prompt's KV, until an end token or the limit.

It does not know how the prompt's KV was made, or which prompts decode in the same step.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..adapter import Adapter
from ..promptkv import PromptKV, Recording
from .batching import DecodeRow, decode_rows
from .sampling import Sampler


def end_tokens(model: Any, tokenizer: Any | None) -> tuple[int, ...]:
    """Ids that end an answer: of the generation config, else of the config, else of the tokenizer."""
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, list | tuple) else (int(found),)
    return ()


@torch.no_grad()
def decode(
    step: Callable[[int], torch.Tensor], logits: torch.Tensor, sampler: Sampler, eos: Sequence[int], max_new_tokens: int
) -> Iterator[int]:
    """The tokens after a prompt with last-row `logits` (V,), until an end token, which is yielded too, or the limit.

    `step` takes a token and returns the logits (V,) behind it, see `single_prompt_step`. This is the plain loop for one
    prompt; `ragkv.prompt.generation` has the one that requests use.
    """
    for count in range(1, max_new_tokens + 1):
        token = sampler.choose(logits)
        yield token
        if token in eos or count == max_new_tokens:
            return
        logits = step(token)


def single_prompt_step(
    adapter: Adapter, kv: PromptKV, record: Recording | None = None
) -> Callable[[int], torch.Tensor]:
    """A step function that decodes one prompt without batching."""
    return lambda token: decode_rows(adapter, [DecodeRow(kv, token, record)])[0]
