"""Word files with numbered paragraphs, made from WordprocessingML."""

import io

NAMES = (
    'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main" '
    'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"'
)


def word_with_lists(body: str, levels: list[str], starts: str = "", styles: str = "") -> bytes:
    """A Word file with one list, 1, of these levels, and a list 2 that counts on from it but for
    `starts`.
    """
    import docx as library
    from docx.oxml import parse_xml

    document = library.Document()
    own = document.element.body
    for element in list(parse_xml(f"<w:body {NAMES}>{body}</w:body>")):
        own.insert(len(own) - 1, element)
    lists = (
        f'<w:abstractNum w:abstractNumId="7">{"".join(levels)}</w:abstractNum>'
        '<w:num w:numId="1"><w:abstractNumId w:val="7"/></w:num>'
        f'<w:num w:numId="2"><w:abstractNumId w:val="7"/>{starts}</w:num>'
    )
    numbering = document.part.numbering_part.element
    for element in list(numbering):
        numbering.remove(element)
    for element in list(parse_xml(f"<w:numbering {NAMES}>{lists}</w:numbering>")):
        numbering.append(element)
    for element in list(parse_xml(f"<w:styles {NAMES}>{styles}</w:styles>")):
        document.styles.element.append(element)
    out = io.BytesIO()
    document.save(out)
    return out.getvalue()


def level(at: int, kind: str, text: str, start: int = 1, more: str = "") -> str:
    """WordprocessingML of a level of a list."""
    return (
        f'<w:lvl w:ilvl="{at}"><w:start w:val="{start}"/><w:numFmt w:val="{kind}"/>{more}'
        f'<w:lvlText w:val="{text}"/></w:lvl>'
    )


def item(text: str, at: int | None = None, number: int = 1, style: str = "") -> str:
    """WordprocessingML of a paragraph, at a level of list `number`."""
    named = f'<w:pStyle w:val="{style}"/>' if style else ""
    place = f'<w:ilvl w:val="{at}"/><w:numId w:val="{number}"/>'
    listed = "" if at is None else f"<w:numPr>{place}</w:numPr>"
    return f"<w:p><w:pPr>{named}{listed}</w:pPr><w:r><w:t>{text}</w:t></w:r></w:p>"
