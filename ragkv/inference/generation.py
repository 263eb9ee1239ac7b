"""Answering: from a prefill to an answer, token by token."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ragkv.model import Adapter, Recording
from ragkv.model.decoding import Sampler, decode, end_tokens
from ragkv.model.stopping import TextStream
from ragkv.scheduling import DecodeBatch
from ragkv.types import Answer, Chunk, TokenEvent

from .citations import cite
from .prefill import Prefill


class AnswerGenerator:
    """Decodes answers for one model. Holds no request's state."""

    def __init__(self, adapter: Adapter, tokenizer: Any | None, batch: DecodeBatch) -> None:
        self._adapter, self._batch = adapter, batch
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
        record: Recording | None = None,
    ) -> Iterator[TokenEvent | Answer]:
        """Token events, then the `Answer`; times count from `began`.

        `record` is given the KV of every token but the last, which nothing follows.
        """
        ends = self._end_tokens
        sampler = Sampler(generation, prefill.token_ids.to(self._adapter.device), ends, seed)
        tokens: list[int] = []
        reason, first_s = "length", 0.0
        with self._batch.slot(prefill.fused.kv, record) as slot:
            for token in decode(slot.step, prefill.logits, sampler, ends, max_new_tokens):
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
        yield Answer(text.text, tuple(tokens), reason, timing, prefill.reuse, cite(text.text, chunks), prefill.spans)
