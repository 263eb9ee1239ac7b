"""`ragkv learn` scores what a home holds and loses none of it; `--out` writes a file; too little input is refused."""

from itertools import product
from pathlib import Path

from ragkv.fusion.learned import FILE_NAME, ScoreModel

from .conftest import Run


def test_learn_scores_the_stored_kv_and_no_chunk_is_encoded_again(
    run: Run, documents: Path, model_folder: Path, tmp_path: Path
) -> None:
    ingest = ("ingest", str(documents), "--chunk-tokens", "8", "--model", str(model_folder), "--json")
    chunks = run(*ingest).json["kv"]["encoded"]
    done = run("learn", str(model_folder), "--steps", "3", "--json")
    assert done.code == 0, done.err
    assert done.json["stored"] == {"scored": chunks, "present": 0, "unreadable": 0, "left": 0}
    assert ScoreModel.from_bytes(
        (tmp_path / "home" / "kv" / FILE_NAME).read_bytes()
    ).second_slot  # the variance has the first
    assert not (model_folder / FILE_NAME).exists()
    again = run(*ingest).json["kv"]
    assert (again["encoded"], again["present"], again["scored"]) == (0, chunks, 0)


def test_a_second_learn_uses_the_slot_that_the_first_left(
    run: Run, documents: Path, model_folder: Path, tmp_path: Path
) -> None:
    assert run("ingest", str(documents), "--chunk-tokens", "8", "--model", str(model_folder)).code == 0
    slots = []
    for seed in ("1", "2"):
        done = run("learn", str(model_folder), "--steps", "2", "--seed", seed, "--json")
        assert done.code == 0 and done.json["stored"]["scored"] > 0, done.err
        slots.append(ScoreModel.from_bytes((tmp_path / "home" / "kv" / FILE_NAME).read_bytes()).second_slot)
    assert slots == [True, False]


def test_learn_refuses_a_corpus_of_too_few_chunks(
    run: Run, documents: Path, model_folder: Path, tmp_path: Path
) -> None:
    assert run("ingest", str(documents)).code == 0
    out = tmp_path / "scores"
    done = run("learn", str(model_folder), "--out", str(out))
    assert done.code == 1 and "at least 3 chunks" in done.err
    assert not out.exists()


def test_with_out_only_the_file_is_written(run: Run, documents: Path, model_folder: Path, tmp_path: Path) -> None:
    assert run("ingest", str(documents), "--chunk-tokens", "8", "--model", str(model_folder)).code == 0
    out = tmp_path / "scores"
    done = run("learn", str(model_folder), "--steps", "2", "--out", str(out), "--json")
    assert done.code == 0, done.err
    assert done.json["digest"] == ScoreModel.from_bytes(out.read_bytes()).digest
    assert not (tmp_path / "home" / "kv" / FILE_NAME).exists()


def test_ingest_says_that_scores_can_be_learned(run: Run, model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for words in product(("mill", "town", "quill"), ("marl", "paper"), ("rope", "ada", "founded")):
        (folder / f"{'-'.join(words)}.txt").write_text(f"The {words[0]} of {words[1]} makes {words[2]}.\n")
    first = run("ingest", str(folder), "--model", str(model_folder))
    assert first.code == 0
    note = " ".join(first.err.split())
    assert "no scores were learned for this model" in note and "`ragkv learn` learns them" in note
    assert run("learn", str(model_folder), "--steps", "2").code == 0
    for words in product(("mill", "town", "quill"), ("marl", "paper"), ("rope", "ada", "founded")):
        (folder / f"by-{'-'.join(words)}.txt").write_text(f"A {words[0]} was {words[2]} by {words[1]}.\n")
    assert "ragkv learn" not in run("ingest", str(folder), "--model", str(model_folder)).err


def test_ask_says_why_no_kv_was_reused(run: Run, documents: Path, model_folder: Path) -> None:
    model = ("--model", str(model_folder))
    assert run("ingest", str(documents), "--index-only", *model).code == 0
    asked = ("ask", "Who founded Marl?", "--max-new-tokens", "2", *model)
    first = run(*asked)
    assert first.code == 0
    assert "no passage's KV was reused: no usable KV was stored" in " ".join(first.err.split())
    assert "was reused:" not in run(*asked).err
