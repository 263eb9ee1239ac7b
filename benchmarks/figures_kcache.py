"""KCache's figures and tables that no other command shows."""

import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from benchmarks.figure_bench import Bench, Figure, Kind, Row
from ragkv.config import KCacheConfig
from ragkv.model import Adapter, PromptKV, full_pass
from ragkv.model.decode.batching import DecodeRow, decode_rows
from ragkv.model.kcache import OffloadedKV

TOP_N = (16, 32, 64, 128)


@torch.no_grad()
def top_n(bench: Bench) -> Iterator[Row]:
    """Perplexity of an article's last 48 tokens behind another article, each fed whatever was
    predicted, by N and L.

    Geometric means over the articles, and the share of steps with the most probable token of
    ordinary decoding. All settings decode a token in one step, each over its own copy of one
    prefill.
    """
    adapter = bench.engine.model.adapter
    before = list[int](list(bench.articles.values())[-1])
    settings = [
        KCacheConfig(None, 10**6),
        *(KCacheConfig(n, resident) for resident in (0, 1, 2) for n in TOP_N),
    ]
    losses, agreed = [], []
    for ids in bench.articles.values():
        own_losses, own_agreed = _steps(adapter, [*before, *ids], settings)
        before = ids
        losses.append(own_losses)
        agreed.append(own_agreed)
    perplexity, same = (torch.cat(column).mean(0) for column in (losses, agreed))
    for at, setting in enumerate(settings):
        own = float((perplexity[at] - perplexity[0]).exp())
        level = setting.resident_layers if at else "-"
        yield [setting.top_n or "all", level, float(perplexity[at].exp()), own, float(same[at])]


def _steps(
    adapter: Adapter, text: Sequence[int], settings: Sequence[KCacheConfig]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of the last 48 tokens, and whether the most probable one is the first setting's: each
    (48, settings).
    """
    losses = []
    agreed = []
    kv = adapter.new_kv(len(text))
    full_pass(adapter, torch.tensor(text[:-48]), kv)
    kvs = [_offloaded(adapter, kv, setting) for setting in settings]
    for token, following in pairwise(text[-48:]):
        logits = decode_rows(adapter, [DecodeRow(own, token) for own in kvs])
        losses.append(-logits.double().log_softmax(-1)[:, following])
        agreed.append((logits.argmax(-1) == logits.argmax(-1)[0]).double())
    return torch.stack(losses), torch.stack(agreed)


def _offloaded(adapter: Adapter, kv: PromptKV, config: KCacheConfig) -> OffloadedKV:
    """A copy of a prefilled `kv` with values in host memory as `config` says."""
    made = OffloadedKV(adapter.kv_shape, kv.capacity, adapter.dtype, adapter.device, config)
    for layer in range(adapter.layer_count):
        made.put(layer, 0, *kv.view(layer, kv.length))
        made.finish_prefill(layer, kv.length)
    made.length = kv.length
    return made


def by_article(bench: Bench) -> Iterator[Row]:
    """The same by article, in place of BBH's subjects: with all V rows, and with the N largest of
    every layer but the first.
    """
    before = list[int](list(bench.articles.values())[-1])
    adapter = bench.engine.model.adapter
    settings = [KCacheConfig(None, 10**6), *(KCacheConfig(n, 1) for n in TOP_N)]
    for name, ids in bench.articles.items():
        losses, agreed = _steps(adapter, [*before, *ids], settings)
        before = ids
        yield [name, *losses.mean(0).exp().tolist(), float(agreed.mean(0)[-1])]


def flops_and_bytes(bench: Bench) -> Iterator[Row]:
    """A decoding step's attention in one layer of this model, in 16 bits: operations, and bytes
    that the device reads, by ordinary decoding and with the N largest weights.
    """
    config = bench.engine.model.adapter.config
    heads = config.num_attention_heads
    kv_heads = bench.engine.model.adapter.kv_heads
    dim = bench.engine.model.adapter.head_dim
    for context in (1024, 4096, 15360):
        for top_n in (None, *TOP_N):
            rows = context if top_n is None else top_n
            flops = 2 * heads * dim * (context + rows)
            keys = 2 * kv_heads * dim * context
            values = 2 * kv_heads * dim * rows
            from_host = 0 if top_n is None else values
            yield [context, top_n or "all", flops, keys + values - from_host, from_host]


def prompts(bench: Bench) -> Iterator[Row]:
    """Tokens of the articles: a prompt with one has as many."""
    sizes = [len(ids) for ids in bench.articles.values()]
    yield [len(sizes), min(sizes), statistics.median(sizes), max(sizes)]


FIGURES = {
    "kcache table 1": Figure(
        flops_and_bytes, "context N operations device_bytes host_bytes", Kind.COMPUTED
    ),
    "kcache table 2": Figure(top_n, "N L perplexity over_all agreement", Kind.MEASURED),
    "kcache table 4": Figure(
        by_article, "article all " + " ".join(f"N={n}" for n in TOP_N) + " agreement", Kind.MEASURED
    ),
    "kcache 2": Figure(prompts, "articles least median most", Kind.MEASURED),
}
