"""One answer while its tokens come, from this model or another server: its text, why it ended, and its report."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ragkv.model.decode.stopping import TextStream
from ragkv.types import Answer, TokenEvent, TokenLogprob

from .citations import cite
from .request import ActiveRequest


class ActiveAnswer:
    """An answer to a request whose prompt is served."""

    def __init__(self, active: ActiveRequest, tokenizer: Any | None) -> None:
        request = active.request
        self._active, self._text = active, TextStream(tokenizer, request.stop, as_written=request.raw)
        self._logprobs: list[TokenLogprob] = []
        self._first_token_s = 0.0
        self.tokens: list[int] = []
        self.reason: str | None = None  # why it ended: "stop" or "length"; None: it goes on

    @property
    def ended(self) -> bool:
        """Whether it is complete."""
        return self.reason is not None

    @property
    def stopped_by_string(self) -> bool:
        """Whether one of the request's stop strings ended it."""
        return self._text.stopped

    @property
    def notes(self) -> tuple[str, ...]:
        """What its report says about this answer."""
        return self._active.request.sampling.notes

    def end(self) -> None:
        """Its next token is an end token, which is not part of it."""
        self._note_token()
        self.reason = "stop"

    def add(self, token: int, logprob: TokenLogprob | None = None) -> TokenEvent:
        """Its next token."""
        self._note_token()
        self.tokens.append(token)
        if logprob is not None:
            self._logprobs.append(logprob)
        event = TokenEvent(self._text.add(token), token, logprob)
        if self._text.stopped:
            self.reason = "stop"
        elif len(self.tokens) == self._active.request.max_new_tokens:
            self.reason = "length"
        return event

    def finish(self) -> Iterator[TokenEvent | Answer]:
        """The text that was held back, and the whole answer."""
        if rest := self._text.finish():
            yield TokenEvent(rest, self.tokens[-1])
        self._note_token()  # unless one had come
        served = self._active.prefill
        assert self.reason is not None
        decode_s = self._active.elapsed_s() - self._first_token_s
        yield Answer(
            text=self._text.text,
            token_ids=tuple(self.tokens),
            finish_reason=self.reason,
            timing=replace(served.timing, first_token_s=self._first_token_s, decode_s=decode_s),
            reuse=served.reuse,
            citations=cite(self._text.text, self._active.request.chunks),
            spans=served.spans,
            logprobs=tuple(self._logprobs),
        ).with_notes(*self.notes)

    def _note_token(self) -> None:
        self._first_token_s = self._first_token_s or self._active.elapsed_s()


__all__ = ["ActiveAnswer"]
