"""The effect of KCache on trained models: next tokens of known texts, and the reader's answers.

All settings of N and L decode the same token in one step, each over its own copy of one prefill (KCache table 2).
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import quality_data
from examples.metrics import best, exact_match
from ragkv.config import KCacheConfig
from ragkv.model import Adapter, PromptKV, full_pass
from ragkv.model.decode.batching import DecodeRow, decode_rows
from ragkv.model.decode.stopping import end_tokens
from ragkv.model.kcache import offload
from ragkv.prompt.layout import TemplateRuns, encode

MAX_NEW_TOKENS = 12


Settings = Sequence[KCacheConfig | None]  # None is ordinary decoding and comes first


def name(config: KCacheConfig | None) -> str:
    """The name of a setting in tables."""
    if config is None:
        return "ordinary"
    return f"N={config.top_n} L={config.resident_layers}"


def copies(kv: PromptKV, settings: Settings) -> list[PromptKV]:
    """A copy of `kv` for each setting."""
    return [offload(kv, config or KCacheConfig(top_n=None, resident_layers=10**6)) for config in settings]


def perplexities(
    adapter: Adapter, texts: Iterable[Sequence[int]], prefilled: int, settings: Settings
) -> dict[str, dict[str, float]]:
    """The tokens of each text behind its first `prefilled` ones, fed one by one regardless of the predictions.

    "agreement" is the share of steps with the same most probable token as ordinary decoding.
    """
    nlls, agreed = [], []
    for ids in texts:
        kv = adapter.new_kv(len(ids))
        with torch.no_grad():
            full_pass(adapter, torch.tensor(ids[:prefilled]), kv)
        kvs = copies(kv, settings)
        for token, following in zip(ids[prefilled:-1], ids[prefilled + 1 :], strict=True):
            logits = decode_rows(adapter, [DecodeRow(own, token) for own in kvs])
            chosen = logits.argmax(-1)
            nlls.append(-logits.log_softmax(-1)[:, following])
            agreed.append(chosen == chosen[0])
    return _means(settings, perplexity=_mean(nlls).exp(), agreement=_mean(agreed))


def _mean(rows: Sequence[Any]) -> torch.Tensor:
    """The mean of rows that have a number for each setting."""
    return torch.stack([torch.as_tensor(row, dtype=torch.float64) for row in rows]).mean(0)


def _means(settings: Settings, **columns: torch.Tensor) -> dict[str, dict[str, float]]:
    """What was measured with each setting, by name."""
    names = map(name, settings)
    return {each: {key: float(column[at]) for key, column in columns.items()} for at, each in enumerate(names)}


def stories(folder: Path, limit: int) -> list[list[int]]:
    """The token ids that are part of the stories model."""
    loaded: list[list[int]] = json.loads((folder / "stories_ids.json").read_text())
    return loaded[:limit]


class Reader:
    """Asks the reader about held-out worlds, each question with every setting."""

    def __init__(self, adapter: Adapter, tokenizer: Any, runs: TemplateRuns, worlds: int, level: int) -> None:
        self._adapter, self._tokenizer, self._runs = adapter, tokenizer, runs
        self._ends = end_tokens(adapter.model, tokenizer)
        self._contexts = quality_data.worlds(worlds, seed=5, level=level)

    def ids(self, context: quality_data.Context) -> list[int]:
        """The ids of a context."""
        chunks = [encode(self._tokenizer, chunk) for chunk in context.chunks]
        return [*self._runs.before_documents, *(token for chunk in chunks for token in chunk)]

    def answers(self, settings: Settings, questions: int, stepped: bool) -> tuple[dict[str, dict[str, float]], float]:
        """Exact match of every setting and the share of answers "same" as by ordinary decoding; a prompt's mean length.

        As served, the prefill ends with the question: KCache begins with the answer's second token. `stepped` decodes
        the question's tokens, too, so that all the model reads of it is read under KCache.
        """
        exact, same, lengths = [], [], []
        for context in quality_data.limited(self._contexts, questions):
            ids = self.ids(context)
            kv = self._adapter.new_kv(len(ids) + 100)
            with torch.no_grad():
                full_pass(self._adapter, torch.tensor(ids), kv)
            for question in context.questions:
                asked = [*encode(self._tokenizer, question.text), *self._runs.after_question]
                kv.length = len(ids)
                said = self._say(kv, asked, settings, stepped)
                lengths.append(len(ids) + len(asked))
                exact.append([best(exact_match, text, question.golds) for text in said])
                same.append([text == said[0] for text in said])
        return _means(settings, exact=_mean(exact), same=_mean(same)), sum(lengths) / len(lengths)

    @torch.no_grad()
    def _say(self, kv: PromptKV, asked: Sequence[int], settings: Settings, stepped: bool) -> list[str]:
        """The greedy answer of each setting."""
        adapter = self._adapter
        if stepped:
            kvs = copies(kv, settings)
            for token in asked:
                logits = decode_rows(adapter, [DecodeRow(own, token) for own in kvs])
        else:
            hidden = full_pass(adapter, torch.tensor(asked), kv, start=kv.length)
            logits = adapter.logits(hidden[:, -1:]).expand(len(settings), -1)
            kvs = copies(kv, settings)
        said: list[list[int]] = [[] for _ in settings]
        active = list(range(len(settings)))
        for _ in range(MAX_NEW_TOKENS):
            tokens = logits.argmax(-1).tolist()
            rows, still = [], []
            for at, token in zip(active, tokens, strict=True):
                if token not in self._ends:
                    said[at].append(token)
                    rows.append(DecodeRow(kvs[at], token))
                    still.append(at)
            active = still
            if not active:
                break
            logits = decode_rows(adapter, rows)
        return [str(self._tokenizer.decode(tokens, skip_special_tokens=True)).strip() for tokens in said]
