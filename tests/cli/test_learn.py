"""`ragkv learn` writes a file that engines use, and refuses too little input."""

import shutil
from pathlib import Path

from ragkv.fusion.learned import FILE_NAME, ScoreModel

from .conftest import Run


def test_learn_writes_scores_into_the_model_folder_and_new_entries_use_them(
    run: Run, documents: Path, model_folder: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(model_folder, tmp_path / "model")
    assert run("ingest", str(documents), "--chunk-tokens", "8", "--model", str(model)).code == 0
    done = run("learn", str(model), "--steps", "3", "--json")
    assert done.code == 0, done.err
    assert done.json["digest"] == ScoreModel.from_bytes((model / FILE_NAME).read_bytes()).digest
    again = run("ingest", str(documents), "--chunk-tokens", "8", "--model", str(model), "--json")
    assert again.json["kv"]["encoded"] > 0  # with the new scores
    assert again.json["kv"]["present"] == 0


def test_learn_refuses_a_corpus_of_too_few_chunks(
    run: Run, documents: Path, model_folder: Path, tmp_path: Path
) -> None:
    assert run("ingest", str(documents)).code == 0
    out = tmp_path / "scores"
    done = run("learn", str(model_folder), "--out", str(out))
    assert done.code == 1 and "at least 3 chunks" in done.err
    assert not out.exists()


def test_learn_needs_an_output_file_for_a_hub_id(run: Run) -> None:
    done = run("learn", "some/model")
    assert done.code == 1 and "--out" in done.err
