"""What is read of the bytes of a file, for tests."""

from pathlib import Path

from ragkv.retrieval import Document, load_bytes
from ragkv.retrieval.documents.reading import LOST

from .sample_files import word, zipped


def read(name: str, data: bytes | str) -> Document:
    """The only document of a file."""
    (document,) = load_bytes(Path(name), data.encode() if isinstance(data, str) else data)
    assert isinstance(document, Document), document
    return document


def text(name: str, data: bytes | str) -> str:
    """The text of a file."""
    return read(name, data).text


def lost(document: Document) -> str:
    """What was left out of a document, in words."""
    return "; ".join(document.metadata.get(LOST, ()))


def run(words: str, properties: str = "") -> str:
    """WordprocessingML of a run."""
    return f'<w:r><w:rPr>{properties}</w:rPr><w:t xml:space="preserve">{words}</w:t></w:r>'


def styled_word(body: str, styles: str) -> bytes:
    """A Word file with further styles."""
    import io
    from zipfile import ZipFile

    with ZipFile(io.BytesIO(word(body))) as archive:
        files: dict[str, str | bytes] = {name: archive.read(name) for name in archive.namelist()}
    given = files["word/styles.xml"]
    assert isinstance(given, bytes)
    files["word/styles.xml"] = given.replace(b"</w:styles>", f"{styles}</w:styles>".encode())
    return zipped(files)


def book(chapter: str, css: str = "") -> bytes:
    """An EPUB of one chapter and a style sheet."""
    items = '<item id="a" href="a.x"/><item id="s" media-type="text/css" href="css/s%20s.css"/>'
    return zipped(
        {
            "META-INF/container.xml": '<c xmlns="u"><rootfile full-path="t/b.opf"/></c>',
            "t/b.opf": f'<p><manifest>{items}</manifest><spine><itemref idref="a"/></spine></p>',
            "t/a.x": chapter,
            "t/css/s s.css": css,
        }
    )
