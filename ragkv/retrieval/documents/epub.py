"""EPUB: the chapters in reading order, each as HTML. A bad chapter costs this chapter."""

import posixpath
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from .html import declared_encoding, text_of
from .office.archives import opened_archive, parsed_xml, title_in, unpacked_bytes
from .reading import FileContent, Loaded, decode, part

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
    items = {
        item.get("id"): str(item.get("href")) for item in root.iterfind(".//{*}manifest/{*}item")
    }
    for number, entry in enumerate(root.iterfind(".//{*}spine/{*}itemref"), start=1):
        text = ""
        with part(lost, f"chapter {number}"):
            href = unquote(items[entry.get("idref")])
            name = posixpath.normpath(posixpath.join(posixpath.dirname(package), href))
            data = archive.read(name)
            text, _ = text_of(decode(name, data, content.encoding, declared_encoding(data)))
        if text:
            yield text
