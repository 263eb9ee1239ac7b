"""An unpacked model is loaded only if nobody else could have written it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ragkv.model import gguf_files


@pytest.fixture
def unpack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Ask for the folder of a file; returns how often the file was unpacked so far."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "m.gguf"
    file.write_bytes(b"gguf")
    times = list[Path]()

    def write(_: Path, folder: Path, made_of: dict[str, Any]) -> None:
        times.append(folder)
        if folder.is_symlink():
            folder.unlink()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        (folder / "config.json").write_text("{}")
        folder.chmod(0o700)
        (folder / "config.json").chmod(0o600)
        manifest = {
            "made_of": made_of,
            "digests": gguf_files._digests(folder, ["config.json"]),
        }
        (folder / gguf_files.MANIFEST).write_text(json.dumps(manifest))
        (folder / gguf_files.MANIFEST).chmod(0o600)

    monkeypatch.setattr(gguf_files, "_unpack", write)

    def asked() -> int:
        gguf_files.unpacked(file)
        return len(times)

    return asked


def planted_link(folder: Path) -> None:
    folder.rename(folder.with_name("other"))
    folder.symlink_to(folder.with_name("other"))


def given_away(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(folder / "config.json", 12345, -1)


CHANGES: dict[str, Callable[[Path], None]] = {
    "a folder that all may write to": lambda folder: folder.chmod(0o777),
    "a folder of a group": lambda folder: folder.chmod(0o770),
    "a file that all may write to": lambda folder: (folder / "config.json").chmod(0o666),
    "a manifest of a group": lambda folder: (folder / gguf_files.MANIFEST).chmod(0o620),
    "a link": planted_link,
    "another's file": given_away,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_folder_that_others_could_have_written_is_unpacked_again(
    unpack: Callable[[], int], tmp_path: Path, name: str
) -> None:
    assert unpack() == 1 and unpack() == 1
    (folder,) = [one for one in (tmp_path / "cache" / "ragkv" / "models").iterdir() if one.is_dir()]
    CHANGES[name](folder)
    assert unpack() == 2
    assert unpack() == 2, "what was unpacked again is trusted"
