"""Results, output and errors of the commands."""

import json
from pathlib import Path

import pytest

from ragkv.config import StoreConfig
from ragkv.rag import Rag
from ragkv.store.opening import open_store

from .conftest import Run


def entries(home: Path) -> int:
    with open_store(
        StoreConfig(directory=str(home / "kv"), memory_bytes=0, read_only=True)
    ) as store:
        return len(list(store.contents.infos()))


def test_ask_after_ingest_prints_answer_sources_and_reuse(
    run: Run, documents: Path, tmp_path: Path
) -> None:
    done = run("ingest", documents)
    assert done.code == 0, done.err
    assert "2 added" in done.out
    assert "KV: 2 passages computed" in done.out
    assert entries(tmp_path / "home") == 2
    answered = run("ask", "Who founded Marl?", "--max-new-tokens", "3")
    assert answered.code == 0, answered.err
    assert "marl.md" in answered.out
    assert "fused" in answered.out
    assert "first token" in answered.out


def test_ask_as_json_prints_one_document_with_hits_and_timing(run: Run, documents: Path) -> None:
    run("ingest", documents)
    answered = run("ask", "Who founded Marl?", "--json", "--max-new-tokens", "2").json
    reuse = answered["answer"]["reuse"]
    assert {hit["passage"]["source"].rsplit("/", 1)[-1] for hit in answered["hits"]} == {
        "marl.md",
        "mill.txt",
    }
    assert reuse["exact"] + reuse["fused"] + reuse["recomputed"] + reuse["computed"] > 20
    assert answered["answer"]["timing"]["first_token_s"] > 0


def test_without_a_temperature_it_is_0_which_decodes_greedily(
    run: Run, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("ingest", documents)
    seen: list[dict[str, object]] = []
    real = Rag.stream
    monkeypatch.setattr(
        Rag, "stream", lambda *given, **how: seen.append(how) or real(*given, **how)
    )
    for options in ((), ("--temperature", "0"), ("--temperature", "0.7", "--ratio", "0.5")):
        assert run("ask", "who?", "--max-new-tokens", "1", *options).code == 0
    greedy, zero, sampled = seen
    assert greedy == zero and zero["temperature"] == 0
    assert (sampled["temperature"], sampled["ratio"]) == (0.7, 0.5)


def test_a_changed_document_is_encoded_again_and_its_old_entry_is_deleted(
    run: Run, documents: Path, tmp_path: Path
) -> None:
    run("ingest", documents)
    (documents / "mill.txt").write_text("The mill of Marl makes rope.\n")
    changed = run("ingest", documents, "--json").json
    assert changed["kv"]["encoded"] == 1
    assert changed["deleted_entries"] == 1
    assert entries(tmp_path / "home") == 2


def test_a_pruned_document_leaves_no_entry(run: Run, documents: Path, tmp_path: Path) -> None:
    run("ingest", documents)
    (documents / "mill.txt").unlink()
    pruned = run("ingest", documents, "--prune", "--json").json
    assert len(pruned["index"]["deleted"]) == 1
    assert entries(tmp_path / "home") == 1


def test_gc_deletes_the_entries_of_another_dtype(run: Run, documents: Path, tmp_path: Path) -> None:
    run("ingest", documents)
    second = run("ingest", documents, "--dtype", "bfloat16")
    assert second.code == 0, second.err
    assert entries(tmp_path / "home") == 4
    done = run("gc", "--json").json
    assert done["deleted_documents"] == 0 and done["other_models_bytes"] > 0
    assert entries(tmp_path / "home") == 2
    assert "Dropped 0 B of other models and 0 entries of deleted documents" in run("gc").out


def test_the_next_question_uses_the_gates_result_only_if_it_was_applied(
    run: Run, documents: Path
) -> None:
    # the gate needs passages to measure
    for number, word in enumerate(("rope", "paper", "quill", "town", "mill")):
        (documents / f"{number}.txt").write_text(f"The {word} of Marl was founded by Ada Quill.\n")
    run("ingest", documents)
    strict = ("gate", "--kl", "0", "--tolerance", "0")
    refused = run(*strict, "--json")
    assert refused.code == 0, refused.err
    assert refused.json["answer"] is None, "random weights cannot be fused without loss"
    assert refused.json["headline"].startswith("full recompute: no setting stays within 0 %")
    ask = ("ask", "mill of marl", "--json", "--max-new-tokens", "1")
    assert run(*ask).json["answer"]["reuse"]["fused"] > 0
    applied = run(*strict, "--apply")
    assert applied.code == 0 and "engines on this home use it" in applied.out
    answered = run(*ask).json["answer"]["reuse"]
    assert answered["fused"] == 0
    assert any("quality gate: full recompute" in note for note in answered["notes"])


def test_the_gate_says_how_many_prompts_are_longer_than_the_context_and_what_to_do(
    run: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    for number, word in enumerate(
        ("mill", "town", "rope", "paper", "quill", "ada", "marl", "founded")
    ):
        (folder / f"{number}.txt").write_text(f"the {word} of " * (100 if number < 2 else 5))
    assert run("ingest", folder).code == 0
    words = ("rope", "paper", "quill", "ada", "marl", "founded")
    questions = tmp_path / "questions.txt"
    questions.write_text(
        "".join(f"who {word} {other} ?\n" for word in words for other in words if word < other)
    )
    measured = run("gate", "--questions", questions, "-k", "2", "--selector", "first-k")
    assert measured.code == 0 and "left out" not in measured.out
    questions.write_text(questions.read_text() + "the mill and the town ?\n")
    measured = run("gate", "--questions", questions, "-k", "2", "--selector", "first-k")
    assert measured.code == 0, measured.err
    assert (
        "context were left out: 1;" in " ".join(measured.out.split())
        and "fewer passages (-k)" in measured.out
    )
    questions.write_text("the mill and the town ?\n" * 8)
    refused = run("gate", "--questions", questions, "-k", "2", "--selector", "first-k")
    assert (
        refused.code != 0
        and "8 of the gate's 8 prompts are longer than the model's context" in refused.err
    )


def test_an_ingestion_in_a_pipe_shows_no_bar_and_notes_that_without_an_embedder_only_bm25_is_used(
    run: Run, documents: Path
) -> None:
    done = run("ingest", documents)
    assert "\x1b" not in done.out + done.err
    assert "━" not in done.err
    assert "BM25" in done.err


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (("ask", "who?"), "Nothing was ingested"),
            (("ingest", "/nowhere/at/all.txt"), "no such file"),
            (("ingest", "/nowhere"), "no such file"),
            (("search", "who?"), "Nothing was ingested"),
            (("ingest", "empty"), "No documents"),
            # the nearest one
            (("ingest", "docs", "--config", "settings.toml"), "store.memory_bytes"),
        ],
    )
    def test_a_missing_path_index_or_setting_exits_with_1_and_one_sentence(
        self,
        run: Run,
        documents: Path,
        arguments: tuple[str, ...],
        says: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(documents.parent)
        Path("empty").mkdir()
        Path("settings.toml").write_text("[store]\nmemory_byte = 5\n")
        ran = run(*arguments)
        assert ran.code == 1
        assert says in ran.err
        assert "Traceback" not in ran.err
        assert ran.out == ""

    def test_a_bad_file_does_not_end_the_rest_and_exits_with_1(
        self, run: Run, documents: Path
    ) -> None:
        (documents / "noise.txt").write_bytes(bytes(range(256)) * 20)
        (documents / "photo.png").write_bytes(b"x")
        ran = run("ingest", documents)
        assert (ran.code, "Traceback" in ran.err) == (1, False)
        assert "Files: 2 added, 1 ignored, 1 failed" in ran.out
        assert "noise.txt looks binary" in ran.out
        assert "ignored, no loader for .png: " in ran.out
        found = run("ingest", documents, "--json")
        assert (found.code, found.json["counts"]["unchanged"], found.json["counts"]["failed"]) == (
            1,
            2,
            1,
        )
        assert {Path(file["path"]).name for file in found.json["files"]} == {
            *("marl.md", "mill.txt", "noise.txt", "photo.png")
        }

    def test_a_missing_and_an_unsupported_model_are_named(
        self, run: Run, documents: Path, tmp_path: Path
    ) -> None:
        assert "No model folder" in run("ingest", documents, "--model", tmp_path / "none").err
        folder = tmp_path / "gpt2"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
        assert "No adapter for the architecture" in run("ingest", documents, "--model", folder).err

    def test_wrong_usage_exits_with_2(self, run: Run) -> None:
        assert run("ask").code == 2
        assert run("bogus").code == 2

    @pytest.mark.parametrize(
        ("command", "question", "says"),
        [("ask", "who? " * 600, "context")]
        + [(command, blank, "is empty") for command in ("ask", "search") for blank in ("", " \n")],
    )
    def test_an_empty_question_and_a_prompt_longer_than_the_context_exit_with_1(
        self, run: Run, documents: Path, command: str, question: str, says: str
    ) -> None:
        run("ingest", documents)
        ran = run(command, question)
        assert (ran.code, says in ran.err, ran.out) == (1, True, "")


def test_ask_says_why_no_kv_was_reused(run: Run, documents: Path, model_folder: Path) -> None:
    model = ("--model", str(model_folder))
    assert run("ingest", str(documents), "--minutes", "0", *model).code == 0
    asked = ("ask", "Who founded Marl?", "--max-new-tokens", "2", *model)
    first = run(*asked)
    assert first.code == 0
    assert "no passage's KV was reused: no usable KV was stored" in " ".join(first.err.split())
    assert "was reused:" not in run(*asked).err
