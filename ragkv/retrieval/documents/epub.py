"""EPUB: the chapters in reading order, each as HTML. A bad chapter is left out, and the others are
read.
"""

import posixpath
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from ragkv.errors import DocumentError
from ragkv.runtime import counted

from .html import Sheets, declared_encoding, text_of
from .office.archives import opened_archive, parsed_xml, title_in, unpacked_bytes
from .reading import FileContent, Loaded, Once, decode, part

CONTAINER = "META-INF/container.xml"


def load_epub(content: FileContent) -> Loaded:
    """One document."""
    lost = list[str]()
    with content.parsing("EPUB"):
        archive = opened_archive(content)
        root = parsed_xml(archive.read(CONTAINER)).find(".//{*}rootfile")
        package = str(root.get("full-path"))
        chapters = _chapters(content, archive, package, lost)
        text = "\n\n".join(content.bounded(chapters, unpacked_bytes(archive)))
        title = title_in(archive, package)
    yield content.document(text, {"format": "markdown", "title": title}, lost)


def _chapters(content: FileContent, archive: Any, package: str, lost: list[str]) -> Iterator[str]:
    root = parsed_xml(archive.read(package))
    folder = posixpath.dirname(package)
    items = dict[Any, str]()
    styles = list[str]()
    for item in root.iterfind(".//{*}manifest/{*}item"):
        name = posixpath.normpath(posixpath.join(folder, unquote(str(item.get("href")))))
        items[item.get("id")] = name
        if item.get("media-type") == "text/css":
            styles.append(name)
    sheets = _sheets(content, archive, styles)
    hidden = 0
    once = Once(lost)
    for number, entry in enumerate(root.iterfind(".//{*}spine/{*}itemref"), start=1):
        text = ""
        with part(lost, f"chapter {number}"):
            name = items[entry.get("idref")]
            if once.was_read(name, f"chapter {number}"):
                continue
            data = archive.read(name)
            text = decode(name, data, content.encoding, declared_encoding(data))
            page = text_of(text, sheets)
            text = page.text
            hidden += page.hidden
        if text:
            yield text
    if hidden:
        lost.append(counted(hidden, "hidden text"))


def _sheets(content: FileContent, archive: Any, names: Iterable[str]) -> Sheets:
    """The style sheets of a book, which say what is raised. One that cannot be read costs this."""
    sheets = Sheets()
    for name in names:
        with suppress(KeyError, DocumentError, zipfile.BadZipFile):
            sheets.add(decode(name, archive.read(name), content.encoding))
    return sheets
