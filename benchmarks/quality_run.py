"""Asks every question with every method and records the outcomes. It makes no tables.

If a method's selection does not depend on the question, the chunks of a context are fused once, and the rows of each
question then run over that KV, as a request would do.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch

from benchmarks import lens
from benchmarks.quality_data import Context, Question
from benchmarks.real_judge import make_first_exact
from examples.baselines import surest
from examples.metrics import best, exact_match, rouge_l, token_f1
from ragkv import Engine
from ragkv.fusion import AskingSelector, Selector, make_selector
from ragkv.model import PromptKV, Rows, Watch
from ragkv.model.decode.stopping import end_tokens

MAX_NEW_TOKENS = 12


@dataclass(frozen=True)
class Method:
    """A method to make a prompt's KV."""

    name: str
    ratio: float | None = None  # None: the method has none
    selector: str | None = None  # "oracle" is in lens.py
    reuse: str = "fused"
    triangle: bool = False  # the mask of public code
    all_in: bool = False  # `ratio` is the compute, including the extra pass of an asking selector


@dataclass(frozen=True)
class Outcome:
    """The outcome of one question with one method."""

    context: int
    type: str
    answer: str
    exact: float
    f1: float
    rouge: float
    kl: float  # nats, full prefill against this method, of the answer's first token; NaN for MapRerank
    attention_deviation: float  # see `Attention`; NaN if not measured
    compute: float  # row-layers beyond full reuse over those of recomputing all fused tokens
    context_compute: float  # the same over those of the whole context, a part of which is exact
    prefill_compute: float  # row-layers over a full prefill's, question included


class Attention(Watch):
    """The attention of the last row per layer, the mean over heads (CacheBlend section 4.1, "attention deviation")."""

    def __init__(self, length: int, device: torch.device) -> None:
        super().__init__(1, length, device)
        self.rows: list[torch.Tensor] = []  # (S,) per layer

    def add(self, *attended) -> None:  # type: ignore[no-untyped-def]
        before = self._sum.clone()
        super().add(*attended)
        self.rows.append(self._sum - before)

    def deviation(self, true: "Attention") -> float:
        """Mean over layers of the L2 distance to the true attention, over the true one's norm."""
        pairs = zip(self.rows, true.rows, strict=True)
        return sum(float((a - b).norm() / b.norm()) for a, b in pairs) / len(self.rows)


@dataclass(frozen=True)
class Reference:
    """The result of a full prefill for one question."""

    log_probabilities: torch.Tensor  # (V,)
    tokens: tuple[int, ...]  # the greedy answer, its end token included
    attention: Attention | None  # recorded for the first question of a context


class Asker:
    """Asks the questions of one context through one engine."""

    def __init__(self, engine: Engine, context: Context, number: int) -> None:
        self._engine, self._context, self._number = engine, context, number
        self._adapter, self._runs = engine.model.adapter, engine.intake.runs
        self._end_tokens = end_tokens(self._adapter.model, engine.tokenizer)
        self.chunks = [engine.chunk(text) for text in context.chunks]
        engine.warm(self.chunks)
        make_first_exact(engine, self.chunks)  # else the first method alone computes the first passage
        self._chunk_ids = [chunk.token_ids for chunk in self.chunks]
        self._full = self._context_kv(Method("full prefill", reuse="none"), self.tail(context.questions[0]))[0]
        self._references = [self._reference(q, watched=number == 0) for number, q in enumerate(context.questions)]

    def outcomes(self, method: Method) -> Iterator[Outcome]:
        """The outcome of every question with `method`."""
        selector = self._selector(method)
        by_question = selector is not None and (isinstance(selector, AskingSelector) or selector.needs_scores)
        made = None  # equal for all questions, unless the selector uses the question
        for question, reference in zip(self._context.questions, self._references, strict=True):
            if made is None or by_question:
                with lens.bottom_right_triangle() if method.triangle else nullcontext():
                    made = self._context_kv(method, self.tail(question))
            yield self._outcome(question, reference, *made)

    def tail(self, question: Question) -> tuple[int, ...]:
        """The ids behind the chunks: earlier turns, then the question, in the model's template."""
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

    @cached_property
    def _truth(self) -> lens.Truth:
        return lens.truth(self._engine, self._chunk_ids)

    def _context_kv(self, method: Method, ids: tuple[int, ...]) -> tuple[PromptKV, int, int]:
        """KV up to the end of the last chunk, in front of the tail `ids`; its row-layers beyond full reuse, and N."""
        question = ids[: len(ids) - len(self._runs.after_question)]
        prefill = self._engine.prefill(
            question,
            self.chunks,
            ratio=self._affordable(method, len(ids)),
            selector=self._selector(method) or "none",
            reuse=method.reuse,  # type: ignore[arg-type]
        )
        kv = prefill.fused.kv
        kv.length = len(prefill.token_ids) - len(ids)
        rows = prefill.fused.row_layers - len(ids) * self._adapter.layer_count
        return kv, rows, kv.length - len(self._runs.before_documents) - len(self.chunks[0])

    def _affordable(self, method: Method, question: int) -> float:
        fused = sum(map(len, self.chunks[1:]))
        ratio = method.ratio or 0.0
        return max(0.0, ratio - question / fused) if method.all_in and fused else ratio

    @torch.no_grad()
    def _drive(self, kv: PromptKV, ids: Sequence[int], start: int, watch: Watch | None = None) -> torch.Tensor:
        """The last layer's hidden (1, R, E) of `ids` at positions start ... over `kv`."""
        adapter, stop = self._adapter, start + len(ids)
        rows, tables = Rows.span(start, stop, adapter.device), adapter.rope.tables(stop)
        hidden = adapter.embed(torch.tensor(ids, device=adapter.device))
        for layer in range(adapter.layer_count):
            hidden = adapter.run_layer(layer, hidden, rows, kv, tables, None, watch)
        return hidden

    @torch.no_grad()
    def answer(
        self, kv: PromptKV, ids: Sequence[int], start: int, draft: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, tuple[int, ...]]:
        """The answer to `ids` at positions start ... over `kv`: first log-probabilities (V,), greedy tokens.

        `draft` is a guess at the answer: it is driven along, and as far as it is what greedy decoding gives it costs no
        further step. The end token counts as a token here. What is written to `kv` is forgotten.
        """
        kv.reserve(start + len(ids) + len(draft) + MAX_NEW_TOKENS)
        hidden = self._drive(kv, (*ids, *draft), start)
        logits = self._adapter.logits(hidden[:, len(ids) - 1 :])  # (1 + draft, V)
        tokens: list[int] = []
        for place, row in enumerate(logits):
            tokens.append(int(row.argmax()))
            if tokens[-1] in self._end_tokens or place == len(draft) or tokens[-1] != draft[place]:
                break
        while tokens[-1] not in self._end_tokens and len(tokens) < MAX_NEW_TOKENS:
            at = start + len(ids) + len(tokens) - 1
            tokens.append(int(self._adapter.logits(self._drive(kv, tokens[-1:], at)[:, -1:])[0].argmax()))
        return logits[0].log_softmax(-1).cpu(), tuple(tokens)

    def _attention(self, kv: PromptKV, ids: Sequence[int]) -> Attention:
        kv.reserve(kv.length + len(ids) + MAX_NEW_TOKENS)
        attention = Attention(kv.length + len(ids), self._adapter.device)
        self._drive(kv, ids, kv.length, attention)
        return attention

    def _reference(self, question: Question, watched: bool) -> Reference:
        ids = self.tail(question)
        log_probabilities, tokens = self.answer(self._full, ids, self._full.length)
        return Reference(log_probabilities, tokens, self._attention(self._full, ids) if watched else None)

    def _outcome(self, question: Question, reference: Reference, kv: PromptKV, rows: int, candidates: int) -> Outcome:
        ids, layers = self.tail(question), self._adapter.layer_count
        log_probabilities, tokens = self.answer(kv, ids, kv.length, reference.tokens)
        deviation = self._attention(kv, ids).deviation(reference.attention) if reference.attention else math.nan
        whole = kv.length + len(ids)
        return self._scored(
            question,
            self.text(tokens),
            _divergence(reference.log_probabilities, log_probabilities),
            deviation,
            rows / (layers * max(1, candidates)),
            rows / (layers * kv.length),
            (rows + layers * len(ids)) / (layers * whole),
        )

    def text(self, tokens: Sequence[int]) -> str:
        """An answer's tokens as text."""
        assert self._engine.tokenizer is not None
        return str(self._engine.tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()

    def _scored(self, question: Question, answer: str, kl: float, deviation: float, *compute: float) -> Outcome:
        scores = [best(metric, answer, question.golds) for metric in (exact_match, token_f1, rouge_l)]
        return Outcome(self._number, question.type, answer, *scores, kl, deviation, *compute)

    def no_context(self) -> Iterator[Outcome]:
        """Every question without chunks."""
        for question, reference in zip(self._context.questions, self._references, strict=True):
            ids = (*self._runs.before_documents, *self.tail(question))
            log_probabilities, tokens = self.answer(self._adapter.new_kv(0), ids, 0)
            kl = _divergence(reference.log_probabilities, log_probabilities)
            yield self._scored(question, self.text(tokens), kl, math.nan, 0.0, 0.0, 0.0)

    def map_rerank(self) -> Iterator[Outcome]:
        """Every question asked of each chunk alone; the surest answer except "unknown" wins."""
        for question in self._context.questions:
            ids, answers = self.tail(question), []
            for chunk in self.chunks:
                head = (*self._runs.before_documents, *chunk.token_ids)
                log_probabilities, tokens = self.answer(self._adapter.new_kv(0), (*head, *ids), 0)
                answers.append((float(log_probabilities.max()), self.text(tokens)))
            yield self._scored(question, surest(answers), math.nan, math.nan, 1.0, 1.0, 1.0)


def _divergence(wanted: torch.Tensor, got: torch.Tensor) -> float:
    return float((wanted.exp() * (wanted - got)).sum())
