"""E-mail (.eml): the headers that people read, then the body. Attachments are named and not read."""

import email
import email.policy
from email.message import EmailMessage
from pathlib import Path

from ragkv.errors import DocumentError

from .html import text_of
from .limits import ParseLimits
from .reading import Loaded, document_of, parsing

HEADERS = ("Subject", "From", "To", "Date")


def load_mail(file: Path, data: bytes, encoding: str, limits: ParseLimits) -> Loaded:  # noqa: ARG001 - mail names its own
    """One document: its headers, and the plain body, or else the HTML body as text."""
    with parsing(file, "e-mail"):
        message = email.message_from_bytes(data, policy=email.policy.default)
        headers = {name: " ".join(str(message[name]).split()) for name in HEADERS if message[name]}
        body = _body(message, limits)
        attachments = [part.get_filename() or part.get_content_type() for part in message.iter_attachments()]
    if not headers and message.defects:
        raise DocumentError(f"{file} is not an e-mail: it has no headers. Rename it to .txt if it is text.")
    if not body and not headers:
        raise DocumentError(f"{file} holds no text. Remove it, or skip what cannot be read.")
    text = "\n".join(f"{name}: {value}" for name, value in headers.items())
    metadata = {"title": headers["Subject"]} if "Subject" in headers else {}
    shown = {"attachments": attachments} if attachments else {}
    yield document_of(file, f"{text}\n\n{body}".strip(), {**metadata, **shown})


def _body(message: EmailMessage, limits: ParseLimits) -> str:
    part = message.get_body(("plain", "html"))
    if part is None:
        return ""
    content = str(part.get_content()).replace("\r\n", "\n")
    return text_of(content, limits)[0] if part.get_content_type() == "text/html" else content.strip()
