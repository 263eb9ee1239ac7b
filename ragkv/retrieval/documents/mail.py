"""E-mail (.eml): the headers that people read, then the body. Attachments are named and not read.

The standard library's parser finds the parts. This module decodes text that is not ASCII. Mail
often names no encoding, a wrong one, or one that only the web knows.
"""

import codecs
import email
import email.errors
import email.header
import email.policy
from collections.abc import Iterator
from email.message import Message

from ragkv.errors import DocumentError

from .html import declared_encoding, text_of
from .reading import AUTO, WESTERN, FileContent, Loaded, clean, codec_of, marked_encoding
from .text_tables import with_named_rows

HEADERS = ("Subject", "From", "To", "Date")
# Encoded words are decoded in headers of at most `HEADER_CHARS`: Python's decoder takes quadratic
# time.
HEADER_CHARS = 50_000


def load_mail(content: FileContent) -> Loaded:
    """One document: its headers, and the plain body, or else the HTML body as text; forwarded mails
    likewise.
    """
    mail = _Mail(content.encoding)
    data = content.data.removeprefix(codecs.BOM_UTF8)
    if marked_encoding(data):
        data = content.text().encode()
    with content.parsing("e-mail"):
        message = email.message_from_bytes(data, policy=email.policy.compat32)
        lines = with_named_rows(mail.text(message), is_markdown=False)
        text = "\n".join(content.bounded(lines))
        title = mail.header(message, "Subject")
    if not message.keys() and message.defects:
        raise DocumentError(
            f"{content.path} is not an e-mail: it has no headers. Rename it to .txt if it is text."
        )
    yield content.document(text, {"title": title, "attachments": mail.attachments}, mail.lost)


class _Mail:
    def __init__(self, encoding: str | None) -> None:
        self._encoding = encoding  # of text that names none, or none that is known
        self.attachments: list[str] = []
        self.lost: list[str] = []

    def text(self, message: Message) -> str:
        """The headers and the body of a message."""
        headers = [(name, self.header(message, name)) for name in HEADERS]
        head = "\n".join(f"{name}: {value}" for name, value in headers if value)
        return f"{head}\n\n{self._body(message)}".strip()

    def header(self, message: Message, name: str) -> str:
        """A header as people write it; "" if there is none."""
        raw = next(
            (value for found, value in message.raw_items() if found.lower() == name.lower()), ""
        )
        return self._words(str(raw))

    def _words(self, raw: str) -> str:
        """Text with encoded words ("=?utf-8?q?...?="), or with bytes that are not ASCII (as halves
        of surrogates).
        """
        text = self._decode(raw.encode("utf-8", "surrogateescape"), None)
        if "=?" in text and len(text) <= HEADER_CHARS:
            try:
                pieces = email.header.decode_header(text)
            except email.errors.HeaderParseError:  # it stays as it is
                pieces = [(text, None)]
            text = "".join(
                piece
                if isinstance(piece, str)
                else self._decode(piece, charset)
                if charset
                else piece.decode("raw_unicode_escape", "replace")  # as the library encoded it
                for piece, charset in pieces
            )
        return clean(" ".join(text.split()))

    def _body(self, part: Message) -> str:
        """The text of a part: of alternatives the first that is not blank, else all parts
        in order.
        """
        kind = part.get_content_type()
        name = part.get_filename()
        if part.get_content_disposition() == "attachment" or (name and not part.is_multipart()):
            self.attachments.append(self._words(str(name)) if name else kind)
            return ""
        if kind == "message/rfc822":
            return "\n\n".join(self.text(message) for message in _parts(part))
        if part.is_multipart():
            bodies = filter(None, map(self._body, _parts(part)))
            return (
                next(iter([*bodies]), "")
                if kind == "multipart/alternative"
                else "\n\n".join(bodies)
            )
        if part.get_content_maintype() != "text":
            self.attachments.append(kind)
            return ""
        data = bytes(part.get_payload(decode=True) or b"")
        charset = part.get_content_charset()
        if kind == "text/html":
            page = text_of(self._decode(data, charset or declared_encoding(data)))
            self.lost += page.lost
            return page.text
        return self._decode(data, charset).replace("\r\n", "\n").strip()

    def _decode(self, data: bytes, charset: str | None) -> str:
        """Text in the encoding that it names, or else in UTF-8, in the caller's encoding, or in the
        most common one.
        """
        named = charset if charset and charset.lower() not in ("us-ascii", "ascii") else None
        if named and codec_of(named) is None:
            self.lost.append(f"text in the unknown encoding {named!r} is read by guess")
        guesses = (
            named,
            marked_encoding(data),
            "utf-8",
            self._encoding if self._encoding != AUTO else None,
        )
        for codec in (codec_of(guess) for guess in guesses if guess):
            try:
                return data.decode(codec) if codec else data.decode("ascii")
            except UnicodeDecodeError:
                continue
        if self._encoding is None:
            self.lost.append(f"text that names no encoding, or a wrong one, is read as {WESTERN}")
        return data.decode(WESTERN, "replace")


def _parts(part: Message) -> Iterator[Message]:
    payload = part.get_payload()
    yield from (
        (inner for inner in payload if isinstance(inner, Message))
        if isinstance(payload, list)
        else ()
    )
