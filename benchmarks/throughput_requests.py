"""The requests and servers of `throughput.py`: recurring chunks, three ways to prefill them, a queue for one server.

The chunks of the requests recur like the passage ids of RAGPulse's requests, in the same order; each chunk is random
token ids of one length. Entries and prefix KV that were stored before the measured requests hold random values, which
change no time.
"""

import hashlib
import itertools
import json
import random
import statistics
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from benchmarks.random_model import put_random_entry
from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.config import ControllerConfig
from ragkv.runtime import FairLock

QUESTION_TOKENS = 32
Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """The chunks and the question of one prompt."""

    chunks: tuple[Ids, ...]
    question: Ids


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in order: earlier ones that filled the stores, those to be measured, and those of the real run."""

    name: str
    before: tuple[Request, ...]
    measured: tuple[Request, ...]
    real: tuple[Request, ...]

    @property
    def corpus(self) -> tuple[Ids, ...]:
        """Every chunk, once."""
        requests = (*self.before, *self.measured, *self.real)
        return tuple(dict.fromkeys(chunk for request in requests for chunk in request.chunks))


def load(folder: Path, chunks: int, tokens: int, vocabulary: int, before: int, measured: int, real: int) -> Load:
    """RAGPulse requests with at least `chunks` passages from the middle of its week; Zipf requests without it."""
    count = before + measured + real
    if folder.is_dir():
        trace = [json.loads(line) for line in (folder / "0_trace.jsonl").read_text("utf-8").splitlines() if line]
        parts = [one["hash_ids"].get("passages_ids", ()) for one in sorted(trace, key=lambda o: float(o["timestamp"]))]
        lists = [list(dict.fromkeys(numbers))[:chunks] for numbers in parts]
        lists = [numbers for numbers in lists if len(numbers) == chunks]
        middle = max(0, len(lists) // 2 - before)
        lists, name = lists[middle : middle + count], "RAGPulse's passage ids"
    else:
        lists, name = _zipf(chunks, count), "synthetic, Zipf 1.0 over 1,000 passages"

    def ids(seed: int, count: int) -> Ids:
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randint(3, vocabulary, (count,), generator=generator).tolist())

    made = {number: ids(number, tokens) for numbers in lists for number in numbers}
    requests = [
        Request(tuple(made[number] for number in numbers), ids(10**9 + at, QUESTION_TOKENS))
        for at, numbers in enumerate(lists)
    ]
    ordered = iter(requests)
    return Load(name, *(tuple(itertools.islice(ordered, size)) for size in (before, measured, real)))


def _zipf(chunks: int, count: int) -> list[list[int]]:
    chance, weights = random.Random(0), [1 / rank for rank in range(1, 1001)]
    lists: list[list[int]] = []
    for _ in range(count):
        drawn: dict[int, None] = {}
        while len(drawn) < chunks:
            drawn[chance.choices(range(1000), weights)[0]] = None
        lists.append(list(drawn))
    return lists


class Served(NamedTuple):
    """The result of one served request."""

    first_token_at: float  # by `time.perf_counter`
    reused: float  # share of the prompt's tokens


class Server(ABC):
    """One way to serve. The model computes one request at a time."""

    name: str

    @abstractmethod
    def serve(self, request: Request) -> Served:
        """Prefills up to the first token. Thread-safe, first come first served."""

    @abstractmethod
    def finish_background_work(self) -> None:
        """Does now what the last request left for later on the model."""


class Full(Server):
    """transformers' own full prefill."""

    name = "full recompute"

    def __init__(self, model: Any) -> None:
        self._model, self._compute = model, FairLock()

    def serve(self, request: Request) -> Served:
        with self._compute.hold():
            self._prefill(_tensor(request), DynamicCache())
        return Served(time.perf_counter(), 0.0)

    def finish_background_work(self) -> None:
        return

    @torch.no_grad()
    def _prefill(self, token_ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Logits (V,) after `token_ids` (1, R), which follow `cache`."""
        logits: torch.Tensor = self._model(token_ids, past_key_values=cache, logits_to_keep=1).logits[0, -1]
        logits.argmax()
        return logits


class ExactPrefix(Full):
    """transformers' own prefill after the longest stored prefix (vLLM's prefix caching, RAGCache's knowledge tree).

    The store's pieces are chunks, each under the digest of all ids up to its end. Eviction is LRU, and evicts a piece
    before the pieces of its prefix. Storing is not counted in the computed queue: with paged KV it would cost nothing.
    """

    name = "exact prefix"

    def __init__(self, model: Any, budget_bytes: int) -> None:
        super().__init__(model)
        self.budget_bytes = budget_bytes
        self.size_bytes = 0
        self._pieces: OrderedDict[bytes, torch.Tensor] = OrderedDict()  # (L, 2, 1, G, T, D), least recent first

    def serve(self, request: Request) -> Served:
        with self._compute.hold():
            _, reused, cache = self.prefill(request)
            served = Served(time.perf_counter(), reused)
            self._store(request, cache)
        return served

    def prefill(self, request: Request) -> tuple[torch.Tensor, float, DynamicCache]:
        """Logits (V,), the share of tokens reused, and the prompt's KV."""
        found = [self._pieces[key] for key in itertools.takewhile(self._pieces.__contains__, _prefix_digests(request))]
        cache, whole = _joined(found), _tensor(request)
        reused = sum(piece.shape[4] for piece in found)
        return self._prefill(whole[:, reused:], cache), reused / whole.shape[1], cache

    def _store(self, request: Request, cache: DynamicCache) -> None:
        keys, at = _prefix_digests(request), 0
        for key, chunk in zip(keys, request.chunks, strict=True):
            span = slice(at, at + len(chunk))
            at += len(chunk)
            if key not in self._pieces:
                layers = [torch.stack((kv.keys[:, :, span], kv.values[:, :, span])) for kv in cache.layers]
                self._pieces[key] = torch.stack(layers)
                self.size_bytes += self._pieces[key].nbytes
        self._evict(keys)

    def fill(self, request: Request, piece: torch.Tensor) -> None:
        """Stores copies of `piece` for a request without computing anything."""
        keys = _prefix_digests(request)
        for key in keys:
            if key not in self._pieces:
                self._pieces[key] = piece.clone()
                self.size_bytes += piece.nbytes
        self._evict(keys)

    def _evict(self, used: Sequence[bytes]) -> None:
        for key in reversed(used):
            self._pieces.move_to_end(key)
        while self.size_bytes > self.budget_bytes:
            self.size_bytes -= self._pieces.popitem(last=False)[1].nbytes


def _prefix_digests(request: Request) -> list[bytes]:
    """Digests of the prompt's ids up to the end of each chunk."""
    digest, path = hashlib.blake2b(digest_size=16), []
    for chunk in request.chunks:
        digest.update(repr(chunk).encode())
        path.append(digest.digest())
    return path


def _joined(pieces: Sequence[torch.Tensor]) -> DynamicCache:
    cache = DynamicCache()
    if pieces:
        for layer, parts in enumerate(zip(*pieces, strict=True)):
            keys, values = (torch.cat([part[which] for part in parts], dim=2) for which in (0, 1))
            cache.update(keys, values, layer)
    return cache


def _tensor(request: Request) -> torch.Tensor:
    return torch.tensor([[*(i for chunk in request.chunks for i in chunk), *request.question]])


class Fused(Server):
    """ragkv: the corpus was ingested as far as the budget allows; missed chunks are encoded after the request."""

    def __init__(self, model: Any, budget_bytes: int, ratio: float, corpus: Sequence[Ids]) -> None:
        self.name = f"fused, ratio {ratio:g}"
        store = StoreConfig(memory_bytes=budget_bytes)
        self.engine, self._ratio = (
            Engine(model, config=EngineConfig(store=store, controller=ControllerConfig(measure=False))),
            ratio,
        )
        for chunk in corpus:
            put_random_entry(self.engine, chunk, exact=True)
        self.engine.flush()

    def serve(self, request: Request) -> Served:
        answer = self.engine.answer(request.question, request.chunks, max_new_tokens=1, ratio=self._ratio)
        reuse = answer.reuse
        return Served(time.perf_counter(), (reuse.exact + reuse.fused) / reuse.tokens)

    def finish_background_work(self) -> None:
        """Encodes the chunks that were missed."""
        self.engine.flush()


def piece_shape(engine: Engine, tokens: int) -> tuple[int, ...]:
    """(L, 2, G, T, D) of the KV of `tokens` tokens."""
    adapter = engine.model.adapter
    return adapter.layer_count, 2, adapter.kv_heads, tokens, adapter.head_dim


@dataclass(frozen=True, slots=True)
class Service:
    """How long one request occupies the model."""

    prefill_s: float  # to its first token
    after_s: float  # work that the request left for later
    reused: float  # share of its tokens


def services(servers: Sequence[Server], requests: Sequence[Request]) -> dict[str, list[Service]]:
    """Measured times of every request on every server. Servers alternate, so that noise hits all alike."""
    found: dict[str, list[Service]] = {server.name: [] for server in servers}
    for request in requests:
        for server in servers:
            began = time.perf_counter()
            served = server.serve(request)
            after = time.perf_counter()
            server.finish_background_work()
            after_s = time.perf_counter() - after
            found[server.name].append(Service(served.first_token_at - began, after_s, served.reused))
    return found


def poisson_gaps(count: int, seed: int) -> list[float]:
    """Times between the arrivals of a Poisson process of rate 1."""
    chance = random.Random(seed)
    return [chance.expovariate(1.0) for _ in range(count)]


def queue_ttfts(times: Sequence[Service], arrivals: Sequence[float]) -> list[float]:
    """Computed TTFT of requests that arrive at these times at one server, first come first served."""
    free_at, ttfts = 0.0, []
    for service, at in zip(itertools.cycle(times), arrivals):
        first_token_at = max(free_at, at) + service.prefill_s
        free_at = first_token_at + service.after_s
        ttfts.append(first_token_at - at)
    return ttfts


def mean_ttft(times: Sequence[Service], rate: float, unit_gaps: Sequence[float]) -> float:
    """Mean TTFT at `rate` requests/s, the first tenth excluded."""
    ttfts = queue_ttfts(times, list(itertools.accumulate(gap / rate for gap in unit_gaps)))
    return statistics.fmean(ttfts[len(ttfts) // 10 :])


def saturation(times: Sequence[Service]) -> float:
    """The rate in requests/s that keeps the server busy without a pause."""
    return 1 / statistics.fmean(service.prefill_s + service.after_s for service in times)


def highest_rate(times: Sequence[Service], bound_s: float, unit_gaps: Sequence[float]) -> float:
    """The highest rate whose mean TTFT stays below the bound, by bisection; 0 if even an idle server exceeds it."""
    low, high = 0.0, saturation(times)
    if mean_ttft(times, 1e-6, unit_gaps) > bound_s:
        return 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_ttft(times, middle, unit_gaps) <= bound_s else (low, middle)
    return low


def measured_ttfts(server: Server, requests: Sequence[Request], arrivals: Sequence[float]) -> list[float]:
    """Measured TTFT of requests that are sent at these times, each on its own thread."""
    began = time.perf_counter()

    def one(request: Request, at: float) -> float:
        return server.serve(request).first_token_at - began - at

    with ThreadPoolExecutor(len(requests)) as pool:
        running = []
        for request, at in zip(requests, arrivals, strict=True):
            time.sleep(max(0.0, began + at - time.perf_counter()))
            running.append(pool.submit(one, request, at))
        return [each.result() for each in running]
