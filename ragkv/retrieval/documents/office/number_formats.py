"""Numbers and dates as a spreadsheet shows them: 0.075 in the format `0.0%` is "7.5%".

Two things are left as numbers are, because they differ between countries: digits are not grouped,
and dates stand as 1790-01-31. The format codes are those of ECMA-376, part 1, 18.8.31.
"""

import datetime
import re
from decimal import Decimal
from functools import lru_cache

# A part of a format code: a text in quotes, an escaped character, a bracket, or one character.
_TOKEN = re.compile(r'"([^"]*)"|\\(.)|_(.)|\*(.)|\[([^\]]*)\]|(General|E[+-]|AM/PM|A/P|.)', re.I)
_CURRENCY = re.compile(r"\$([^-]*)(?:-.*)?")
_DIGITS = "0#?"
MOST_DECIMALS = 30
LARGE = 1e21  # is written with an exponent


def shown(value: object, code: str) -> str:
    """The text of a cell's value in the format `code`; `None` is ""."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).upper()
        case int() | float():
            return _number(value, code)
        case datetime.datetime():
            return _moment(value, code)
        case datetime.timedelta():
            return _duration(value, code)
        case datetime.time():
            return value.isoformat("auto" if value.second else "minutes")
    return str(value)


@lru_cache(maxsize=1024)
def _sections(code: str) -> tuple[tuple[tuple[str, str], ...], ...]:
    """The sections of a code, for numbers above, below and at zero, as (kind, text) each.

    Kinds are "text", "bracket" and "code"; a space for the width of a letter is left out.
    """
    sections: list[list[tuple[str, str]]] = [[]]
    for found in _TOKEN.finditer(code):
        quoted, escaped, width, fill, bracket, other = found.groups()
        if width is not None or fill is not None:
            continue
        if bracket is not None:
            sections[-1].append(("bracket", bracket))
        elif other == ";":
            sections.append([])
        elif other is not None:
            sections[-1].append(("code", other))
        else:
            sections[-1].append(("text", quoted if quoted is not None else escaped))
    return tuple(map(tuple, sections))


def _number(value: float, code: str) -> str:
    sections = _sections(code or "General")[:3]
    section = sections[0]
    is_signed = value < 0
    if value < 0 and len(sections) > 1 and sections[1]:
        section = sections[1]
        is_signed = False
    elif value == 0 and len(sections) > 2 and sections[2]:
        section = sections[2]
    if any(kind == "bracket" and text[:1] in ("<", ">", "=") for kind, text in section):
        return _plain(value)
    codes = "".join(text for kind, text in section if kind == "code")
    if not abs(value) < LARGE:
        return _plain(value)
    if "E" in codes.upper() and "General" not in codes:
        return _with_texts(section, _scientific(value, codes))
    if not any(digit in codes for digit in _DIGITS) or "/" in codes:
        plain = _plain(value if section is sections[0] else abs(value))
        return _with_texts(section, plain if codes.strip("-+() ") or not section else "")
    scaled = Decimal(_plain(abs(value))) * 100 ** codes.count("%")
    last = max(codes.rfind(digit) for digit in _DIGITS)
    scaled /= 1000 ** (len(codes[last + 1 :]) - len(codes[last + 1 :].lstrip(",")))
    text = _filled(section, scaled)
    return f"-{text}" if is_signed and re.search("[1-9]", text) else text


def _filled(section: tuple[tuple[str, str], ...], value: Decimal) -> str:
    """The digits of a value in their places; texts between the places stay, as in "000-0000"."""
    codes = [text if kind == "code" else "" for kind, text in section]
    point = next((at for at, text in enumerate(codes) if text == "."), len(codes))
    whole = [at for at in range(point) if codes[at] and codes[at] in _DIGITS]
    decimals = [at for at in range(point, len(codes)) if codes[at] and codes[at] in _DIGITS]
    digits, _, fraction = f"{value:.{min(len(decimals), MOST_DECIMALS)}f}".partition(".")
    digits = digits.lstrip("0")
    optional = [at for at in decimals if codes[at] == "#"]
    fraction = (
        fraction.rstrip("0").ljust(len(decimals) - len(optional), "0") if optional else fraction
    )
    placed = dict(zip(decimals, fraction, strict=False))
    for at in reversed(whole):
        placed[at] = digits[-1:] or ("0" if codes[at] == "0" else "")
        digits = digits[:-1]
    if whole and not any(placed[at] for at in whole):
        placed[whole[-1]] = "0"
    first = whole[0] if whole else point
    out = []
    for at, (kind, text) in enumerate(section):
        if at == first:
            out.append(digits)
        if at in placed:
            out.append(placed[at])
        elif kind == "text" or (kind == "bracket" and _CURRENCY.fullmatch(text)):
            out.append(_literal(kind, text))
        elif kind == "code" and text not in (*_DIGITS, ",", "."):
            out.append(text)
        elif text == "." and kind == "code" and fraction:
            out.append(".")
    return "".join(out).strip()


def _with_texts(section: tuple[tuple[str, str], ...], number: str) -> str:
    """A number among the texts of a format without places."""
    before = True
    parts: tuple[list[str], list[str]] = ([], [])
    for kind, text in section:
        if kind == "code" and text not in "-+() ":
            before = False
        elif kind != "bracket" or _CURRENCY.fullmatch(text):
            parts[0 if before else 1].append(_literal(kind, text))
    return f"{''.join(parts[0])}{number}{''.join(parts[1])}".strip()


def _literal(kind: str, text: str) -> str:
    found = _CURRENCY.fullmatch(text) if kind == "bracket" else None
    return found.group(1) if found else text


def _scientific(value: float, codes: str) -> str:
    mantissa = codes.upper().partition("E")[0].partition(".")[2]
    return f"{value:.{min(MOST_DECIMALS, sum(one in _DIGITS for one in mantissa))}E}"


def _plain(value: float) -> str:
    """A number without the rounding errors of its last digits, and without an exponent."""
    short = format(value, ".15g")
    return f"{Decimal(short):f}" if abs(value) < LARGE else short


def _moment(value: datetime.datetime, code: str) -> str:
    """A date, a time or both, as the format shows."""
    low = "".join(text for part in _sections(code)[:1] for kind, text in part if kind == "code")
    low = low.lower()
    has_time = "h" in low or "s" in low
    has_date = "y" in low or "d" in low or not has_time
    parts = list[str]()
    if has_date:
        has_day = "d" in low or "m" not in low
        has_month = has_day or "m" in low
        parts.append(value.strftime("%Y-%m-%d" if has_day else "%Y-%m" if has_month else "%Y"))
        if low.strip("y -") == "":
            parts[-1] = f"{value.year}"
    if has_time:
        parts.append(value.strftime("%H:%M:%S" if "s" in low else "%H:%M"))
    return " ".join(parts)


def _duration(value: datetime.timedelta, code: str) -> str:
    """A length of time, whose hours may be more than a day: "36:00"."""
    total = round(value.total_seconds())
    sign = "-" if total < 0 else ""
    minutes, seconds = divmod(abs(total), 60)
    if "[s" in code.lower():
        return f"{sign}{abs(total)}"
    if "[m" in code.lower():
        return f"{sign}{minutes}:{seconds:02}"
    hours, minutes = divmod(minutes, 60)
    shown_seconds = f":{seconds:02}" if "s" in code.lower() or seconds else ""
    return f"{sign}{hours}:{minutes:02}{shown_seconds}"
