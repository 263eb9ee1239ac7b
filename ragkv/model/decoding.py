"""Decoding: one row per step over the prompt's KV, with transformers' own logits processors.

Greedy unless `do_sample`. It does not know how the prompt's KV was made, or which prompts decode in the same step.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ragkv.errors import InputError

from .adapter import Adapter
from .batching import DecodeRow, decode_rows
from .promptkv import PromptKV, Recording

LEAST_TEMPERATURE = 1e-4

# The settings of transformers' GenerationConfig that are supported.
SETTINGS = {
    *("do_sample", "temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "no_repeat_ngram_size", "min_new_tokens"),
}


class Sampler:
    """Chooses the next token of one answer with a `GenerationConfig` and a seed."""

    def __init__(self, generation: GenerationConfig, prompt_ids: torch.Tensor, eos: Sequence[int], seed: int | None):
        self._sample = bool(generation.do_sample)
        self._ids = prompt_ids.unsqueeze(0)  # (1, S + generated)
        self._processors: Any = _processors(generation, prompt_ids, eos)
        self._generator = torch.Generator(prompt_ids.device)
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def choose(self, logits: torch.Tensor) -> int:
        """The token after `logits` (V,) float32; repetition rules see it from now on."""
        scores = self._processors(self._ids, logits.unsqueeze(0))
        if self._sample:
            probabilities = scores.softmax(dim=-1)
            token = torch.multinomial(probabilities, 1, generator=self._generator)
        else:
            token = scores.argmax(dim=-1, keepdim=True)
        self._ids = torch.cat((self._ids, token), dim=1)
        return int(token)


def _processors(generation: GenerationConfig, prompt_ids: torch.Tensor, eos: Sequence[int]) -> LogitsProcessorList:
    chosen: list[Any] = []
    if generation.repetition_penalty not in (None, 1.0):
        chosen.append(RepetitionPenaltyLogitsProcessor(generation.repetition_penalty))
    if generation.no_repeat_ngram_size:
        chosen.append(NoRepeatNGramLogitsProcessor(generation.no_repeat_ngram_size))
    if generation.min_new_tokens and eos:
        chosen.append(
            MinNewTokensLengthLogitsProcessor(
                prompt_ids.numel(), generation.min_new_tokens, list(eos), device=str(prompt_ids.device)
            )
        )
    if generation.do_sample:
        if generation.temperature not in (None, 1.0):
            chosen.append(TemperatureLogitsWarper(_computable(generation.temperature)))
        if generation.top_k:
            chosen.append(TopKLogitsWarper(generation.top_k))
        if generation.top_p not in (None, 1.0):
            chosen.append(TopPLogitsWarper(generation.top_p))
        if generation.min_p is not None:
            chosen.append(MinPLogitsWarper(generation.min_p))
    return LogitsProcessorList(chosen)


def _computable(temperature: float) -> float:
    """A temperature by which logits can be divided in float32; below, sampling is greedy anyway."""
    return max(temperature, LEAST_TEMPERATURE) if temperature > 0.0 else temperature


def generation_config(settings: dict[str, Any]) -> GenerationConfig:
    """A `GenerationConfig` from keyword settings; raises `InputError` for unknown or invalid settings."""
    unknown = sorted(settings.keys() - SETTINGS)
    if unknown:
        raise InputError(f"Unknown generation settings: {', '.join(unknown)}. Known: {', '.join(sorted(SETTINGS))}.")
    make: Any = GenerationConfig  # untyped in transformers
    try:
        config: GenerationConfig = make(**settings)
        _processors(config, torch.zeros(1, dtype=torch.int64), eos=(0,))  # their constructors check the values
    except (ValueError, TypeError) as error:
        raise InputError(f"Generation settings are not valid: {error}") from error
    return config


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

    `step` takes a token and returns the logits (V,) behind it, see `single_prompt_step`.
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
