"""Answering: from a prefill to an answer, token by token."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from .citations import cite
from .encoding import Activity
from .model import Adapter
from .model.decoding import Sampler, decode, end_tokens
from .model.stopping import TextStream
from .prefill import Prefill
from .types import Answer, Chunk, TokenEvent


class Answerer:
    """Decodes answers for one model. Holds no request's state."""

    def __init__(self, adapter: Adapter, tokenizer: Any | None, activity: Activity) -> None:
        self._adapter, self._activity = adapter, activity
        self._end_tokens = end_tokens(adapter.model, tokenizer)

    def stream(
        self,
        prefill: Prefill,
        chunks: Sequence[Chunk],
        generation: Any,
        seed: int | None,
        text: TextStream,
        max_new_tokens: int,
        began: float,
    ) -> Iterator[TokenEvent | Answer]:
        """Token events, then the `Answer`; times count from `began`."""
        adapter, ends = self._adapter, self._end_tokens
        sampler = Sampler(generation, prefill.token_ids.to(adapter.device), ends, seed)
        steps = decode(adapter, prefill.fused.kv, prefill.logits, sampler, ends, max_new_tokens)
        tokens: list[int] = []
        reason, first_s = "length", 0.0
        while (token := self._next(steps)) is not None:
            first_s = first_s or time.perf_counter() - began
            if token in ends:
                reason = "stop"
                break
            tokens.append(token)
            yield TokenEvent(text.add(token), token)
            if text.stopped:
                reason = "stop"
                break
        if rest := text.finish():
            yield TokenEvent(rest, tokens[-1])
        timing = replace(prefill.timing, first_token_s=first_s, decode_s=time.perf_counter() - began - first_s)
        yield Answer(text.text, tuple(tokens), reason, timing, prefill.reuse, cite(text.text, chunks))

    def _next(self, steps: Iterator[int]) -> int | None:
        """The next token; others may have the model between two. A closed engine ends no answer: its KV is its own."""
        with self._activity.compute:
            return next(steps, None)
