"""Checks arguments of callers, before any work. Pure Python."""

from ragkv.errors import InputError

_IN_WORDS = {
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "NoneType": "None",
    "Iterable": "a list",
}


def check_kind(name: str, value: object, *kinds: type) -> None:
    """Raise `InputError` unless what a caller gave as `name` is of one of `kinds`."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(_IN_WORDS.get(kind.__name__, kind.__name__) for kind in kinds)
        raise InputError(f"{name} must be {wanted}, not {value!r:.80}.")


def check_words(name: str, value: object) -> None:
    """Raise `InputError` unless what a caller gave as `name` is a text that is not blank."""
    check_kind(name, value, str)
    if not str(value).strip():
        raise InputError(f"The {name} is empty. Give at least one word.")
