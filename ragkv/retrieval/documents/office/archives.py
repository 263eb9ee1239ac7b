"""ZIP archives of XML, which Word, PowerPoint, Excel and EPUB files are.

Before anything is parsed, the sizes that the archive declares are added up and checked: `zipfile`,
which all parsers used here read with, never inflates more than declared. No parser resolves XML
entities. python-pptx and this file tell lxml so. The others use expat, so an archive that declares
entities in any of its files is refused for them. Office writes none.
"""

import io
import zipfile
from typing import Any

from lxml import etree

from ragkv.errors import DocumentError

from ..reading import FileContent

EXTRA = "office"
CORE = "docProps/core.xml"
_TITLE = ".//{http://purl.org/dc/elements/1.1/}title"


def opened_archive(content: FileContent, by_expat: bool = False) -> zipfile.ZipFile:
    """The archive, after its declared sizes were checked; if it is read `by_expat`, after a look
    for entities, too.

    A part is XML if a relationship says so, whatever its name is. So all parts are looked at.
    """
    archive = zipfile.ZipFile(io.BytesIO(content.data))
    content.limits.check(
        "inflated_bytes",
        unpacked_bytes(archive),
        f"{content.path}: the size of its unpacked contents in bytes",
    )
    for name in archive.namelist() if by_expat else ():
        # UTF-16, too
        if b"<!ENTITY" in archive.read(name).replace(b"\0", b""):
            raise DocumentError(
                f"{content.path} declares XML entities in {name}, as attacks do. Save it anew in "
                "Office."
            )
    return archive


def unpacked_bytes(archive: zipfile.ZipFile) -> int:
    """The size of all files in an archive."""
    return sum(info.file_size for info in archive.infolist())


def parsed_xml(data: bytes) -> Any:
    """The root of an XML file, whose entities are not resolved."""
    return etree.fromstring(data, etree.XMLParser(resolve_entities=False, no_network=True))


def title_in(archive: zipfile.ZipFile, name: str) -> str:
    """The title that an archive has in its XML file `name`; "" if it has none that can be read."""
    try:
        return " ".join((parsed_xml(archive.read(name)).findtext(_TITLE) or "").split())
    except (KeyError, etree.XMLSyntaxError):
        return ""
