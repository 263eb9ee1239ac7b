"""A tiny model folder with a word-level tokenizer, two documents, and a fixture that calls the
command line.
"""

import contextlib
import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from ragkv.cli import main
from tests import tiny_models

WORDS = ("the", "a", "mill", "town", "of", "marl", "quill", "makes", "paper", "rope", "was")
WORDS += ("founded", "by", "ada", "in", "1820", "1901", "who", "what", "?", ".")


@dataclass(frozen=True)
class CommandResult:
    """The output and the exit code of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., CommandResult]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_models.model("llama").save_pretrained(folder)
    vocabulary = {
        word: number for number, word in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *WORDS])
    }
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.WhitespaceSplit(), tokenizers.pre_tokenizers.Punctuation()]
    )
    inner.normalizer = tokenizers.normalizers.Lowercase()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        pad_token="<pad>",
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "marl.md").write_text(
        "# Marl\n\nThe town of Marl was founded by Ada Quill in 1820.\n"
    )
    (folder / "mill.txt").write_text("The mill of Marl makes paper. It was founded in 1901.\n")
    return folder


@pytest.fixture
def run(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Call `ragkv` with arguments, with its own home and model."""
    monkeypatch.setenv("RAGKV_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RAGKV_MODEL", str(model_folder))
    monkeypatch.setattr("ragkv.retrieval.embedders.minilm_path", lambda: None)
    monkeypatch.setattr("os.nice", lambda _: None)

    def call(*arguments: str | Path) -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["ragkv", *map(str, arguments)])
        out = io.StringIO()
        err = io.StringIO()
        code = 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        return CommandResult(code, out.getvalue(), err.getvalue())

    return call
