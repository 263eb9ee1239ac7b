"""A server takes every kind of file that the commands read, and parses Office files within the limits."""

from collections.abc import Callable

import pytest

from ragkv.api.documents.upload_parsing import Upload, parse_upload
from ragkv.retrieval import ParseLimits
from tests.retrieval import sample_files

OFFICE = (".docx", ".pptx", ".xlsx", ".epub")
MAKERS = (sample_files.docx, sample_files.pptx, sample_files.xlsx, sample_files.epub)
DEFAULT = Upload("multipart/form-data; boundary=x", 10, 100_000, ParseLimits())


def form(name: str, data: bytes) -> bytes:
    head = f'--x\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'.encode()
    return head + data + b"\r\n--x--\r\n"


@pytest.mark.parametrize(("suffix", "make"), list(zip(OFFICE, MAKERS, strict=True)))
def test_office_files_are_taken(suffix: str, make: Callable[[], bytes]) -> None:
    body = form(f"a{suffix}", make())
    (document,) = parse_upload(DEFAULT, body)
    assert (document.id, bool(document.text)) == (f"a{suffix}", True)


@pytest.mark.parametrize("name", ["rows.csv", "README", "code.py", "notes.MD"])
def test_what_the_commands_read_by_its_name_is_taken(name: str) -> None:
    (document,) = parse_upload(DEFAULT, form(name, b"a,b\n1,2\n"))
    assert document.id.startswith(name)
