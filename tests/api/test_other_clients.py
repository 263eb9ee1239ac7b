"""LlamaIndex and Haystack, as docs/clients.md shows them, against a server on a port: `make
test-clients`.

They run in an environment of their own, which `CLIENTS_PYTHON` names: LlamaIndex excludes the
transformers used here.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

from ragkv import Engine

from .helpers import app_on, client_of, corpus, on_port

PYTHON = os.environ.get("CLIENTS_PYTHON")
PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text("utf-8")
pytestmark = [
    pytest.mark.enable_socket,
    pytest.mark.skipif(PYTHON is None, reason="make test-clients runs it"),
]


@pytest.mark.parametrize("client", ["LlamaIndex", "Haystack"])
def test_a_client_answers_from_a_collection_as_its_page_says(
    reader: Engine, tmp_path: Path, client: str
) -> None:
    section = PAGE.split(f"## {client}\n")[1]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]  # type: ignore[index]
    with client_of(app_on(reader, tmp_path)) as filling:
        filling.post("/v1/collections", json={"name": "docs"})
        filling.post("/v1/collections/docs/documents", files=corpus())
    with on_port(app_on(reader, tmp_path)) as url:
        code = code.replace("http://127.0.0.1:8000", url).replace("smollm2:default", "reader:docs")
        code = code.replace("Where is Thomas Telford buried?", "What is the job of Lodwin?")
        done = subprocess.run(
            [str(PYTHON), "-c", code], capture_output=True, text=True, timeout=300, check=False
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "pilot" in done.stdout, done.stdout
