"""A folder of 40 files as people have them: every format, and all that can be wrong with a file.

`make` returns what is expected of each, by its path in the folder.
"""

import json
import os
from pathlib import Path

from tests.retrieval import sample_files

HUGE_BYTES = 300_000
# Without the rights of root, a file without the right to read it fails.
NO_PERMISSION = "added" if os.geteuid() == 0 else "failed"

TEXTS = {
    "notes.txt": b"The mill makes paper.",
    "Marl.md": b"# Marl\n\nThe town of Marl was founded by Ada Quill in 1820.\n",
    "README": b"What is in this folder.",
    "code/mill.py": b"def mill():\n    return 'paper'\n",
    "code/wheel.rs": b'fn wheel() -> &\'static str { "oak" }\n',
    "code/config.yaml": b"mill: oak\n",
    "page.html": b"<html><title>Mill</title><body><p>The mill makes rope.</p></body></html>",
    "lines.jsonl": b'{"id": "one", "text": "The first."}\n{"id": "two", "text": "The second."}\n',
    "people.csv": b"name,born\nAda Quill,1790\n",
    "people.tsv": b"name\tborn\nBo Reed\t1801\n",
    "utf16.txt": "The wheel is gro\u00df.".encode("utf-16"),
    "utf8-bom.txt": "\ufeffThe wheel turns.".encode(),
    "with space.txt": b"A name with a space.",
    "M\u00fchle \u6c34\u8eca.txt": "A name that is not ASCII: \u6c34\u8eca.".encode(),
    "[red]brackets[/x].txt": b"A name with brackets.",
    "UPPER.TXT": b"An ending in capitals.",
    "copy.txt": b"The mill makes paper.",
    "deep/er/still.md": b"Three folders down.",
    "huge.txt": b"The mill of Marl makes paper. " * (HUGE_BYTES // 30),
}
IGNORED = {
    "photo.png": b"\x89PNG",
    "archive.zip": sample_files.zipped({"a.txt": "x"}),
    "no-ending": b"\x7fELF\x02\x00",
    "empty.txt": b"",
    "blank.md": b" \n\t\n",
    ".hidden.txt": b"hidden",
}
FAILED = {
    "latin1.txt": "caf\u00e9".encode("latin-1"),
    "binary.txt": b"MZ\x00\x01",
    "broken.pdf": b"%PDF-1.4 nothing",
    "broken.docx": b"no archive",
    "broken.xlsx": sample_files.zipped({"x": "y"}),
    "broken.jsonl": b'{"id": "three", "text": "The third."}\n{\n',
}


def make(root: Path) -> dict[str, str]:
    """Fill the folder; the expected status of each of the 40 files."""
    office = {
        "plan.docx": sample_files.docx(),
        "talk.pptx": sample_files.pptx(),
        "people.xlsx": sample_files.xlsx(),
        "book.epub": sample_files.epub(),
        "letter.eml": sample_files.eml(),
        "report.pdf": sample_files.pdf("The mill burned in 1901.", "It was built again in 1903."),
    }
    statuses = dict.fromkeys((*TEXTS, *office), "added") | dict.fromkeys(IGNORED, "ignored")
    statuses |= dict.fromkeys(FAILED, "failed")
    for name, data in {**TEXTS, **office, **IGNORED, **FAILED}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (root / "link.txt").symlink_to("notes.txt")
    (root / "dangling.txt").symlink_to("nowhere.txt")
    (root / "secret.txt").write_text("This file cannot be read.")
    (root / "secret.txt").chmod(0)
    statuses |= {"link.txt": "ignored", "dangling.txt": "failed", "secret.txt": NO_PERMISSION}
    assert len(statuses) == 40
    return statuses


def append_line(file: Path, **record: object) -> None:
    """Add a line to a JSONL file."""
    with file.open("a") as lines:
        lines.write(json.dumps(record) + "\n")
