"""For `vllm_server.py`: vLLM's OpenAI server in its own process, with or without ragkv's connector, and its clients."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).parents[1]
START_S = 300.0
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class Streamed:
    """One streamed answer."""

    sent_at: float  # by `time.perf_counter`
    tokens_at: tuple[float, ...]  # when each token arrived

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.tokens_at[0] - self.sent_at


class VLLMServer:
    """A running server, and the requests that it is sent."""

    def __init__(self, popen: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
        self._popen, self._log = popen, log
        self.url = f"http://127.0.0.1:{port}"
        ends = time.monotonic() + START_S
        with httpx.Client(trust_env=False) as client:
            while not self._healthy(client):
                if popen.poll() is not None or time.monotonic() > ends:
                    raise RuntimeError(f"vLLM's server did not start:\n{self.log()[-4000:]}")
                time.sleep(0.25)

    def client(self) -> httpx.AsyncClient:
        """A client of the server."""
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, timeout=600.0, trust_env=False, limits=limits)

    async def stream(
        self, client: httpx.AsyncClient, prompt: Sequence[int], max_tokens: int, wish: Mapping[str, Any] | None = None
    ) -> Streamed:
        """Ask for `max_tokens` greedy tokens after the token ids `prompt` (S,)."""
        body: dict[str, Any] = dict(
            model="model", prompt=list(prompt), max_tokens=max_tokens, temperature=0.0, ignore_eos=True, stream=True
        )
        if wish is not None:
            body["kv_transfer_params"] = {"ragkv": dict(wish)}
        arrived = list[float]()
        sent = time.perf_counter()
        async with client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if event.get("choices"):
                        arrived.append(time.perf_counter())
        return Streamed(sent, tuple(arrived))

    def counts(self) -> dict[str, float]:
        """The connector's counts so far, by their names, from the server's metrics: a stream has no report."""
        with httpx.Client(trust_env=False, timeout=60.0) as client:
            text = client.get(f"{self.url}/metrics").text
        found = re.findall(r"^vllm:ragkv_(\w+?)_total\S* (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    def log(self) -> str:
        """What the server has said."""
        return self._log.read_text(errors="replace")

    def _healthy(self, client: httpx.Client) -> bool:
        try:
            return client.get(f"{self.url}/health").status_code == 200
        except httpx.HTTPError:
            return False


@contextmanager
def vllm_server(
    model: Path, port: int, log: Path, threads: int, arguments: Sequence[str], cache_gib: int = 2
) -> Iterator[VLLMServer]:
    """Run a server of `model` and end it. `arguments` are added to its command."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", "float32"]
    command += ["--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port), *arguments]
    own = {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_KVCACHE_SPACE": str(cache_gib), "PYTHONPATH": str(ROOT)}
    with log.open("wb") as file:
        popen = subprocess.Popen(
            command,
            env={**os.environ, **ENVIRONMENT, **own},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield VLLMServer(popen, port, log)
    finally:
        family = (
            [popen_process, *popen_process.children(recursive=True)] if (popen_process := _alive(popen.pid)) else []
        )
        popen.terminate()
        _, left = psutil.wait_procs(family, timeout=30)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _alive(pid: int) -> psutil.Process | None:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid)
    return None


def with_connector(home: Path, **settings: Any) -> list[str]:
    """The arguments that add the connector over the store in `home`."""
    transfer = {
        "kv_connector": "RagKVConnector",
        "kv_connector_module_path": "ragkv.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"home": str(home), **settings},
    }
    return [
        "--no-enable-prefix-caching",
        "--distributed-executor-backend",
        "uni",
        "--kv-transfer-config",
        json.dumps(transfer),
    ]
