"""For `serve.py`: `ragkv serve` in its own process, its memory and open files, and a model folder for it."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ragkv.model.shapes import random_model

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}> {% endif %}"
)


@dataclass(frozen=True, slots=True)
class Sample:
    """The server process at one moment."""

    at_s: float  # since the start of the measurement
    rss_bytes: int
    files: int  # open
    threads: int


class Server:
    """`ragkv serve` in its own process."""

    def __init__(self, popen: "subprocess.Popen[str]") -> None:
        self._popen = popen
        self.errors = 0  # error lines in its log
        self._port: int | None = None
        self._up = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        if not self._up.wait(300) or self._port is None:
            raise RuntimeError("the server did not come up")
        self.url = f"http://127.0.0.1:{self._port}"
        with self.client() as client:
            while client.get("/readyz").status_code != 200:
                time.sleep(0.1)

    def client(self) -> httpx.Client:
        """A client of the server."""
        return httpx.Client(base_url=self.url, timeout=600.0, trust_env=False)

    def sample(self, began: float) -> Sample:
        """Its memory, open files and threads now."""
        folder = Path(f"/proc/{self._popen.pid}")
        status = (folder / "status").read_text()
        fields = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if len(line.split()) > 1}
        files = sum(1 for _ in (folder / "fd").iterdir())
        return Sample(time.perf_counter() - began, int(fields["VmRSS"]) * 1024, files, int(fields["Threads"]))

    def _read(self) -> None:
        assert self._popen.stderr is not None
        for text in self._popen.stderr:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            self.errors += line.get("level") == "error"
            if line.get("event") == "listening":
                self._port = line["port"]
                self._up.set()
        self._up.set()


@contextmanager
def serving(home: Path, threads: int, settings: Mapping[str, Any]) -> Iterator[Server]:
    """Run a server and end it by SIGTERM. The names in `settings` have `__` between group and setting."""
    given = {f"RAGKV_SERVE__{name.upper()}": str(value) for name, value in settings.items()}
    fixed = {"RAGKV_SERVE__LOG__FORMAT": "json", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "ragkv", "serve", "--home", str(home), "--port", "0"]
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root), **fixed, **given}
    popen = subprocess.Popen(command, env=environment, cwd=root, stderr=subprocess.PIPE, text=True)
    try:
        yield Server(popen)
    finally:
        popen.terminate()
        try:
            popen.wait(60)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()


def talker(shape: str, folder: Path, dtype: torch.dtype = torch.bfloat16, layers: int | None = None) -> Path:
    """Write a model folder of that shape: random weights, and a tokenizer with a text for every id."""
    model = random_model(shape, dtype, layers=layers)
    model.save_pretrained(folder)
    _tokenizer(model.config.vocab_size).save_pretrained(folder)
    return folder


def _tokenizer(size: int) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<pad>", "<s>", "</s>", *alphabet]
    words += [f"\u0120w{number}" for number in range(size - len(words))]  # random weights mostly generate these
    backend = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    made.chat_template = TEMPLATE
    return made
