"""What `serving.run` runs about `ragkv serve --engine vllm`: vLLM's own OpenAI server, and ragkv's
in front of it.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from ragkv.model.loading import folder_of
from ragkv.vllm.front.salts import SECRET_VARIABLE
from tests.cluster.servers import free_port

from .scenarios import printed
from .serving import ROOT

START_S = 600.0
ASK = {"collection": "docs", "k": 6, "max_tokens": 24}
_NEVER_ENDS = {"2": -100.0}  # the model's end token
COUNTS = ("exact", "fused", "recomputed", "computed", "missed_chunks")


def asked(folder: Path) -> Any:
    """The same questions to ragkv's own server and to the one in front of vLLM; then vLLM is killed
    in an answer.
    """
    model = folder / "smollm2"
    model.symlink_to(folder_of("smollm2"))
    questions = [
        json.loads(line)["question"] for line in (ROOT / "examples" / "questions.jsonl").open()
    ][:5]
    found: dict[str, Any] = {"questions": len(questions)}
    os.environ[SECRET_VARIABLE] = "of both servers"
    os.environ["RAGKV_SESSION__INEXACT_HISTORY"] = "keep"  # as it is kept inside vLLM
    with _ragkv(folder / "own") as own:
        _fill(own)
        _ask_all(own, questions)
        wanted = {
            ratio: [_ask(own, question, ratio) for question in questions] for ratio in (0.0, 0.15)
        }
        full = [_ask(own, question, reuse="none") for question in questions]
        turns = [_ask(own, question, 0.15, session_id="s") for question in questions]
    url = f"http://127.0.0.1:{free_port()}"
    with _ragkv(folder / "front", "--engine", "vllm", "--vllm-url", url) as front:
        found["ready without vLLM"] = front.get("/readyz").status_code
        _fill(front)
        found["asked without vLLM"] = front.post(
            "/v1/ask", json={**ASK, "question": "Who?"}
        ).status_code
        with _vllm(model, folder / "front", url) as server:
            _wait(lambda: front.get("/readyz").status_code == 200, server)
            _ask_all(front, questions)
            for ratio, answers in wanted.items():
                given = [_ask(front, question, ratio) for question in questions]
                found[f"equal at {ratio}"] = sum(map(_same, given, answers))
                found[f"fused at {ratio}"] = sum(one["reuse"]["fused"] > 0 for one in given)
                found[f"counted at {ratio}"] = sum(map(_counted, given, answers))
            found["differ from full"] = sum(
                not _same(one, other) for one, other in zip(wanted[0.0], full, strict=True)
            )
            found["equal in full"] = sum(
                map(_same, (_ask(front, one, reuse="none") for one in questions), full)
            )
            given = [_ask(front, question, 0.15, session_id="s") for question in questions[:4]]
            found["answers"] = "ragkv_vllm_answers 1.0" in front.get("/metrics").text
            found["killed"] = _killed(front, server, "Go on for long.")
            refused = front.post("/v1/ask", json={**ASK, "question": questions[0]}).json()
            found["asked when killed"] = refused["error"]["code"]
            found["ready when killed"] = front.get("/readyz").status_code
        assert front.post("/v1/sessions/s/fork", json={"to": "t"}).status_code == 201
        with _vllm(model, folder / "front", url) as server:
            _wait(lambda: front.get("/readyz").status_code == 200, server)
            again = _ask(front, questions[4], session_id="t", reuse="none")
            given.append(_ask(front, questions[4], 0.15, session_id="s"))
        found["equal turns"] = sum(map(_same, given, turns))
        found["turns"] = [(one["reuse"]["tokens"], one["reuse"]["computed"]) for one in given]
        found["first token"] = [round(one["timing"]["first_token_s"], 2) for one in (*given, again)]
    return found


@contextmanager
def _ragkv(home: Path, *options: str) -> Iterator[httpx.Client]:
    """A client of a `ragkv serve` in a process of its own."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "ragkv",
        "serve",
        "--home",
        str(home),
        "--model",
        "smollm2",
        "--dtype",
        "float32",
    ]
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300.0, trust_env=False)
    with (
        client,
        _process([*command, "--port", str(port), *options], home.with_suffix(".log")) as process,
    ):
        # In front of a vLLM that is not there it is not ready, and stores documents.
        _wait(lambda: client.get("/v1/collections").status_code == 200, process)
        yield client


@contextmanager
def _vllm(model: Path, home: Path, url: str) -> Iterator["subprocess.Popen[bytes]"]:
    """vLLM's OpenAI server with ragkv's connector."""
    transfer = {
        "kv_connector": "RagKVConnector",
        "kv_connector_module_path": "ragkv.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"home": str(home)},
    }
    options = [
        "--served-model-name",
        "smollm2",
        "--max-model-len",
        "4096",
        "--dtype",
        "float32",
        "--enforce-eager",
    ]
    options += [
        "--distributed-executor-backend",
        "uni",
        "--host",
        "127.0.0.1",
        "--port",
        url.rpartition(":")[2],
    ]
    options += ["--kv-transfer-config", json.dumps(transfer)]
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        *options,
    ]
    with _process(command, home.with_name("vllm.log")) as process:
        yield process


@contextmanager
def _process(command: list[str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process and its children; they are killed at the end."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        )
        process.log = log  # type: ignore[attr-defined]
        try:
            yield process
        finally:
            _kill(process)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)


def _wait(true: Any, process: Any) -> None:
    """Return once `true()` is true; the server may not listen yet."""
    ends = time.monotonic() + START_S
    while True:
        try:
            if true():
                return
        except httpx.TransportError:
            pass
        if process.poll() is not None or time.monotonic() > ends:
            raise AssertionError(process.log.read_text(errors="replace")[-12_000:])
        time.sleep(0.2)


def _fill(client: httpx.Client) -> None:
    """Store the example corpus."""
    files = [
        {"id": path.name, "text": path.read_text()}
        for path in sorted((ROOT / "examples" / "corpus").glob("*.md"))[:3]
    ]
    assert client.post("/v1/collections", json={"name": "docs"}).status_code in (200, 201)
    stored = client.post("/v1/collections/docs/documents", json={"documents": files})
    assert stored.status_code == 201, stored.text


def _ask_all(client: httpx.Client, questions: list[str]) -> None:
    """Ask each question once."""
    for question in questions:
        _ask(client, question)


def _ask(
    client: httpx.Client, question: str, ratio: float | None = None, **body: Any
) -> dict[str, Any]:
    """An answer; a ratio that is not named is the setting's."""
    named = {} if ratio is None else {"ratio": ratio}
    answer = client.post("/v1/ask", json={**ASK, "question": question, **named, **body})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def _counted(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one["reuse"][name] == other["reuse"][name] for name in COUNTS)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        one[name] == other[name] for name in ("answer", "finish_reason", "citations", "sources")
    )


def _killed(client: httpx.Client, server: "subprocess.Popen[bytes]", text: str) -> str:
    """The last data of a long stream whose vLLM is killed after its first token."""
    messages = [{"role": "user", "content": text}]
    body = {
        "model": "smollm2",
        "messages": messages,
        "max_tokens": 400,
        "logit_bias": _NEVER_ENDS,
        "stream": True,
    }
    last = ""
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                last = line
                if '"content":' in line and '"content": ""' not in line and server.poll() is None:
                    _kill(server)
    return last


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        printed({"asked": asked}[sys.argv[1]](Path(made)))
