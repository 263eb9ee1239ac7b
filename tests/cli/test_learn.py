"""`ragkv learn`: a file that engines go by, and what it says where there is nothing to learn from."""

import shutil
from pathlib import Path

from ragkv.fusion.learned import FILE_NAME, ScoreModel

from .conftest import Run


def test_scores_are_learned_into_the_models_folder(
    run: Run, documents: Path, model_folder: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(model_folder, tmp_path / "model")
    assert run("ingest", str(documents), "--chunk-tokens", "8", "--model", str(model)).code == 0
    done = run("learn", str(model), "--steps", "3", "--json")
    assert done.code == 0, done.err
    assert done.json["digest"] == ScoreModel.from_bytes((model / FILE_NAME).read_bytes()).digest
    again = run("ingest", str(documents), "--chunk-tokens", "8", "--model", str(model), "--json")
    assert again.json["kv"]["encoded"] > 0  # scored anew
    assert again.json["kv"]["present"] == 0


def test_too_little_to_learn_from_is_said(run: Run, documents: Path, model_folder: Path, tmp_path: Path) -> None:
    assert run("ingest", str(documents)).code == 0
    out = tmp_path / "scores"
    done = run("learn", str(model_folder), "--out", str(out))
    assert done.code == 1 and "at least 3 chunks" in done.err
    assert not out.exists()


def test_a_hub_id_needs_a_place(run: Run) -> None:
    done = run("learn", "some/model")
    assert done.code == 1 and "--out" in done.err
