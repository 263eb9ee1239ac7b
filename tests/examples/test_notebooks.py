"""The notebooks run from the first cell to the last, each in its own process, and are stored
without outputs.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.reader import READER

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
# on a machine that four other processes keep busy; alone each takes well under a minute
LIMIT_S = 560

# The reader of the tests takes the place of the model, and its world that of the articles: quick,
# with known answers. In a notebook's file, quotes of code stand behind a backslash.
_WORLD = ROOT / "tests" / "world"
_MODEL = ((r"smollm2\"", rf"{READER}\""), ("../corpus", f"{_WORLD}/corpus"))
READER_ON_ITS_WORLD = {
    "first_steps": (
        *_MODEL,
        (
            "Which famous scientist was born in Shrewsbury in 1809?",
            "By what other name is Kiralus known?",
        ),
    ),
    "quality_and_compute": (
        *_MODEL,
        ("../questions.jsonl", f"{_WORLD}/questions.jsonl"),
        (r"one[\"answers\"][0]", r"one[\"answer\"]"),
        (r"\"before\" not", r"\"history\" not"),
        ("K = 4 ", "K = 10 "),
        # the reader needs the notes in their own order
        ("rag.retrieve(question, K)", r"rag.retrieve(question, K, order=\"document\")"),
    ),
}

# Not in this process: the kernel needs sockets, and its packages warn.
DRIVER = """
import pathlib, sys, nbclient, nbformat
source = pathlib.Path(sys.argv[1]).read_text()
for shown, run in zip(sys.argv[3::2], sys.argv[4::2]):
    assert shown in source, shown
    source = source.replace(shown, run)
notebook = nbformat.reads(source, as_version=4)
where = {"metadata": {"path": sys.argv[2]}}
nbclient.NotebookClient(notebook, timeout=500, kernel_name="python3", resources=where).execute()
print(nbformat.writes(notebook))
"""


def text_of(notebook: dict[str, Any]) -> str:
    """What the cells printed."""
    outputs = [one for cell in notebook["cells"] for one in cell.get("outputs", ())]
    return "".join(
        "".join(one["text"])
        for one in outputs
        if one["output_type"] == "stream" and one["name"] == "stdout"
    )


def executed(path: Path, home: Path) -> dict[str, Any]:
    """The notebook with its outputs."""
    pytest.importorskip("nbclient", reason="needs nbclient and ipykernel (extra dev)")
    pytest.importorskip("ipykernel", reason="needs nbclient and ipykernel (extra dev)")
    own = {
        "IPYTHONDIR": str(home),
        "JUPYTER_DATA_DIR": str(home),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
    }
    own |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    # threads that wait for each other are slowest where others compute as well
    own |= {"OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-c",
        DRIVER,
        str(path),
        str(path.parent),
        *sum(READER_ON_ITS_WORLD[path.stem], ()),
    ]
    ran = subprocess.run(
        command,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3_000:]
    notebook: dict[str, Any] = json.loads(ran.stdout)
    return notebook


def plots(notebook: dict[str, Any]) -> int:
    """How many pictures the cells made."""
    outputs = [one for cell in notebook["cells"] for one in cell.get("outputs", ())]
    return sum("image/png" in one.get("data", {}) for one in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs_and_names_no_place_of_this_machine(
    path: Path,
) -> None:
    notebook = json.loads(path.read_text("utf-8"))
    codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(codes) > 4
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in codes)
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert "/home/" not in path.read_text("utf-8") and str(ROOT) not in path.read_text("utf-8")


@pytest.mark.timeout(LIMIT_S + 20)
class TestExecuted:
    def test_first_steps_answers_and_draws_prompt_and_times(self, tmp_path: Path) -> None:
        notebook = executed(ROOT / "examples" / "notebooks" / "first_steps.ipynb", tmp_path)
        said = text_of(notebook)
        assert "10 documents" in said and "Gorax\n" in said and "fused," in said and "x\n" in said
        assert plots(notebook) == 2

    def test_quality_and_compute_finds_a_ratio_that_is_enough(self, tmp_path: Path) -> None:
        notebook = executed(ROOT / "examples" / "notebooks" / "quality_and_compute.ipynb", tmp_path)
        said = text_of(notebook)
        assert "16 questions" in said and "answers to 15 of them" in said and plots(notebook) == 1
        assert re.search(r"^full +1\.00 ", said, re.MULTILINE)
        rows = {
            tuple(row.split()[:2]): float(row.split()[2])
            for row in said.splitlines()
            if row[:7] in ("attenti", "random ")
        }
        assert rows["attention", "1.0"] == rows["random", "1.0"] >= rows["attention", "0.0"]
        enough = re.search(
            r"the lowest ratio that answers as many questions as the full prefill: ([\d.]+)", said
        )
        assert enough is not None and 0.0 < float(enough[1]) <= 1.0
