"""Subtitles (.srt, .vtt): what is said, one line for each cue, and who says it; no times."""

import html
import re
from collections.abc import Iterator

from ragkv.errors import DocumentError

from .reading import FileContent, Loaded

_TIMES = re.compile(r"(?<!\s)\s*+(?:[0-9]{1,4}:)?[0-9]{1,2}:[0-9]{2}[.,][0-9]{1,3}\s*+-->.*")
# Blocks of WebVTT that are not shown.
_HIDDEN = ("WEBVTT", "NOTE", "STYLE", "REGION")
_SPEAKER = re.compile(r"<v(?:\.[^\s<>]*)?\s+([^<>]+)>")
_TAG = re.compile(r"<[^<>]*>|\{\\[^{}]*\}")


def load_subtitles(content: FileContent) -> Loaded:
    """One document."""
    lines = list(_spoken(content.text()))
    if not lines:
        raise DocumentError(
            f"{content.path} holds no subtitles: no line says when a text is shown. Rename it to "
            ".txt to read it as it is."
        )
    yield content.document("\n".join(lines), {})


def _spoken(text: str) -> Iterator[str]:
    """What each cue adds to the one before: cues that roll up repeat its last lines."""
    before = list[str]()
    for block in re.split(r"\n[ \t]*\n", text.strip("\ufeff\n")):
        lines = block.split("\n")
        at = next((at for at, line in enumerate(lines[:3]) if _TIMES.fullmatch(line)), None)
        if at is None or (lines[0].startswith(_HIDDEN) and at > 1):
            continue
        shown = [_plain(line) for line in lines[at + 1 :]]
        new = [line for line in shown if line and line not in before[-3:]]
        before = shown
        if new:
            yield " ".join(new)


def _plain(line: str) -> str:
    named = _SPEAKER.sub(lambda found: f"{found.group(1).strip()}: ", line)
    return " ".join(html.unescape(_TAG.sub("", named)).split())
