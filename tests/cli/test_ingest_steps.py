"""The index first, then KV: what is left is said, kept, and computed when a question needs it."""

import signal
from pathlib import Path
from typing import Any

import pytest

from ragkv.rag import Corpus

from .conftest import Run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_what_is_done_and_the_same_command_goes_on(
    run: Run, documents: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    encode = Corpus.encode
    handler = signal.getsignal(number)

    def interrupted(rag: Corpus, *arguments: Any) -> Any:
        if arguments[0]:  # the documents
            signal.raise_signal(number)
        return encode(rag, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Corpus, "encode", interrupted)
        ran = run("ingest", documents, "--json")
    assert ran.code == 130 and ran.err.count("the same command goes on") == 1
    assert signal.getsignal(number) is handler
    again = run("ingest", documents, "--json").json
    assert (again["counts"]["unchanged"], again["kv"]["encoded"], again["kv"]["left"]) == (2, 2, 0)


def test_chunks_for_which_there_is_no_time_or_room_are_left_and_computed_by_the_first_question(
    run: Run, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = run("ingest", documents, "--minutes", "0")
    assert "KV: 0 passages computed, 0 there already, 2 left (" in ran.out
    assert "by each question" in ran.err
    monkeypatch.setenv("RAGKV_STORE__DISK_BYTES", "100")
    assert run("ingest", documents, "--json").json["kv"]["left"] == 2
    monkeypatch.delenv("RAGKV_STORE__DISK_BYTES")
    assert run("ask", "Who founded Marl?", "--json").json["answer"]["reuse"]["missed_chunks"] == 2
    done = run("ingest", documents, "--json").json["kv"]
    assert (done["encoded"], done["present"], done["left"]) == (0, 2, 0) and done[
        "bytes_per_token"
    ] > 100
