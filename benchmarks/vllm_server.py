"""vLLM's OpenAI server with ragkv's connector against vLLM alone, in the same run, on a CPU.

    python -m benchmarks.vllm_server [--quick] [--threads 2] [--layers 24] [--model smollm2]

It runs in vLLM's environment (`make test-vllm` sets it up). Both servers run all the time and take
turns, so noise hits both alike. They run as people run them: with prefix caching, in bfloat16,
compiled. Where vLLM does not start so, it runs eagerly, and the table says it. Prompts are the BOS
token, 6 of 12 chunks of 512 tokens in random order and 16 other tokens in front and behind, all
sent as token ids. Entries are random, and weights without --model, which changes no time; every
chunk is fused, none is exact. The tables have seconds from sending a request of one token to its
answer, medians of requests in random order, and requests a second of 8 clients with answers of 16
tokens.
"""

import argparse
import importlib.util
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks import report

ROOT = Path(__file__).parents[1]
START_S = 300.0
TEXT_TOKENS = 16  # in front and behind: so no prompt finds another's blocks in vLLM's prefix cache
CORPUS = 12  # chunks that are stored
# requests without a salt
ALONE = "vLLM alone"
PLAIN = "with ragkv, plain"
RATIOS = {"fused, ratio .15": 0.15, "fused, ratio .05": 0.05, "reuse alone": 0.0}
BASE_PORT = 18710
CLIENTS = 8
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


class VLLMServer:
    """A running server, and the requests that it is sent."""

    def __init__(self, popen: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
        self._client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=600.0, trust_env=False
        )
        ends = time.monotonic() + START_S
        while not self._healthy():
            if popen.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"vLLM's server did not start:\n{_reasons(log)}")
            time.sleep(0.25)

    def answer(
        self, prompt: Sequence[int], wish: Mapping[str, Any] | None = None, tokens: int = 1
    ) -> tuple[float, dict[str, Any]]:
        """Seconds of a request of `tokens` after the token ids `prompt` (S,), and the connector's
        report of it.

        `wish` is the connector's. The request is not streamed: vLLM leaves the report out of
        streams.
        """
        body: dict[str, Any] = {
            "model": "model",
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0.0,
        }
        if wish is not None:
            body |= {"kv_transfer_params": {"ragkv": dict(wish)}, "cache_salt": uuid.uuid4().hex}
        sent = time.perf_counter()
        response = self._client.post("/v1/completions", json={**body, "ignore_eos": True})
        took_s = time.perf_counter() - sent
        response.raise_for_status()
        return took_s, dict((response.json().get("kv_transfer_params") or {}).get("ragkv", {}))

    def _healthy(self) -> bool:
        try:
            return self._client.get("/health").status_code == 200
        except httpx.HTTPError:
            return False


@dataclass(frozen=True, slots=True)
class Prompts:
    """Makes prompts of stored chunks."""

    prefix: tuple[int, ...]  # what stands before the first chunk
    corpus: tuple[tuple[int, ...], ...]
    chunks: int  # of each prompt
    vocabulary: int

    def make(self, seed: int) -> list[int]:
        """Token ids (S,) of prompt number `seed`."""
        chance = random.Random(seed)
        chosen = chance.sample(self.corpus, self.chunks)
        front, behind = (
            [chance.randrange(300, self.vocabulary) for _ in range(TEXT_TOKENS)] for _ in range(2)
        )
        return [*self.prefix, *front, *(token for chunk in chosen for token in chunk), *behind]


def main() -> None:
    options = _options()
    if importlib.util.find_spec("vllm") is None:
        report.skip("vLLM is not installed here; `make test-vllm` sets an environment up.")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = folder / "model"
        prompts = _prepare(folder, options)
        longest = ["--max-model-len", str(options.chunks * options.tokens + 1024)]
        how = ["--dtype", options.dtype, *longest, *options.vllm]
        extra: dict[str, Any] = {"home": str(folder / "home")}
        if options.packed_bytes is not None:
            extra["packed_bytes"] = options.packed_bytes
        servers = ((BASE_PORT, []), (BASE_PORT + 1, _with_connector(extra)))

        def started(arguments: Sequence[str]) -> list[VLLMServer]:
            with ExitStack() as starting:
                found = [
                    starting.enter_context(
                        _vllm_server(
                            model,
                            port,
                            folder / f"log-{port}",
                            options.threads,
                            [*arguments, *more],
                        )
                    )
                    for port, more in servers
                ]
                stack.enter_context(starting.pop_all())
                return found

        mode = "compiled"
        try:
            alone, ragkv = started(how)
        except RuntimeError as error:
            print(f"vLLM does not start compiled, so it runs eagerly: {error}", file=sys.stderr)
            mode = "eager"
            alone, ragkv = started([*how, "--enforce-eager"])
        rows = _first(alone, ragkv, prompts, options)
        rates = _rates(alone, ragkv, prompts, options) if options.requests else []
        named = options.model or options.shape
        where = f"{named}, {options.dtype}, {mode}, {options.threads} threads"
        size = f"{options.chunks} x {options.tokens} + {2 * TEXT_TOKENS} tokens"
        print(
            f"\n{where}, {size}, {report.machine()['cpu']}, load "
            f"{report.machine()['load_before']:.1f}"
        )
        for table in filter(None, (rows, rates)):
            report.table(tuple(table[0]), [tuple(row.values()) for row in table])
        print(
            "written:",
            report.save(f"vllm-server-{options.model or options.shape}", [*rows, *rates]),
        )


def _reasons(log: Path) -> str:
    """The errors that a server logged, the first ones first: the last ones only say "see above"."""
    lines = log.read_text(errors="replace").splitlines()
    named = [line for line in lines if re.search(r"\b\w+(Error|Exception): ", line)]
    return "\n".join(named[:10] or lines[-40:])


@contextmanager
def _vllm_server(
    model: Path, port: int, log: Path, threads: int, arguments: Sequence[str]
) -> Iterator[VLLMServer]:
    """Run a server of `model` and end it. `arguments` are added to its command."""
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
    ]
    command += [
        "--served-model-name",
        "model",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        *arguments,
    ]
    own = {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_KVCACHE_SPACE": "2", "PYTHONPATH": str(ROOT)}
    environment = {**os.environ, **ENVIRONMENT, **own}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield VLLMServer(process, port, log)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # vLLM has children
        process.wait()


def _with_connector(extra: Mapping[str, Any]) -> list[str]:
    """The arguments that add the connector with these settings."""
    transfer = {
        "kv_connector": "RagKVConnector",
        "kv_connector_module_path": "ragkv.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(extra),
    }
    return ["--distributed-executor-backend", "uni", "--kv-transfer-config", json.dumps(transfer)]


def _prepare(folder: Path, options: argparse.Namespace) -> Prompts:
    """Save the model, and store random entries for the chunks."""
    import torch

    from benchmarks.random_model import put_random_entry, talker
    from ragkv import Engine, EngineConfig, StoreConfig
    from ragkv.model.loading import folder_of

    if options.model:
        (folder / "model").symlink_to(folder_of(options.model))
    else:
        talker(options.shape, folder / "model", getattr(torch, options.dtype), options.layers)
    store = StoreConfig(directory=str(folder / "home" / "kv"))
    config = EngineConfig(store=store, dtype=options.dtype, packed_bytes=0)
    with Engine.from_pretrained(folder / "model", config) as engine:
        chance = random.Random(1)
        vocabulary = engine.model.adapter.vocabulary
        corpus = tuple(
            tuple(chance.randrange(300, vocabulary) for _ in range(options.tokens))
            for _ in range(CORPUS)
        )
        for chunk in corpus:
            put_random_entry(engine, chunk, exact=False)
        return Prompts(
            tuple(engine.parts.intake.runs.before_documents), corpus, options.chunks, vocabulary
        )


def _first(
    alone: VLLMServer, ragkv: VLLMServer, prompts: Prompts, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Medians of the first token's time without the first round. Raises `RuntimeError` if a prompt
    was not fused.
    """
    wishes: dict[str, Mapping[str, Any] | None] = {
        name: {"ratio": ratio} for name, ratio in RATIOS.items()
    }
    wishes |= {ALONE: None, PLAIN: None, "with ragkv, exact": {"reuse": "none"}}
    taken: dict[str, list[float]] = {name: [] for name in wishes}
    inside: dict[str, list[float]] = {name: [] for name in RATIOS}
    for round_ in range(options.runs + 1):
        for number, name in enumerate(random.Random(round_).sample(list(taken), len(taken))):
            prompt = prompts.make(100 * round_ + number)
            took_s, told = (alone if name == ALONE else ragkv).answer(prompt, wishes[name])
            if bool(told.get("reuse", {}).get("fused")) != (name in inside):
                raise RuntimeError(
                    f"{name}: the prompt was fused where it should not be, or the reverse: {told}"
                )
            if round_:
                taken[name].append(took_s)
            if round_ and name in inside:
                inside[name].append(told["timing"]["prefill_s"])
        print(f"round {round_} of {options.runs}", file=sys.stderr, flush=True)
    full = statistics.median(taken[ALONE])
    return [
        {
            "method": name,
            "first token s": statistics.median(values),
            "of it fusing": f"{statistics.median(inside[name]):.3f}" if name in inside else "-",
            "times sooner": f"{full / statistics.median(values):.2f}x",
        }
        for name, values in taken.items()
    ]


def _rates(
    alone: VLLMServer, ragkv: VLLMServer, prompts: Prompts, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Requests a second of clients that each send one after another, in turns."""
    rates: dict[str, list[float]] = {ALONE: [], PLAIN: [], "fused, ratio .15": []}
    for round_ in range(options.runs):
        for name in rates:
            wish = {"ratio": RATIOS[name]} if name in RATIOS else None
            server = alone if name == ALONE else ragkv
            began = time.perf_counter()
            seeds = [9000 + 100 * round_ + 10 * len(name) + one for one in range(options.requests)]
            with ThreadPoolExecutor(CLIENTS) as clients:
                list(
                    clients.map(
                        lambda seed, s=server, w=wish: s.answer(prompts.make(seed), w, 16), seeds
                    )
                )
            rates[name].append(len(seeds) / (time.perf_counter() - began))
        print(f"rates {round_ + 1} of {options.runs}", file=sys.stderr, flush=True)
    return [
        {"method": name, "requests a second": statistics.median(values)}
        for name, values in rates.items()
    ]


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, quick="4 layers", threads=2, runs=5)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--model", help="in place of random weights of a shape")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=512, help="of each chunk")
    parser.add_argument(
        "--requests",
        type=int,
        default=2 * CLIENTS,
        help="of all clients, for requests a second; 0: these are not measured",
    )
    parser.add_argument(
        "--packed-bytes", type=int, help="of ragkv's copies of weights; by default the connector's"
    )
    parser.add_argument("--vllm", nargs="*", default=[], help="further arguments for both servers")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    options = parser.parse_args()
    if options.quick:
        options.layers = 4
        options.runs = 3
    return options


if __name__ == "__main__":
    main()
