"""`ragkv learn` scores what a home holds and loses none of it; too little input is refused."""

from pathlib import Path

from ragkv.fusion.learned import FILE_NAME, ScoreModel

from .conftest import Run


def test_learn_scores_the_stored_kv_and_no_chunk_is_encoded_again(
    run: Run, documents: Path, model_folder: Path, tmp_path: Path
) -> None:
    ingest = ("ingest", str(documents), "--chunk-tokens", "8", "--model", str(model_folder), "--json")
    chunks = run(*ingest).json["kv"]["encoded"]
    done = run("learn", "--steps", "3", "--json")
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
        done = run("learn", "--steps", "2", "--seed", seed, "--json")
        assert done.code == 0 and done.json["stored"]["scored"] > 0, done.err
        slots.append(ScoreModel.from_bytes((tmp_path / "home" / "kv" / FILE_NAME).read_bytes()).second_slot)
    assert slots == [True, False]


def test_learn_refuses_a_corpus_of_too_few_chunks(run: Run, documents: Path) -> None:
    assert run("ingest", str(documents)).code == 0
    done = run("learn")
    assert done.code == 1 and "at least 3 chunks" in done.err


def test_ask_says_why_no_kv_was_reused(run: Run, documents: Path, model_folder: Path) -> None:
    model = ("--model", str(model_folder))
    assert run("ingest", str(documents), "--index-only", *model).code == 0
    asked = ("ask", "Who founded Marl?", "--max-new-tokens", "2", *model)
    first = run(*asked)
    assert first.code == 0
    assert "no passage's KV was reused: no usable KV was stored" in " ".join(first.err.split())
    assert "was reused:" not in run(*asked).err
