"""Asks every question under every method and notes what came of it. Knows nothing of tables.

The chunks of a context are fused once for a method that does not ask the question first; each question's rows are then
driven over that KV, which is what a request would do with it. Exactness of that shortcut is a test
(`tests/fusion/test_quality_benchmark.py`).
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from benchmarks import lens
from benchmarks.quality_data import Context, Question
from ragkv import Engine
from ragkv.fusion import AskingSelector, Selector, make_selector
from ragkv.metrics import best, exact_match, rouge_l, token_f1
from ragkv.model import PromptKV, Rows, Watch
from ragkv.model.decoding import end_tokens

MAX_NEW_TOKENS = 12


@dataclass(frozen=True)
class Method:
    """A way to make a prompt's KV."""

    name: str
    ratio: float | None = None  # None: the method has none
    selector: str | None = None  # "oracle" is the lens'
    reuse: str = "fused"
    triangle: bool = False  # mask as public code does


@dataclass(frozen=True)
class Outcome:
    """One question under one method."""

    context: int
    type: str
    answer: str
    exact: float
    f1: float
    rouge: float
    kl: float  # nats, full prefill against this method, of the first token of the answer
    attention_deviation: float  # see `Attention`
    compute: float  # row-layers beyond full reuse over those of a full recompute of what is fused
    prefill_compute: float  # row-layers over a full prefill's, question included


class Attention(Watch):
    """Keeps every head's attention of the last row, layer by layer (CacheBlend section 4.1, "attention deviation")."""

    def __init__(self, length: int, device: torch.device) -> None:
        super().__init__(length, device)
        self.rows: list[torch.Tensor] = []  # (H, S) a layer

    def add(self, mask, q_rot, k_rot, scaling, softcap) -> None:  # type: ignore[no-untyped-def]
        before = self._sum.clone()
        super().add(mask, q_rot, k_rot, scaling, softcap)
        self.rows.append(self._sum - before)

    def deviation(self, true: "Attention") -> float:
        """Mean over layers of the L2 distance to the true attention, over the true one's norm."""
        pairs = zip(self.rows, true.rows, strict=True)
        return sum(float((a - b).norm() / b.norm()) for a, b in pairs) / len(self.rows)


@dataclass(frozen=True)
class Reference:
    """What a full prefill says to one question."""

    log_probabilities: torch.Tensor  # (V,)
    attention: Attention


class Asker:
    """Asks the questions of one context through one engine."""

    def __init__(self, engine: Engine, context: Context, number: int, deviations: bool = True) -> None:
        self._engine, self._context, self._number, self._deviations = engine, context, number, deviations
        self._adapter, self._runs = engine._adapter, engine._runs
        self._end_tokens = end_tokens(self._adapter.model, engine.tokenizer)
        self.chunks = [engine.chunk(text) for text in context.chunks]
        engine.warm(self.chunks)
        self._truth = lens.truth(engine, [chunk.token_ids for chunk in self.chunks])
        self._full = self._context_kv(Method("full prefill", reuse="none"))[0]
        self._references = [self._reference(question) for question in context.questions]

    def outcomes(self, method: Method) -> Iterator[Outcome]:
        """Every question under `method`."""
        selector = self._selector(method)
        if isinstance(selector, AskingSelector):
            for question, reference in zip(self._context.questions, self._references, strict=True):
                kv, rows, candidates = self._context_kv(method, self.tail(question))
                yield self._outcome(question, reference, kv, rows, candidates)
            return
        with lens.bottom_right_triangle() if method.triangle else nullcontext():
            kv, rows, candidates = self._context_kv(method)
        for question, reference in zip(self._context.questions, self._references, strict=True):
            yield self._outcome(question, reference, kv, rows, candidates)

    def tail(self, question: Question) -> tuple[int, ...]:
        """The ids behind the chunks: earlier turns, then the question, as the model's template has them."""
        ids: tuple[int, ...] = ()
        for asked, answer in question.history:
            ids += (*self._ids(asked), *self._runs.after_question, *self._plain(" " + answer), *self._runs.after_answer)
            ids += self._runs.before_next_turn
        return ids + self._ids(question.text) + self._runs.after_question

    def _ids(self, text: str) -> tuple[int, ...]:
        plain = not self._runs.after_question and not text.rstrip().endswith(":")
        return self._plain(f"Question: {text} Answer:" if plain else text)

    def _plain(self, text: str) -> tuple[int, ...]:
        assert self._engine.tokenizer is not None
        return tuple(self._engine.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _selector(self, method: Method) -> Selector | None:
        if method.selector == "oracle":
            return lens.Oracle(self._truth)
        return make_selector(method.selector) if method.selector else None

    def _context_kv(self, method: Method, tail: Sequence[int] | None = None) -> tuple[PromptKV, int, int]:
        """KV valid to the last chunk's end, row-layers spent on it beyond full reuse, and N."""
        ids = tuple(self.tail(self._context.questions[0])) if tail is None else tuple(tail)
        end = self._runs.after_question
        question = ids[: len(ids) - len(end)] if end else ids
        prefill = self._engine.prefill(
            question,
            self.chunks,
            ratio=method.ratio or 0.0,
            selector=self._selector(method) or "none",
            reuse=method.reuse,  # type: ignore[arg-type]
        )
        kv = prefill.fused.kv
        kv.length = len(prefill.token_ids) - len(ids)
        rows = prefill.fused.row_layers - len(ids) * self._adapter.layer_count
        return kv, rows, kv.length - len(self._runs.before_documents) - len(self.chunks[0])

    @torch.no_grad()
    def _drive(self, kv: PromptKV, ids: Sequence[int], start: int, watch: Watch | None = None) -> torch.Tensor:
        """Log-probabilities (V,) behind `ids` at positions start ... over `kv`."""
        adapter, stop = self._adapter, start + len(ids)
        rows, tables = Rows.span(start, stop, adapter.device), adapter.rope.tables(stop)
        hidden = adapter.embed(torch.tensor(ids, device=adapter.device))
        for layer in range(adapter.layer_count):
            hidden = adapter.run_layer(layer, hidden, rows, kv, tables, None, watch)
        return adapter.logits(hidden[:, -1:])[0].log_softmax(-1).cpu()

    def _reference(self, question: Question) -> Reference:
        ids = self.tail(question)
        self._full.reserve(self._full.length + len(ids) + MAX_NEW_TOKENS)
        attention = Attention(self._full.length + len(ids), self._adapter.device)
        return Reference(self._drive(self._full, ids, self._full.length, attention), attention)

    def _outcome(self, question: Question, reference: Reference, kv: PromptKV, rows: int, candidates: int) -> Outcome:
        ids, layers = self.tail(question), self._adapter.layer_count
        kv.reserve(kv.length + len(ids) + MAX_NEW_TOKENS)
        attention = Attention(kv.length + len(ids), self._adapter.device) if self._deviations else None
        logits = self._drive(kv, ids, kv.length, attention)
        answer = self.decoded(kv, logits, kv.length + len(ids))
        whole = kv.length + len(ids)
        return self._scored(
            question,
            answer,
            _divergence(reference.log_probabilities, logits),
            attention.deviation(reference.attention) if attention else 0.0,
            rows / (layers * max(1, candidates)),
            (rows + layers * len(ids)) / (layers * whole),
        )

    def decoded(self, kv: PromptKV, log_probabilities: torch.Tensor, at: int) -> str:
        """The greedy answer from position `at` on; what is written to `kv` is forgotten."""
        tokens: list[int] = []
        while len(tokens) < MAX_NEW_TOKENS:
            token = int(log_probabilities.argmax())
            if token in self._end_tokens:
                break
            tokens.append(token)
            if len(tokens) < MAX_NEW_TOKENS:
                log_probabilities = self._drive(kv, [token], at + len(tokens) - 1)
        assert self._engine.tokenizer is not None
        return str(self._engine.tokenizer.decode(tokens, skip_special_tokens=True)).strip()

    def _scored(
        self, question: Question, answer: str, kl: float, deviation: float, compute: float, prefill_compute: float
    ) -> Outcome:
        scores = [best(metric, answer, question.golds) for metric in (exact_match, token_f1, rouge_l)]
        return Outcome(self._number, question.type, answer, *scores, kl, deviation, compute, prefill_compute)

    def no_context(self) -> Iterator[Outcome]:
        """Every question without chunks."""
        for question, reference in zip(self._context.questions, self._references, strict=True):
            prefix = self._runs.before_documents
            kv = self._adapter.new_kv(256)
            logits = self._drive(kv, (*prefix, *self.tail(question)), 0)
            answer = self.decoded(kv, logits, len(prefix) + len(self.tail(question)))
            kl = _divergence(reference.log_probabilities, logits)
            yield self._scored(question, answer, kl, 0.0, 0.0, 0.0)

    def map_rerank(self) -> Iterator[tuple[Outcome, float]]:
        """Every question asked of each chunk alone; the surest answer that is not "unknown" wins. Seconds beside it."""
        for question in self._context.questions:
            began, ids, answers = time.perf_counter(), self.tail(question), []
            for chunk in self.chunks:
                head = (*self._runs.before_documents, *chunk.token_ids)
                kv = self._adapter.new_kv(len(head) + len(ids) + MAX_NEW_TOKENS)
                logits = self._drive(kv, (*head, *ids), 0)
                answers.append((float(logits.max()), self.decoded(kv, logits, len(head) + len(ids))))
            known = [pair for pair in answers if pair[1].lower() != "unknown"] or answers
            spent = time.perf_counter() - began
            yield self._scored(question, max(known)[1], 0.0, 0.0, 1.0, 1.0), spent


def _divergence(wanted: torch.Tensor, got: torch.Tensor) -> float:
    return float((wanted.exp() * (wanted - got)).sum())
