"""Gives the text that a reader sees. Removes orders to a terminal and control characters, and
resolves escapes of programs and of JSON, and references to characters.

All text formats use this module. It never replaces an escape by ASCII, so JSON, CSV and markup keep
their meaning.
"""

import html
import re
from itertools import zip_longest

# All control characters but tab and line feed.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# Orders to a terminal that the library does not take: a character of another set, and a string.
_MORE_ORDERS = re.compile(r"\x1b[NO].|\x1bX[^\x1b]*\x1b\\")
# An order that begins with the character U+009B, as terminals of 8 bits have it.
# With numbers alone: the same byte is a quotation mark of Western text.
_OF_8_BITS = re.compile(r"\x9b[0-9;?]+[A-Za-z]")
_C1 = range(0x80, 0xA0)
_AS_ORDERS = {code: f"\x1b{chr(code - 0x40)}" for code in _C1}
# Other texts mean letters and quotes of windows-1252 by these codes, read as ISO 8859-1.
_AS_LETTERS = {code: bytes([code]).decode("cp1252", "ignore") for code in _C1}
_SHOWN = {0x0B: "\n", 0x0C: "\n", 0x1C: "\n", 0x1D: "\n", 0x1E: "\n", 0x1F: " "}
_PLAIN_CONTROLS = {**dict.fromkeys([*range(0x09), *range(0x0E, 0x20), 0x7F], ""), **_SHOWN}

_UNICODE = (
    r"u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}"
    r"|u\{[0-9a-fA-F]{1,6}\}|U[0-9a-fA-F]{8}"
)
_BYTES = r"(?:\\x[89a-fA-F][0-9a-fA-F])+|(?:\\[23][0-7]{2}){2,}"
# An escape behind an even number of backslashes, which stand for others.
_ESCAPE = re.compile(rf"(?<!\\)((?:\\\\)*+)(\\(?:{_UNICODE})|{_BYTES})")
# JSON within JSON has more backslashes.
_NESTED = re.compile(
    r"(?<!\\)\\{2,}+(u[dD][89abAB][0-9a-fA-F]{2}\\++u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4})"
)
_LITERAL = re.compile(r'(?<!\\)"(?:[^"\\\n]|\\.)*+"')
# The characters around the value of a field, or around an argument.
_BEFORE_VALUE = (":", "=", "(", "[", "{", ",")
_BEHIND_VALUE = (":", ",", ")", "]", "}")
_REFERENCE = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,30});")


def without_controls(text: str) -> str:
    """`text` without orders to a terminal and control characters, and without what was struck
    over.
    """
    if not _CONTROL.search(text):
        return text
    if _OF_8_BITS.search(text):
        text = text.translate(_AS_ORDERS)
    if "\x1b" in text:
        from wcwidth import strip_sequences  # takes a twentieth of a second

        text = strip_sequences(_MORE_ORDERS.sub("", text))
    if "\x08" in text:
        text = _without_struck(text)
    is_western = any("\x80" <= char <= "\x9f" and char != "\x85" for char in set(text))
    text = text.translate(_AS_LETTERS) if is_western else text.replace("\x85", "\n")
    return text.translate(_PLAIN_CONTROLS)


def unescaped(text: str, of_program: bool) -> str:
    """`text` with the letters that escapes stand for. An escape of anything else stays.

    Text for people may be about escapes. So there only those within words are resolved, and those
    in values of JSON and of programs. In text of a program, or for one, all are.
    """
    if "\\" not in text:
        return text
    text = _LITERAL.sub(lambda found: _literal(found, of_program), text)
    return _ESCAPE.sub(
        lambda found: _letters(found) if _is_meant(found, of_program) else found.group(), text
    )


def with_letters(text: str) -> str:
    """`text` with the characters that references such as `&uuml;` stand for; those of ASCII stay,
    they would be markup.
    """
    return _REFERENCE.sub(_referred, text) if "&" in text else text


def _without_struck(text: str) -> str:
    """A terminal goes back for each U+0008, and writes over what stands there."""
    parts = re.split("(\x08+)", text)
    return "".join(
        before[: max(0, len(before) - len(back))]
        for before, back in zip_longest(parts[::2], parts[1::2], fillvalue="")
    )


def _letters(found: re.Match[str]) -> str:
    """The letters of an escape behind its backslashes, or the escape."""
    before, escape = found.groups()
    text = _decoded(escape) if escape[1] in "uU" else _of_bytes(found, escape)
    return before + text if text and _is_plain(text) else found.group()


def _is_meant(found: re.Match[str], of_program: bool) -> bool:
    """Whether an escape outside of quotes is one: no name of a folder, as in "D:\\ubeda"; in text
    for people it belongs to a word.
    """
    if found.group(2)[1:].isalpha():
        return False
    return of_program or any(map(str.isalpha, _around(found)))


def _around(found: re.Match[str]) -> str:
    """The characters before and behind a match."""
    text = found.string
    return text[max(0, found.start() - 1) : found.start()] + text[found.end() : found.end() + 1]


def _nested_letter(found: re.Match[str]) -> str:
    text = _decoded(found.group(1))
    return text if _is_plain(text) else found.group()


def _decoded(escape: str) -> str:
    """The character of an escape of Unicode, or of the two halves of one."""
    units = [int(unit, 16) for unit in re.findall("[0-9a-fA-F]+", escape)]
    if len(units) == 2:
        high, low = units
        return chr(0x10000 + ((high - 0xD800) << 10) + low - 0xDC00)
    return chr(units[0]) if units[0] <= 0x10FFFF else ""


def _of_bytes(found: re.Match[str], escape: str) -> str:
    """Bytes of UTF-8 as text; a single one, if it is a letter within a word, as ISO 8859-1."""
    base = 16 if escape[1] == "x" else 8
    data = bytes(int(code, base) for code in escape.replace("x", "").split("\\")[1:])
    try:
        return data.decode()
    except UnicodeDecodeError:
        text = data.decode("latin-1")
        return text if len(text) == 1 and text.isalpha() and _around(found).isalpha() else ""


def _literal(found: re.Match[str], of_program: bool) -> str:
    """A text in quotes, with letters for its escapes if it is a value; in text for people one with
    more than escapes.
    """
    literal = found.group()
    if "\\" not in literal:
        return literal
    text = found.string
    before = text[max(0, found.start() - 8) : found.start()].rstrip(" \t")[-1:]
    behind = text[found.end() : found.end() + 8].lstrip(" \t")[:1]
    is_value = before in _BEFORE_VALUE or behind in _BEHIND_VALUE
    is_word = of_program or any(map(str.isalnum, _ESCAPE.sub("", literal)))
    if not is_value or not is_word:
        return literal
    literal = _ESCAPE.sub(_letters, literal)
    return _NESTED.sub(_nested_letter, literal) if '\\"' in literal else literal


def _referred(found: re.Match[str]) -> str:
    text = html.unescape(found.group())
    if text == "\xa0":
        return " "
    return text if _is_plain(text) else found.group()


def _is_plain(text: str) -> bool:
    return all(
        char.isprintable() and char > "\x7f" and not "\ud800" <= char < "\ue000" for char in text
    )
