"""What a new user meets: errors that are said before the model is loaded, and their causes."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ragkv.cli import output
from ragkv.cli.serve import listening
from ragkv.errors import ConfigError
from ragkv.retrieval import Hit, Passage
from ragkv.runtime import server_file
from ragkv.store.writer_lock import acquire
from ragkv.types import Answer, Citation, Reuse, Timing

from .conftest import Run


@pytest.mark.enable_socket
def test_a_port_in_use_is_said_before_the_model_is_loaded() -> None:
    with listening("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"Port {port} of 127\.0\.0\.1 is in use.*--port"):
            listening("127.0.0.1", port)
    listening("127.0.0.1", port).close()
    with pytest.raises(ConfigError, match=r"Cannot listen on 203\.0\.113\.1, port 9"):
        listening("203.0.113.1", 9)


@pytest.mark.enable_socket
def test_a_server_beside_another_one_says_so_at_once(
    run: Run, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("ingest", documents, "--minutes", "0").code == 0
    address = server_file.ServerAddress.of_this_process("127.0.0.1", 4711, "m", "word")
    monkeypatch.setattr("ragkv.cli.running_server.is_ready", lambda _: False)
    monkeypatch.setattr("ragkv.cli.serve._run", lambda *_: pytest.fail("it would serve"))
    with server_file.announced(tmp_path / "home", address):
        ran = run("serve", "--port", "0")
    assert ran.code == 1 and f"at http://127.0.0.1:4711 (pid {os.getpid()})" in ran.err
    assert f"kill {os.getpid()}" in ran.err and "--home" in ran.err


@pytest.mark.enable_socket
def test_a_server_beside_an_ingest_says_that_it_waits(
    run: Run, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("ingest", documents, "--minutes", "0").code == 0
    served = list[int]()

    def serve(*given: Any) -> None:
        listener = given[-1]
        served.append(listener.getsockname()[1])
        listener.close()

    monkeypatch.setattr("ragkv.cli.serve._run", serve)
    lock = acquire(tmp_path / "home" / "kv")
    ran = run("serve", "--port", "0")
    lock.release()
    assert (ran.code, len(served)) == (0, 1) and "questions are refused (503) until" in ran.err


def test_a_question_needs_no_quotes(run: Run, documents: Path) -> None:
    assert run("ingest", documents, "--minutes", "0").code == 0
    asked = run("ask", "who", "founded", "Marl", "--json", "--max-new-tokens", "2")
    assert asked.json["question"] == "who founded Marl", asked.err


@pytest.mark.parametrize(
    "command",
    [("ask", "who"), ("search", "who"), ("docs", "list"), ("keys", "list"), ("ingest", "."), ("gc",),
     ("doctor",), ("serve",), ("chat",)],
)  # fmt: skip
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("RAGKV_FUSION__RATOI", "Did you mean RAGKV_FUSION__RATIO?"),
        ("RAGKV_HOEM", "Did you mean RAGKV_HOME?"),
        ("RAGKV_SERVE__LIMITS__DOCUMNETS", "Did you mean RAGKV_SERVE__LIMITS__DOCUMENTS?"),
        ("RAGKV_STORE__READER_THREADS", "store.reader_threads is not a setting"),
    ],
)
def test_an_unknown_variable_is_named_by_every_command(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], name: str, meant: str
) -> None:
    monkeypatch.setenv(name, "1")
    ran = run(*command)
    assert ran.code == 1 and meant in ran.err
    assert run(*command, "--help").code == 0


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("chunk_tokens", 0, "home.json"),
        ("chunk_tokens", -256, "chunk_tokens = -256"),
        ("settings", {"store.codec": "int9"}, "home.json: store.codec is 'int9'"),
        ("settings", {"fusion.stored_kv": "some"}, "home.json: fusion.stored_kv is 'some'"),
    ],
)
def test_a_wrong_value_of_a_home_is_told_with_its_file(
    run: Run, documents: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    name: str, value: object, said: str,
) -> None:  # fmt: skip
    assert run("ingest", documents, "--minutes", "0").code == 0
    file = tmp_path / "home" / "home.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    ran = run("ask", "who")
    assert ran.code == 1 and "home.json" in ran.err and said in ran.err + caplog.text


def test_sources_are_listed_with_the_best_first(capsys: pytest.CaptureFixture[str]) -> None:
    hits = [Hit(Passage(f"p{n}", f"d{n}", "x", (0, 1)), 1 / n, n) for n in (3, 1, 2)]
    timing = Timing(0.0, 0.0, 0.0)
    answer = Answer("Yes [1].", (), "stop", timing, Reuse(), (Citation(0, 4, 7, "d3"),), ())
    output.print_sources(hits, answer)
    assert capsys.readouterr().out.splitlines() == [
        "   [2] d1 (characters 0-1)",
        "   [3] d2 (characters 0-1)",
        " * [1] d3 (characters 0-1)",
    ]


def test_an_empty_folder_is_said_before_the_model_is_loaded(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty" / "inner").mkdir(parents=True)
    ran = run("ingest", tmp_path / "empty", "--model", "/nowhere/model")
    assert ran.code == 1 and "is an empty folder" in ran.err


def test_doctor_fails_on_a_damaged_index(run: Run, documents: Path, tmp_path: Path) -> None:
    assert run("ingest", documents, "--minutes", "0").code == 0
    assert run("doctor").code == 0
    index = tmp_path / "home" / "index" / "index.sqlite"
    index.write_bytes(b"damaged" * 999)
    ran = run("doctor")
    assert ran.code == 1 and "ingest again" in ran.out.split("\n1. ")[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model", "no/where/model"), "No model folder at no/where/model"),
        (("--model", "folder"), "has no config.json and no GGUF file"),
        (("--model", "noise.gguf"), "is no GGUF file: it begins with b'nois'. It has 8 bytes"),
        (("--encoding", "klingon"), "unknown encoding 'klingon'"),
    ],
)
def test_a_wrong_name_is_said_before_anything_is_loaded(
    run: Run, documents: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(documents)
    Path("noise.gguf").write_bytes(b"noisenoi")
    Path("folder").mkdir()
    monkeypatch.delenv("RAGKV_MODEL")
    monkeypatch.setattr(
        "ragkv.engine.Engine.from_pretrained", lambda *_, **__: pytest.fail("it loads")
    )
    ran = run("ingest", documents / "marl.md", *options)
    assert ran.code == 1 and said in ran.err


def test_passages_of_no_tokens_are_refused(run: Run, documents: Path) -> None:
    assert run("ingest", documents, "--chunk-tokens", "0").code == 2


def test_a_search_needs_no_quotes(run: Run, documents: Path) -> None:
    assert run("ingest", documents, "--minutes", "0").code == 0
    assert run("search", "mill", "makes", "paper", "--json").json["query"] == "mill makes paper"


def test_where_all_files_fail_the_first_reason_is_said(run: Run, documents: Path) -> None:
    for file in documents.iterdir():
        file.write_bytes(b"\xff\xfa bytes")
    ran = run("ingest", documents, "--minutes", "0")
    assert ran.code == 1 and "marl.md is not utf-8" in ran.err and "1 more file failed" in ran.err


def test_files_that_are_all_gone_are_told(run: Run, documents: Path, tmp_path: Path) -> None:
    assert run("ingest", documents, "--minutes", "0").code == 0
    documents.rename(tmp_path / "away")
    ran = run("ingest", documents, "--minutes", "0")
    assert ran.code == 1 and "no such file" in ran.err and "--prune" in ran.err
    assert "2 deleted" in run("ingest", documents, "--prune", "--minutes", "0").out
