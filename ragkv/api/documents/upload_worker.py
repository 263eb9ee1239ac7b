"""The process that parses uploads: `python -m ragkv.api.documents.upload_worker`. The server starts and kills it.

A request is what is known of the upload, as JSON, and its body. The answer is a JSON value and the documents' texts.
"""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict

from ragkv.retrieval import Document
from ragkv.runtime.worker_process import answer_requests

from .upload_parsing import Upload, UploadError, parse_upload

with contextlib.suppress(ImportError):
    import pypdf  # noqa: F401 - an extra, loaded before the first request so that it counts against no budget

_TEXT = ("utf-8", "surrogatepass")  # the index refuses half characters, and says where they are


def encode_documents(documents: Sequence[Document]) -> list[bytes]:
    """The answer that says these documents."""
    heads = [{**asdict(document), "text": ""} for document in documents]
    return [json.dumps({"documents": heads}).encode(), *(document.text.encode(*_TEXT) for document in documents)]


def decode_documents(answer: Sequence[bytes]) -> list[Document]:
    """The documents of an answer. Raises `UploadError` with the child's reason, and `ValueError` for a wrong answer."""
    head, *texts = answer
    found = json.loads(head)
    if "refused" in found:
        raise UploadError(**found["refused"])
    return [
        Document(one["id"], text.decode(*_TEXT), one["source"], one["metadata"], tuple(one["page_starts"]))
        for one, text in zip(found["documents"], texts, strict=True)
    ]


def answer(request: list[bytes]) -> list[bytes]:
    """Parse one upload."""
    known, body = request
    try:
        return encode_documents(parse_upload(Upload.from_dict(json.loads(known)), body))
    except UploadError as error:
        refused = {name: getattr(error, name) for name in ("status", "message", "param", "code")}
        return [json.dumps({"refused": refused}).encode()]


if __name__ == "__main__":
    answer_requests(answer)
