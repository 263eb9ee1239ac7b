"""The two sides that `llamacpp.py` compares, each in a process of its own, so that their OpenMP threads do not mix.

A side computes with the weights of one file: `Ours` loads a checkpoint of transformers, `LlamaCpp` a GGUF file by
llama-cpp-python's low-level functions, which are llama.cpp's own. `Remote` runs a side in a new process.
"""

import ctypes
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from benchmarks.ttft_world import OUR_FULL, Method, World, auto_dtype
from ragkv.model import loading
from ragkv.model.decode.batching import DecodeRow, decode_rows

STEPS = 16  # tokens of one measured decoding
FIRST_STEP_ID = 5


class Ours:
    """ragkv with one dtype and kind of weights; entries are in memory, and each chunk is fused."""

    def __init__(self, folder: Path, dtype: str, weights: str, chunks: int, tokens: int) -> None:
        loading.quiet_transformers()
        config = loading.config_of(folder)
        chosen = auto_dtype(config).name if dtype == "auto" else dtype
        model, _ = loading.load(folder, "cpu", chosen, weights=weights)
        self.name = f"ragkv {chosen}" if weights == "plain" else f"ragkv {weights} ({chosen})"
        self._nowhere = tempfile.TemporaryDirectory()
        self._world = World(model, chunks, tokens, "memory", self._nowhere.name)
        self._contexts: dict[int, Any] = {}

    def threads(self, count: int) -> None:
        """Compute with so many threads from now on."""
        torch.set_num_threads(count)

    def full(self) -> None:
        """Prefill the whole prompt up to its last logits."""
        self._world.action(Method(OUR_FULL))()

    def warm(self, ratio: float) -> None:
        """Fuse the stored chunks, and compute the question, up to the last logits."""
        self._world.action(Method("sensitivity", ratio))()

    def decode(self, chunks: int) -> None:
        """Decode `STEPS` tokens behind so many chunks and the question."""
        adapter = self._world.engine.parts.adapter
        if chunks not in self._contexts:
            asked = self._world.chunks[:chunks]
            fused = self._world.engine.prefill(self._world.question, asked, ratio=0.0, selector="none").fused
            fused.kv.reserve(fused.kv.length + STEPS)
            self._contexts[chunks] = (fused.kv, fused.kv.length)
        kv, start = self._contexts[chunks]
        for step in range(STEPS):
            decode_rows(adapter, [DecodeRow(kv, token=FIRST_STEP_ID + step)]).argmax()
        kv.length = start

    def logits(self, ids: Sequence[int]) -> list[float]:
        """The next token's logits behind `ids`, computed in full."""
        return [float(value) for value in self._world.engine.prefill(ids, reuse="none").logits]


class LlamaCpp:
    """llama.cpp with its defaults (micro-batches of 512 rows, KV in f16)."""

    def __init__(self, file: Path, chunks: int, tokens: int, question: int, vocabulary: int) -> None:
        import llama_cpp

        self.name = f"llama.cpp {file.stem}"
        self._api, self._vocabulary, self._threads = llama_cpp, vocabulary, 1
        self._silence = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {file}.")
        self._tokens, self._question = tokens, question
        self._ids = torch.randint(3, vocabulary, (chunks * tokens + question,)).tolist()
        self._prompt = self._context(len(self._ids))
        self._decoding: dict[int, Any] = {}

    def _context(self, length: int) -> Any:
        settings = self._api.llama_context_default_params()
        settings.n_ctx = settings.n_batch = length + STEPS
        context = self._api.llama_init_from_model(self._model, settings)
        if not context:
            raise RuntimeError(f"llama.cpp cannot make a context of {length + STEPS} tokens.")
        self._api.llama_set_n_threads(context, self._threads, self._threads)
        return context

    def _compute(self, context: Any, ids: Sequence[int]) -> None:
        """Compute `ids` behind what the context has; only the last one gets logits."""
        array = (self._api.llama_token * len(ids))(*ids)
        if code := self._api.llama_decode(context, self._api.llama_batch_get_one(array, len(ids))):
            raise RuntimeError(f"llama.cpp's llama_decode of {len(ids)} tokens ended with {code}.")
        self._api.llama_synchronize(context)

    def _forget(self, context: Any, start: int) -> None:
        self._api.llama_memory_seq_rm(self._api.llama_get_memory(context), 0, start, -1)

    def threads(self, count: int) -> None:
        """Compute with so many threads from now on."""
        self._threads = count
        for context in (self._prompt, *self._decoding.values()):
            self._api.llama_set_n_threads(context, count, count)

    def full(self) -> None:
        """Prefill the whole prompt up to its last logits."""
        self._forget(self._prompt, 0)
        self._compute(self._prompt, self._ids)

    def decode(self, chunks: int) -> None:
        """Decode `STEPS` tokens behind so many chunks and the question."""
        start = chunks * self._tokens + self._question
        if chunks not in self._decoding:
            self._decoding[chunks] = self._context(start)
            self._compute(self._decoding[chunks], self._ids[:start])
        context = self._decoding[chunks]
        self._forget(context, start)
        for step in range(STEPS):
            self._compute(context, [FIRST_STEP_ID + step])
            self._logits(context).argmax()

    def logits(self, ids: Sequence[int]) -> list[float]:
        """The next token's logits behind `ids`."""
        self._forget(self._prompt, 0)
        self._compute(self._prompt, ids)
        return [float(value) for value in self._logits(self._prompt)]

    def _logits(self, context: Any) -> torch.Tensor:
        pointer = self._api.llama_get_logits_ith(context, -1)
        values = (ctypes.c_float * self._vocabulary).from_address(ctypes.addressof(pointer.contents))
        return torch.frombuffer(values, dtype=torch.float32)


class Remote:
    """A side in a process of its own; a call returns when the side has finished it."""

    def __init__(self, kind: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, kind, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self.used_s = 0.0  # processor time of all calls
        self.name: str = self._result()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the side; raises `RuntimeError` with the reason if it failed or the process has ended."""
        self._pipe.send((method, arguments))
        return self._result()

    def _result(self) -> Any:
        try:
            ok, result, used_s = self._pipe.recv()
        except EOFError as error:
            raise RuntimeError("The process of one side has ended; its messages are above.") from error
        if not ok:
            raise RuntimeError(result)
        self.used_s += used_s
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()
        self._process.join(timeout=10)
        self._process.kill()


def _serve(pipe: Connection, kind: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        side = kind(*arguments)
        pipe.send((True, side.name, 0.0))
        while True:
            method, values = pipe.recv()
            began = time.process_time()
            result = getattr(side, method)(*values)
            pipe.send((True, result, time.process_time() - began))
    except EOFError:
        return  # the benchmark has finished
    except Exception as error:
        pipe.send((False, f"{type(error).__name__}: {error}", 0.0))
