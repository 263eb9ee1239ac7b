"""`ragkv ask` on a home that `ragkv serve` has: the server answers, or the home is read as without
a server.
"""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragkv.runtime import server_file
from tests.api.serving import Process, process

from .conftest import CommandResult, Run
from .test_two_processes import DRIVER

pytestmark = [pytest.mark.enable_socket, pytest.mark.timeout(600)]
QUESTION = "Who founded Marl?"


@pytest.fixture
def server(run: Run, documents: Path) -> Iterator[Process]:
    pytest.importorskip("fastapi", reason="needs fastapi (extra api)")
    assert run("ingest", documents).code == 0
    command = [sys.executable, "-c", DRIVER, "serve", "--port", "0"]
    # as in this process: see tests/conftest.py
    with process(command, {"RAGKV_FUSION__FLOOR_TOKENS": "0"}) as served:
        served.wait_ready()
        yield served


def ask(run: Run, *more: str) -> CommandResult:
    ran = run("ask", QUESTION, "--max-new-tokens", "2", *more)
    assert ran.code == 0, ran.err
    return ran


def shape(value: Any) -> Any:
    """The names of a JSON value, without its leaves."""
    if isinstance(value, dict):
        return {
            name: shape(one)
            for name, one in value.items()
            if name not in ("metadata", "bytes_by_tier")
        }
    return (
        [shape(value[0])]
        if isinstance(value, list) and value and isinstance(value[0], dict)
        else None
    )


def test_the_server_of_a_home_answers_where_it_may_and_else_the_home_is_read(
    server: Process, run: Run, tmp_path: Path
) -> None:
    served = ask(run)
    said = f"the server at {server.url} (pid {server.popen.pid}), which has this home, answered"
    assert said in served.err and served.err.count("\n") == 1
    assert "marl.md" in served.out and "first token" in served.out
    by_server = ask(run, "--json").json
    check_a_chat_by_the_server(run, server)
    check_an_ingest_beside_the_server(run, server, tmp_path / "docs")
    check_what_the_server_is_not_asked(run)
    check_a_server_with_keys(run, tmp_path / "home")
    server.signal(signal.SIGKILL)
    server.ended()
    alone = ask(run, "--json")
    assert alone.err == "" and (tmp_path / "home" / "server.json").exists()
    assert shape(by_server) == shape(alone.json)
    for found in (by_server, alone.json):
        assert (
            sum(
                found["answer"]["reuse"][name]
                for name in ("exact", "fused", "recomputed", "computed")
            )
            > 20
        )
    assert by_server["answer"]["text"] == alone.json["answer"]["text"]
    assert [one["passage"]["text"] for one in by_server["hits"]] == [
        one["passage"]["text"] for one in alone.json["hits"]
    ]
    assert [one["rank"] for one in by_server["hits"]] == [one["rank"] for one in alone.json["hits"]]


def check_a_chat_by_the_server(run: Run, server: Process) -> None:
    """A named conversation stays, and one without a name is deleted at the end."""
    with pytest.MonkeyPatch.context() as patch:
        for turns, lines in ((0, "who ?\nwhat ?\n"), (2, "/reset\nwho ?\n/quit\nwhat ?\n")):
            patch.setattr("sys.stdin", io.StringIO(lines))
            ran = run("chat", "--session", "mine", "--max-new-tokens", "2")
            assert ran.code == 0 and f"(pid {server.popen.pid}), which has this home" in ran.err
            assert ("2 turns so far" in ran.out) == bool(turns)
            assert ran.out.count("first token") == 2 - turns // 2
        patch.setattr("sys.stdin", io.StringIO("who ?\n"))
        assert run("chat", "--max-new-tokens", "2").code == 0
    with server.client() as client:
        listed = client.get("/v1/sessions").json()["data"]
    assert [(one["id"], one["turns"]) for one in listed] == [("mine", 1)]


def check_an_ingest_beside_the_server(run: Run, server: Process, documents: Path) -> None:
    """The server finds at once what is ingested while it runs."""
    added = documents / "rope.txt"
    added.write_text("The rope of the town was founded in paper by Quill.\n")
    ran = run("ingest", documents)
    assert ran.code == 0 and "1 added" in ran.out, ran.err
    assert f"the server at {server.url}" in ran.err
    body = {"query": "rope", "retriever": "bm25"}

    def found() -> Any:
        with server.client() as client:
            return client.post("/v1/collections/default/search", json=body).json()["hits"]

    assert found()[0]["document_id"].endswith("rope.txt")
    added.unlink()
    pruned = run("ingest", documents, "--prune")
    assert pruned.code == 0 and "the KV of 1 passage" in pruned.err
    assert found() == []


def check_what_the_server_is_not_asked(run: Run) -> None:
    """For another dtype and at a temperature the command reads the home itself."""
    for option in (("--dtype", "float32"), ("--temperature", "0.5")):
        ran = ask(run, *option)
        assert "writes to" in ran.err and "answered" not in ran.err


def check_a_server_with_keys(run: Run, home: Path) -> None:
    """A key has documents of its own, so a server that needs one is not asked with one."""
    assert run("keys", "add", "ada", "--home", home).code == 0
    ran = ask(run)
    assert (
        "does not answer this question: This server requires a key" in ran.err
        and "writes to" in ran.err
    )


def test_an_answer_of_the_server_is_read_without_loading_torch() -> None:
    source = dict(
        document_id="a", text="b", start=0, end=1, source="c", title=None, page=2, score=1.0
    )
    span = {
        "kind": "chunk",
        "start": 0,
        "tokens": 3,
        "state": "exact",
        "recomputed_at": [],
        "number": 1,
        "why": None,
    }
    found = {
        "answer": "b",
        "finish_reason": "stop",
        "sources": [source],
        "citations": [{"number": 1, "start": 0, "end": 1}],
        "prompt": [span],
        "timing": {"first_token_s": 0.1},
        "reuse": {"exact": 3, "tokens": 3, "notes": ["x"], "decision": []},
    }
    code = f"""
import sys
import time
from ragkv.cli import output, running_server
served = running_server.served_answer({found!r})
assert output.place(served.hits[0].passage) == "c (page 2)" and served.answer.reuse.notes == ("x",)
assert served.answer.citations[0].chunk == 0 and served.answer.spans[0].chunk == 0
assert "torch" not in sys.modules and "ragkv.rag" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_another_process_at_the_address_of_a_server_is_not_asked(
    run: Run, documents: Path, tmp_path: Path
) -> None:
    run("ingest", documents)
    with process([sys.executable, "-m", "tests.api.serving", str(tmp_path / "other")]) as other:
        address = json.loads((tmp_path / "other" / "server.json").read_text())
        address |= {"replica": "calm-heron", "model": os.environ["RAGKV_MODEL"]}
        (tmp_path / "home" / "server.json").write_text(json.dumps(address))
        ran = ask(run)
        assert (
            f"the server at {other.url} does not answer this question: another process listens "
            "there" in ran.err
        )
        other.signal(signal.SIGTERM)
        assert other.ended() == 0 and not (tmp_path / "other" / "server.json").exists()


def test_a_kept_server_answers_the_next_question_and_ends_when_it_is_idle(
    run: Run, documents: Path, tmp_path: Path
) -> None:
    pytest.importorskip("fastapi", reason="needs fastapi (extra api)")
    run("ingest", documents)
    first = ask(run, "--keep", "20s")
    address = server_file.load(tmp_path / "home")
    assert (
        address is not None
        and "keeps the model" in first.err
        and f"(pid {address.pid})" in first.err
    )
    assert f"(pid {address.pid})" in ask(run, "--keep", "20s").err
    assert "marl.md" in run("search", QUESTION).out
    while (tmp_path / "home" / "server.json").exists():
        time.sleep(0.1)
    assert "ended" not in (tmp_path / "home" / "server.log").read_text()


@pytest.mark.parametrize(
    "option", [("--dtype", "float32"), ("--temperature", "0.5"), ("--keep", "soon")]
)
def test_a_server_is_not_kept_for_what_it_could_not_answer(
    run: Run, documents: Path, option: tuple[str, str]
) -> None:
    run("ingest", documents)
    ran = run("ask", QUESTION, "--keep", "20s", *option)
    assert ran.code == 1 and ("--keep starts a server" in ran.err or "no time" in ran.err)
