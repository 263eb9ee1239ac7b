"""Who has one machine imports nothing of `ragkv.cluster`, from opening a home to an answer."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.reader import READER

PROGRAM = """
import sys
from ragkv.store.opening import open_store
from ragkv.config import EngineConfig, RedisConfig, StoreConfig
from ragkv.rag import Corpus, Rag
from ragkv.store.store import Store

home, model, url = sys.argv[1:]
if url:
    open_store(StoreConfig(redis=RedisConfig(url=url))).close()
else:
    with Rag(Corpus.open(home, model, embedder=None)) as rag:
        rag.corpus.ingest([home + "/text.txt"])
        rag.ask("Who?", max_new_tokens=1)
        list(rag.stream("Who?", session=rag.engine.session("s"), max_new_tokens=1))
print(sorted(name for name in sys.modules if name.startswith("ragkv.cluster")))
"""


@pytest.mark.parametrize("url", ["", "redis://127.0.0.1:1"])
def test_a_home_imports_it_only_if_its_settings_name_a_server(tmp_path: Path, url: str) -> None:
    (tmp_path / "text.txt").write_text("A pilot works in the harbour.")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), READER, url]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    imported = ran.stdout.strip().splitlines()[-1]
    assert (imported == "[]") is not bool(url), imported
