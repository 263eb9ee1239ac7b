"""Ten ways in which applications write retrieved passages into a prompt, and fifty passages."""

import html
import json
import random
import textwrap
from collections.abc import Callable, Sequence

_PLACES = (
    "Oró", "Irvburg", "Neltham", "Sankt Åsa", "Kvarn", "Dol & Sons' Quay", "Mirren", "Ost-Heide", "Pell", "Umbra",
)  # fmt: skip
_TRADES = (
    'the "old" ropewalk', "a mill\nwith two wheels", "the <lower> harbour", "a school for "
                                                                            "pilots", "the salt store",
)  # fmt: skip


def passages() -> list[str]:
    """Fifty passages with quotes, umlauts, line breaks and brackets."""
    made = []
    for number, place in enumerate(_PLACES):
        for at, trade in enumerate(_TRADES):
            year = 1700 + 7 * number + at
            made.append(
                f"In {year} the people of {place} built {trade}; it cost {number * 5 + at + 3} "
                "marks & a year.\n"
                f"Its keeper was called Tam {chr(65 + number)}{chr(97 + at)}rel, and the town "
                "remembers it."
            )
    return made


def _numbered(texts: Sequence[str]) -> str:
    return "\n".join(f"[{number}] {text}" for number, text in enumerate(texts, 1))


def _titled(texts: Sequence[str]) -> str:
    return "\n\n".join(
        f"Title: Document {number}\nContent: {text}" for number, text in enumerate(texts, 1)
    )


def _xml(texts: Sequence[str]) -> str:
    return "".join(
        f'<document index="{number}">\n{text}\n</document>\n'
        for number, text in enumerate(texts, 1)
    )


def _json(texts: Sequence[str]) -> str:
    return json.dumps([{"id": number, "text": text} for number, text in enumerate(texts, 1)])


def _html(texts: Sequence[str]) -> str:
    return "\n".join(f"<li>{html.escape(text)}</li>" for text in texts)


def _indented(texts: Sequence[str]) -> str:
    return "\n".join(textwrap.indent(text, "    ") for text in texts)


def _markdown_list(texts: Sequence[str]) -> str:
    return "\n".join("- " + text.replace("\n", "\n  ") for text in texts)


def _table(texts: Sequence[str]) -> str:
    rows = (
        f"| {number} | {text.replace(chr(10), '<br>')} |" for number, text in enumerate(texts, 1)
    )
    return "\n".join(["| no | text |", "|---|---|", *rows])


def _reordered(texts: Sequence[str]) -> str:
    return "\n\n".join(random.Random(len(texts)).sample(list(texts), len(texts)))


TEMPLATES: dict[str, Callable[[Sequence[str]], str]] = {
    "plain": "\n\n".join,
    "numbered": _numbered,
    "titled": _titled,
    "XML": _xml,
    "JSON": _json,
    "HTML": _html,
    "indented": _indented,
    "markdown list": _markdown_list,
    "table": _table,
    "reordered": _reordered,
}
