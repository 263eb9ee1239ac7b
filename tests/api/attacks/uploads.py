"""Files that are small to send and much work to parse."""

import zlib
from collections.abc import Sequence
from functools import lru_cache

FORM_TYPE = "multipart/form-data; boundary=x"


# The last one made is kept: making one takes the clients' time, which must not count as the
# server's.
once = lru_cache(maxsize=1)


def pdf(objects: Sequence[bytes], root: int = 1) -> bytes:
    """A PDF of these objects, numbered from 1; `root` is the catalog's number."""
    data = bytearray(b"%PDF-1.4\n")
    offsets = []
    for number, content in enumerate(objects, start=1):
        offsets.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    start = len(data)
    data += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    data += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    data += b"trailer\n<< /Size %d /Root %d 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (
        len(objects) + 1,
        root,
        start,
    )
    return bytes(data)


def stream(content: bytes, entries: bytes = b"", level: int = 9) -> bytes:
    """A compressed stream."""
    packed = zlib.compress(content, level)
    return b"<< /Length %d /Filter /FlateDecode %s >>\nstream\n%s\nendstream" % (
        len(packed),
        entries,
        packed,
    )


FONT = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"


@once
def shared_stream_pdf(pages: int, lines: int) -> bytes:
    """A PDF whose pages all show the one stream of so many lines of text."""
    words = b"".join(
        b"1 0 0 1 %d %d Tm (Word %d of it) Tj\n" % (n % 500, n % 700, n) for n in range(lines)
    )
    return pages_pdf(pages, stream(b"BT /F1 9 Tf\n" + words + b"ET"))


@once
def inflating_pdf(pages: int, bytes_each: int) -> bytes:
    """A PDF whose pages show one stream of spaces that inflates to so many bytes."""
    return pages_pdf(pages, stream(b" " * bytes_each))


def pages_pdf(
    pages: int, content: bytes, resources: bytes = b"<< /Font << /F1 3 0 R >> >>"
) -> bytes:
    kids = b" ".join(b"%d 0 R" % (5 + n) for n in range(pages))
    page = (
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 800] /Resources %s /Contents 4 0 R >>"
        % resources
    )
    tree = b"<< /Type /Pages /Count %d /Kids [%s] >>" % (pages, kids)
    return pdf([b"<< /Type /Catalog /Pages 2 0 R >>", tree, FONT, content, *[page] * pages])


@once
def angle_brackets(count: int) -> bytes:
    return b"<" * count


@once
def many_lines(count: int) -> bytes:
    return b"".join(b'{"id": "%d", "text": "Line %d"}\n' % (n, n) for n in range(count))


@once
def deep_json(depth: int) -> bytes:
    """A document whose metadata is a list in a list in a list."""
    return (
        b'{"documents": [{"text": "x", "metadata": {"a": ' + b"[" * depth + b"]" * depth + b"}}]}"
    )


@once
def many_values(count: int) -> bytes:
    """A document whose metadata holds so many empty objects."""
    return (
        b'{"documents": [{"text": "x", "metadata": {"a": [' + b",".join([b"{}"] * count) + b"]}}]}"
    )


def form(files: Sequence[tuple[str, bytes]]) -> bytes:
    parts = [
        b'--x\r\ncontent-disposition: form-data; name="files"; filename="%s"\r\n\r\n%s\r\n'
        % (name.encode(), data)
        for name, data in files
    ]
    return b"".join(parts) + b"--x--\r\n"


@once
def many_parts(count: int) -> bytes:
    return form([("a.txt", b"x")] * count)
