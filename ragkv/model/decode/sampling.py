"""Sampling: the parameters that choose an answer's tokens, as one value, and the sampler that
follows them.

Decoding is greedy unless a parameter asks to sample. Biases and the presence and frequency
penalties are OpenAI's: the penalties count the tokens of the answer, not of the prompt. All other
rules are transformers' own logits processors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, Self

import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ragkv.errors import InputError
from ragkv.types import TokenLogprob

# Logits that are divided by less overflow in float32, and sampling is greedy by then.
LEAST_TEMPERATURE = 1e-4
# A repetition penalty lies between these two: beyond them logits overflow, or all are alike.
LEAST_REPETITION = 0.01
MOST_REPETITION = 100.0
MOST_BIASES = 1024  # A `logit_bias` may name so many token ids.


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of an answer are chosen. `None` means: not given.

    A `temperature`, a `top_k` or a `min_p` above 0 samples, and so does a `top_p` below 1. A
    `temperature` of 0 is greedy. Raises `InputError` for a value out of range.
    """

    # 0 to 2; left out it is 1, if another parameter samples
    temperature: float | None = None
    # above 0, to 1: the least set of tokens whose probabilities sum to it
    top_p: float | None = None
    top_k: int | None = None  # the most probable tokens; 0: all
    # 0 to 1: tokens at least so probable, as a share of the most probable one
    min_p: float | None = None
    # the same seed samples the same tokens, alone and batched; None: another one each time
    seed: int | None = None
    # -2 to 2: subtracted from the logit of a token that the answer has
    presence_penalty: float | None = None
    # -2 to 2: the same, for each time that the answer has it
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None  # -100 to 100, by token id: added to the logit
    # .01 to 100: transformers' rule; it counts the prompt too
    repetition_penalty: float | None = None
    min_new_tokens: int | None = None  # the answer does not end before

    def __post_init__(self) -> None:
        _check(self, "temperature", 0.0, 2.0)
        if self.top_p == 0.0:
            raise InputError("top_p is 0; it must be more than 0, and at most 1.")
        _check(self, "top_p", 0.0, 1.0)
        _check(self, "top_k", 0, whole=True)
        _check(self, "min_p", 0.0, 1.0)
        _check(self, "seed", -(2**63), 2**63 - 1, whole=True)
        _check(self, "presence_penalty", -2.0, 2.0)
        _check(self, "frequency_penalty", -2.0, 2.0)
        _check(self, "repetition_penalty", LEAST_REPETITION, MOST_REPETITION)
        _check(self, "min_new_tokens", 0, whole=True)
        _check_biases(self.logit_bias)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """The sampling that `options` name; other options are left alone. Raises `InputError`."""
        return cls(**{name: options[name] for name in SETTINGS & options.keys()})

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn; otherwise the most probable one is taken."""
        asks = any(_asks(name, getattr(self, name)) for name in ("top_p", "top_k", "min_p"))
        return bool(self.temperature) or (self.temperature is None and asks)

    @property
    def notes(self) -> tuple[str, ...]:
        """What has no effect, for the report."""
        names = [
            name for name in ("top_p", "top_k", "min_p", "seed") if _asks(name, getattr(self, name))
        ]
        if self.samples or not names:
            return ()
        why = "temperature is 0" if self.temperature is not None else "no temperature was given"
        return (f"decoding is greedy because {why}: {', '.join(names)} has no effect",)


SETTINGS = frozenset(field.name for field in fields(Sampling))


def _asks(name: str, value: float | None) -> bool:
    """Whether the value changes how tokens are drawn: `top_p` 1, `top_k` 0 and `min_p` 0 do not."""
    return value is not None and (name == "seed" or value != (1.0 if name == "top_p" else 0.0))


def _check(
    sampling: Sampling, name: str, least: float, most: float = math.inf, whole: bool = False
) -> None:
    value = getattr(sampling, name)
    if value is None:
        return
    kinds = int if whole else int | float
    if (
        isinstance(value, bool)
        or not isinstance(value, kinds)
        or not least <= value <= most
        or value == math.inf
    ):
        kind = "a whole number" if whole else "a number"
        limit = f"at least {least}" if most == math.inf else f"in [{least}, {most}]"
        raise InputError(f"{name} is {value!r}; it must be {kind}, {limit}.")


def _check_biases(biases: Mapping[int, float] | None) -> None:
    if biases is None:
        return
    if not isinstance(biases, Mapping):
        raise InputError(f"logit_bias is {biases!r:.80}; it must map token ids to numbers.")
    if len(biases) > MOST_BIASES:
        raise InputError(f"logit_bias has {len(biases)} token ids; give at most {MOST_BIASES}.")
    for token, bias in biases.items():
        if isinstance(token, bool) or not isinstance(token, int):
            raise InputError(f"logit_bias has the key {token!r:.80}; a key is a token id.")
        if (
            isinstance(bias, bool)
            or not isinstance(bias, int | float)
            or not -100.0 <= bias <= 100.0
        ):
            raise InputError(
                f"logit_bias of token {token} is {bias!r:.80}; it must be a number in [-100, 100]."
            )


GREEDY = Sampling()  # the most probable token, whatever came before


class Constraint(Protocol):
    """Which tokens may follow in one answer; see `ragkv.prompt.constraints`."""

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy of `logits` (V,) in which tokens that are not allowed are minus infinity."""
        ...

    def accept(self, token: int) -> None:
        """Go on behind `token`."""
        ...


class Sampler:
    """Chooses the next token of one answer."""

    def __init__(
        self,
        sampling: Sampling,
        prompt_ids: torch.Tensor,
        eos: Sequence[int],
        constraint: Constraint | None = None,
    ) -> None:
        """`prompt_ids` (S,) are on the device of the logits; `eos` end an answer.

        `constraint` holds before everything else: all other rules see only what it allows.
        """
        self._constraint = constraint
        self._samples = sampling.samples
        self._ids = prompt_ids.unsqueeze(0)  # (1, S + generated)
        self._answer_rules = _AnswerRules(sampling, prompt_ids.device)
        self._processors: Any = _processors(sampling, prompt_ids, eos)
        self._generator = torch.Generator(prompt_ids.device)
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def choose(self, logits: torch.Tensor) -> int:
        """The token after `logits` (V,) float32, which stay as they are; the rules see it from now
        on.
        """
        if self._constraint is not None:
            logits = self._constraint.mask(logits)
        scores = self._processors(self._ids, self._answer_rules.applied(logits).unsqueeze(0))
        if self._constraint is not None and self._processors and not scores.isfinite().any():
            # a rule forbids the only tokens that the constraint allows
            scores = logits.unsqueeze(0)
        if self._samples:
            probabilities = scores.softmax(dim=-1)
            token = torch.multinomial(probabilities, 1, generator=self._generator)
        else:
            token = scores.argmax(dim=-1, keepdim=True)
        self._ids = torch.cat((self._ids, token), dim=1)
        self._answer_rules.add(int(token))
        if self._constraint is not None:
            self._constraint.accept(int(token))
        return int(token)


class _AnswerRules:
    """OpenAI's biases and penalties: `logit + bias - frequency_penalty * count - presence_penalty *
    (count > 0)`.
    """

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        biases = sampling.logit_bias or {}
        self._biased = torch.tensor(list(biases), dtype=torch.int64, device=device)
        self._biases = torch.tensor(list(biases.values()), dtype=torch.float32, device=device)
        self._presence = sampling.presence_penalty or 0.0
        self._frequency = sampling.frequency_penalty or 0.0
        self._counts: dict[int, int] = {}  # how often the answer has each token

    def applied(self, logits: torch.Tensor) -> torch.Tensor:
        """The scores of `logits` (V,) after the rules; without a rule, `logits` itself."""
        scores = (
            logits.index_add(0, self._biased, self._biases.to(logits.dtype))
            if len(self._biased)
            else logits
        )
        if not self._counts:
            return scores
        tokens = torch.tensor(list(self._counts), dtype=torch.int64, device=logits.device)
        counts = torch.tensor(list(self._counts.values()), dtype=logits.dtype, device=logits.device)
        return scores.index_add(0, tokens, -(self._frequency * counts + self._presence))

    def add(self, token: int) -> None:
        """Count a token of the answer."""
        if self._presence or self._frequency:
            self._counts[token] = self._counts.get(token, 0) + 1


def _processors(
    sampling: Sampling, prompt_ids: torch.Tensor, eos: Sequence[int]
) -> LogitsProcessorList:
    chosen: list[Any] = []
    if sampling.repetition_penalty not in (None, 1.0):
        chosen.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    if sampling.min_new_tokens and eos:
        device = str(prompt_ids.device)
        chosen.append(
            MinNewTokensLengthLogitsProcessor(
                prompt_ids.numel(), sampling.min_new_tokens, list(eos), device=device
            )
        )
    if sampling.samples:
        if sampling.temperature not in (None, 1.0):
            chosen.append(
                TemperatureLogitsWarper(max(float(sampling.temperature), LEAST_TEMPERATURE))
            )
        if sampling.top_k:
            chosen.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p not in (None, 1.0):
            chosen.append(TopPLogitsWarper(float(sampling.top_p)))
        if sampling.min_p:
            chosen.append(MinPLogitsWarper(float(sampling.min_p)))
    return LogitsProcessorList(chosen)


def token_logprob(logits: torch.Tensor, token: int, alternatives: int) -> TokenLogprob:
    """The log probability of `token` after `logits` (V,), and those of the most probable tokens."""
    logprobs = logits.float().log_softmax(dim=-1)
    best = logprobs.topk(min(alternatives, logprobs.numel()))
    top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return TokenLogprob(token, float(logprobs[token]), tuple(top))
