"""The engine that `ttft.py` measures: SmolLM2, or a real shape with random weights, and entries
that take no time to make.

Entries have random keys and values, and are stored through the store's own API; weights and
values do not change the time. Every chunk is stored as KV made with other RoPE frequencies, so it
is fused at any position and all chunks count in full. The first chunk is also stored as exact KV
right behind the prefix, for the baselines that reuse exact prefixes.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from transformers import DynamicCache

from benchmarks.random_model import SHAPES, put_random_entry, random_model
from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.config import ControllerConfig, RedisConfig, S3Config
from ragkv.model.dtype_choice import faster_dtype
from ragkv.model.loading import DtypeChoice, load
from ragkv.store.tiers import Tier
from tests.store.fakes import store_of

REAL = "smollm2"  # the installed model; other shapes have random weights
MODELS = (REAL, *sorted(SHAPES))
QUESTION_TOKENS = 32
# a real Redis on loopback, and an S3-compatible server from moto, one Python process
REMOTE = ("redis", "s3")
TIERS = ("memory", "disk", *REMOTE)
TIMEOUT_S = 30.0  # of a remote tier: no call may time out here


@dataclass(frozen=True, slots=True)
class Method:
    """A method to compute a prompt's KV and its last logits."""

    name: str
    ratio: float = 1.0

    @property
    def fuses(self) -> bool:
        """Whether the method fuses chunks; the others are baselines."""
        return self.name not in (TRANSFORMERS_FULL, TRANSFORMERS_PREFIX, OUR_FULL, OUR_PREFIX)

    def limit(self, layers: int, length: int) -> float | None:
        """The speedup over a full prefill that the computed rows allow; `None` for a baseline."""
        if not self.fuses:
            return None
        question = QUESTION_TOKENS / length * (2 if self.name == "attention" and self.ratio else 1)
        check = 1 / layers if self.name.startswith("hkvd") and self.ratio else 0.0
        return 1 / (check + self.ratio * (1 - check) + question)


TRANSFORMERS_FULL = "transformers full"
TRANSFORMERS_PREFIX = "transformers exact prefix"
OUR_FULL = "full recompute"
OUR_PREFIX = "exact prefix"


def model_of(
    shape: str,
    device: str,
    longest: int,
    dtype: torch.dtype = torch.bfloat16,
    layers: int | None = None,
) -> Any:
    """One of `MODELS`, with a context of at least `longest` tokens. `layers` is for random ones."""
    if shape == REAL:
        model = load(REAL, device, str(dtype).removeprefix("torch."))[0]
    else:
        model = random_model(shape, dtype, device, layers)
    model.config.max_position_embeddings = max(longest, model.config.max_position_embeddings)
    return model


def auto_dtype(config: Any) -> DtypeChoice:
    """The dtype that "auto" chooses on this processor for a bfloat16 checkpoint with that
    config.
    """
    return faster_dtype(
        config, torch.bfloat16, store_bytes=0, packed_bytes=EngineConfig().packed_bytes
    )


class World:
    """One model, and the entries of `chunks` x `tokens` tokens in one tier."""

    def __init__(
        self,
        model: Any,
        chunks: int,
        tokens: int,
        tier: str,
        directory: str,
        codec: str = "raw",
        wrap: Callable[[Tier], Any] | None = None,
        alike: bool = False,
    ) -> None:
        """`wrap` puts the store's tiers into others. Entries that are `alike` take less time to
        make.
        """
        self.model = model
        self.tier = tier
        self.layers: int = model.config.num_hidden_layers
        generator = torch.Generator().manual_seed(0)

        self.chunks = [_ids(tokens, model, generator) for _ in range(chunks)]
        self.first = _ids(tokens, model, generator)
        self.question = _ids(QUESTION_TOKENS, model, generator)
        self.length = chunks * tokens + QUESTION_TOKENS
        self._open = ExitStack()
        config = EngineConfig(
            store=self._store(chunks, tokens, directory, codec),
            controller=ControllerConfig(measure=False),
            device=str(model.device),
        )
        store = wrap and store_of(config.store, wrap)
        self.engine = self._open.enter_context(Engine(model, config=config, store=store))
        if tier in REMOTE:
            # no measured speeds: it would compute what loads too slowly
            self.engine.parts.store.speeds = dict  # type: ignore[method-assign]
        for chunk in self.chunks:
            put_random_entry(self.engine, chunk, exact=False, alike=alike)
        put_random_entry(self.engine, self.first, exact=True, alike=alike)

    def _store(self, chunks: int, tokens: int, directory: str, codec: str) -> StoreConfig:
        """The settings of a store of one tier that has room for all entries. Starts the server of a
        remote tier.
        """
        size = (chunks + 2) * tokens * self._token_bytes()
        if self.tier == "memory":
            return StoreConfig(memory_bytes=size, codec=codec)
        if self.tier == "disk":
            return StoreConfig(directory, memory_bytes=0, disk_bytes=2 * size, codec=codec)
        from tests.cluster.servers import RedisServer, S3Server, with_credentials

        if self.tier == "redis":
            redis = RedisServer()
            self._open.callback(redis.close)
            return StoreConfig(
                memory_bytes=0, redis=RedisConfig(redis.url, timeout_s=TIMEOUT_S), codec=codec
            )
        with_credentials()
        s3 = S3Server()
        self._open.callback(s3.kill)
        return StoreConfig(
            memory_bytes=0,
            s3=S3Config(s3.BUCKET, endpoint=s3.url, timeout_s=TIMEOUT_S),
            codec=codec,
        )

    def _token_bytes(self) -> int:
        config = self.model.config
        head_dim = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        return (
            self.layers * 2 * config.num_key_value_heads * head_dim * self.model.dtype.itemsize + 2
        )

    def action(self, method: Method) -> Callable[[], Any]:
        """The timed action: a prefill up to the last row's logits."""
        run = self._action(method)
        if self.model.device.type != "cuda":
            return run

        def synchronized() -> Any:
            result = run()
            torch.cuda.synchronize()
            return result

        return synchronized

    def _action(self, method: Method) -> Callable[[], Any]:
        with_exact = [self.first, *self.chunks[1:]]
        if method.name == TRANSFORMERS_FULL:
            whole = self._tensor(with_exact)
            return lambda: self._transformers(whole, DynamicCache())
        if method.name == TRANSFORMERS_PREFIX:
            return self._prefix_action(self._tensor(with_exact))
        if method.name == OUR_FULL:
            return lambda: self.engine.prefill(self.question, with_exact, reuse="none")
        if method.name == OUR_PREFIX:
            return self._own_prefix_action()
        return lambda: self.engine.prefill(
            self.question, self.chunks, ratio=method.ratio, selector=method.name
        )

    def _prefix_action(self, whole: torch.Tensor) -> Callable[[], Any]:
        """transformers' own prefix reuse: the cache has the first chunk, the rest is prefilled
        behind it.
        """
        stop = len(self.first)
        held = DynamicCache()
        self._transformers(whole[:, :stop], held)

        def run() -> Any:
            # a prefill grows its cache, so each run gets a new one over the same tensors
            cache = DynamicCache()
            for layer, kept in enumerate(held.layers):
                cache.update(kept.keys, kept.values, layer)
            return self._transformers(whole[:, stop:], cache)

        return run

    def _own_prefix_action(self) -> Callable[[], Any]:
        """Our prefix caching: an earlier prompt began with the first chunk. What follows is new in
        every run, because the blocks of a run would serve the next one.
        """
        size = 8 * self.length * self._token_bytes()  # a quarter of it is for such blocks
        engine = self._open.enter_context(
            self.engine.with_config(EngineConfig(store=StoreConfig(memory_bytes=size)))
        )
        engine.prefill(self.question, [self.first], reuse="prefix")
        generator = torch.Generator().manual_seed(1)

        def run() -> Any:
            others = [_ids(len(chunk), self.model, generator) for chunk in self.chunks[1:]]
            return engine.prefill(self.question, [self.first, *others], reuse="prefix")

        return run

    def _tensor(self, chunks: list[tuple[int, ...]]) -> torch.Tensor:
        return torch.tensor(
            [[*(i for chunk in chunks for i in chunk), *self.question]], device=self.model.device
        )

    @torch.no_grad()
    def _transformers(self, token_ids: torch.Tensor, cache: DynamicCache) -> Any:
        return self.model(token_ids, past_key_values=cache, logits_to_keep=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()


def _ids(count: int, model: Any, generator: torch.Generator) -> tuple[int, ...]:
    """Random token ids."""
    drawn = torch.randint(3, model.config.vocab_size, (count,), generator=generator)
    return tuple(drawn.tolist())
