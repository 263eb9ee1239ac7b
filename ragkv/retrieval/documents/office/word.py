"""Word: mammoth turns a file into HTML. Before that, this module writes into the text what mammoth
leaves out.

mammoth knows whether a paragraph is in a list, and not which number it has. So the numbers of
lists, headings and clauses are computed as Word does and put before the text. The rules are those
of ECMA-376, part 1, 17.9. Hidden text is also removed, and text that a style raises is raised. Page
breaks end a line, results of fields are kept, and formulas become text.
"""

import io
import re
import zipfile
from collections import Counter
from collections.abc import Iterator
from typing import Any

from lxml import etree

from ragkv.runtime import counted

from ..formulas import formula_text
from ..html import WRITTEN, text_of
from ..reading import FileContent, Loaded
from .archives import CORE, EXTRA, opened_archive, parsed_xml, title_in, unpacked_bytes
from .word_numbers import MOST_LEVELS, Numbering
from .word_styles import NS, Styles, W

MATH = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"
CHOICE = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Choice"
# Items of lists get styles of these names, whose texts have their numbers.
ITEM = "ragkv-item-"
# Headings are by their style what mammoth knows, or by the level that a style has in outlines.
MOST_HEADINGS = 6
_MAIN = ("document.main+xml", "template.main+xml", "footnotes+xml", "endnotes+xml")
_HEADING = re.compile(r"heading [1-6]|title|subtitle", re.IGNORECASE)


def load_docx(content: FileContent) -> Loaded:
    """One document: headings, lists, tables, notes and text boxes."""
    mammoth = content.need("mammoth", "mammoth", EXTRA)
    with content.parsing("DOCX"):
        archive = opened_archive(content, by_expat=True)
        lost = list[str]()
        made = mammoth.convert_to_html(
            _rewritten(archive, lost),
            style_map=_style_map(),
            convert_image=mammoth.images.img_element(lambda _: {}),
        )
        (html,) = content.bounded([made.value], unpacked_bytes(archive))
        text = text_of(html).text
        title = title_in(archive, CORE)
    found = (re.search(r"element was ignored: (.+)", message.message) for message in made.messages)
    lost += [
        f"elements of the kind {kind}" for kind in sorted({one.group(1) for one in found if one})
    ]
    yield content.document(text, {"format": "markdown", "title": title}, lost)


def _style_map() -> str:
    """mammoth's elements for the styles of this file."""
    lines = ["p[style-name='Title'] => h1:fresh", "p[style-name='Subtitle'] => h2:fresh"]
    for level in range(MOST_LEVELS):
        outer = f"ol.{WRITTEN} > li > " * level
        lines.append(f"p.{ITEM}{level} => {outer}ol.{WRITTEN} > li:fresh")
    return "\n".join(lines)


def _rewritten(archive: zipfile.ZipFile, lost: list[str]) -> io.BytesIO:
    """The archive with the texts rewritten; what is left out is told in `lost`."""
    styles = Styles(_root(archive, "word/styles.xml"))
    numbering = Numbering(_root(archive, "word/numbering.xml"), styles)
    counts: Counter[str] = Counter()
    out = io.BytesIO()
    texts = set(_names_of_texts(archive))
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as rewritten:
        for name in dict.fromkeys(archive.namelist()):
            data = archive.read(name)
            if name in texts:
                root = parsed_xml(data)
                _rewrite(root, styles, numbering, counts)
                data = etree.tostring(root, encoding="utf-8", xml_declaration=True)
            elif name.endswith("comments.xml"):
                counts["comment"] += data.count(b"<w:comment ")
            rewritten.writestr(name, data)
    lost += [counted(count, what) for what, count in counts.items() if count]
    out.seek(0)
    return out


def _root(archive: zipfile.ZipFile, name: str) -> Any:
    """The root of an XML file; an empty element if the archive has no such file."""
    return parsed_xml(archive.read(name) if name in archive.namelist() else b"<none/>")


def _names_of_texts(archive: zipfile.ZipFile) -> Iterator[str]:
    yield "word/document.xml"
    for override in _root(archive, "[Content_Types].xml").iterfind("{*}Override"):
        if str(override.get("ContentType")).lower().endswith(_MAIN):
            yield str(override.get("PartName")).lstrip("/")


def _rewrite(root: Any, styles: Styles, numbering: Numbering, counts: Counter[str]) -> None:
    """Change one XML file of text in place."""
    notes = set[tuple[str, str]]()
    for choice in list(root.iter(CHOICE)):  # the same text as in the fallback, which mammoth reads
        _remove(choice)
    for element in list(root.iter(f"{W}*", f"{MATH}oMath")):
        match etree.QName(element).localname:
            case "p":
                _rewrite_paragraph(element, styles, numbering)
            case "r" if element.find("w:t", NS) is not None:
                _rewrite_run(element, styles, counts)
            case "br":
                element.attrib.pop(f"{W}type", None)  # of a page or a column
            case "fldSimple":
                _unwrap(element)
            case "ruby":
                _unwrap_ruby(element)
            case "footnoteReference" | "endnoteReference":
                key = (element.tag, str(element.get(f"{W}id")))
                if key in notes:  # a note is read once, where it is first
                    _remove(element)
                notes.add(key)
            case "oMath":
                _replace(element, _run(formula_text(element)))


def _rewrite_paragraph(paragraph: Any, styles: Styles, numbering: Numbering) -> None:
    """Put the number before the text, and make the paragraph a heading or an item of a list."""
    properties = paragraph.find("w:pPr", NS)
    style = styles.of(properties)
    label = numbering.label(properties)
    if properties is None:
        if label is None and not style.outline:
            return
        properties = etree.Element(f"{W}pPr")
        paragraph.insert(0, properties)
    is_heading = bool(_HEADING.fullmatch(style.name))
    if label is not None and label.text:
        properties.addnext(_run(f"{label.text} "))
    if is_heading:
        return
    level = styles.outline_level(properties)
    if level is not None and level < MOST_HEADINGS:
        _set_style(properties, f"Heading{level + 1}")
    elif label is not None:
        _set_style(properties, f"{ITEM}{label.level}")


def _rewrite_run(run: Any, styles: Styles, counts: Counter[str]) -> None:
    """Take out hidden text, and say of raised and lowered text what it is."""
    properties = run.find("w:rPr", NS)
    paragraph = next(run.iterancestors(f"{W}p"), None)
    if styles.is_hidden(properties, None if paragraph is None else paragraph.find("w:pPr", NS)):
        counts["hidden text"] += 1
        _remove(run)
    elif script := styles.script(properties):
        etree.SubElement(properties, f"{W}vertAlign").set(f"{W}val", script)


def _set_style(properties: Any, name: str) -> None:
    for old in properties.xpath("w:numPr | w:pStyle", namespaces=NS):
        properties.remove(old)
    style = etree.Element(f"{W}pStyle")
    style.set(f"{W}val", name)
    properties.insert(0, style)


def _run(text: str) -> Any:
    run = etree.Element(f"{W}r")
    inner = etree.SubElement(run, f"{W}t")
    inner.text = text
    inner.set("{http://www.w3.org/XML/1998/namespace}space", "preserve")
    return run


def _unwrap(element: Any) -> None:
    """Put the runs of an element in its place."""
    if element.getparent() is None:
        return
    for run in list(element):
        if run.tag != f"{W}fldData":
            element.addprevious(run)
    _remove(element)


def _unwrap_ruby(ruby: Any) -> None:
    """Put a text, and in brackets the reading beside it, in the place of the run that has them."""
    base = ruby.find("w:rubyBase", NS)
    place = ruby.getparent()
    if base is None or place is None or place.getparent() is None:
        return
    reading = "".join(text.text or "" for text in ruby.iterfind("w:rt//w:t", NS))
    for run in list(base):
        place.addprevious(run)
    if reading:
        place.addprevious(_run(f"({reading})"))
    _remove(place)


def _replace(element: Any, other: Any) -> None:
    if element.getparent().tag == f"{MATH}oMathPara":
        element = element.getparent()
    element.addprevious(other)
    _remove(element)


def _remove(element: Any) -> None:
    parent = element.getparent()
    if parent is not None:
        parent.remove(element)
