"""What a new user meets: errors that are said before the model is loaded, and their causes."""

import socket
from pathlib import Path

import pytest

from ragkv.cli.serve import check_free
from ragkv.errors import ConfigError

from .conftest import Run


@pytest.mark.enable_socket
def test_a_port_in_use_is_said_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"Port {port} of 127\.0\.0\.1 is in use.*--port"):
            check_free("127.0.0.1", port)
    check_free("127.0.0.1", port)


def test_a_question_needs_no_quotes(run: Run, documents: Path) -> None:
    assert run("ingest", documents, "--minutes", "0").code == 0
    asked = run("ask", "who", "founded", "Marl", "--json", "--max-new-tokens", "2")
    assert asked.json["question"] == "who founded Marl", asked.err


def test_an_unknown_variable_is_named_whoever_answers(
    run: Run, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("ingest", documents, "--minutes", "0").code == 0
    monkeypatch.setenv("RAGKV_FUSION__RATOI", "1")
    ran = run("ask", "who")
    assert ran.code == 1 and "RAGKV_FUSION__RATOI. Did you mean RAGKV_FUSION__RATIO?" in ran.err


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
