"""From a prefill to an answer, token by token."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ragkv.model import Adapter
from ragkv.model.decoding import decode, end_tokens
from ragkv.model.sampling import Sampler
from ragkv.model.stopping import TextStream
from ragkv.scheduling import DecodeBatch
from ragkv.types import Answer, TokenEvent

from .citations import cite
from .request import ActiveRequest


class AnswerGenerator:
    """Decodes answers for one model. Holds no request's state."""

    def __init__(self, adapter: Adapter, tokenizer: Any | None, batch: DecodeBatch) -> None:
        self._adapter, self._tokenizer, self._batch = adapter, tokenizer, batch
        self._end_tokens = end_tokens(adapter.model, tokenizer)

    def stream(self, active: ActiveRequest) -> Iterator[TokenEvent | Answer]:
        """Token events of a prefilled request, then its `Answer`.

        A conversation's turn records the KV of every token but the last, which is never run.
        """
        request, prefill, ends = active.request, active.prefill, self._end_tokens
        text = TextStream(self._tokenizer, request.stop)
        sampler = Sampler(request.sampling, prefill.token_ids.to(self._adapter.device), ends)
        record = prefill.turn_kv.record if prefill.turn_kv else None
        tokens: list[int] = []
        reason, first_token_s = "length", 0.0
        with self._batch.slot(prefill.fused.kv, record) as slot:
            for token in decode(slot.step, prefill.logits, sampler, ends, request.max_new_tokens):
                first_token_s = first_token_s or active.elapsed_s()
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
        decode_s = active.elapsed_s() - first_token_s
        yield Answer(
            text=text.text,
            token_ids=tuple(tokens),
            finish_reason=reason,
            timing=replace(prefill.timing, first_token_s=first_token_s, decode_s=decode_s),
            reuse=prefill.reuse,
            citations=cite(text.text, request.chunks),
            spans=prefill.spans,
        ).with_notes(*request.sampling.notes)


__all__ = ["AnswerGenerator"]
