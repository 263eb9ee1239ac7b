"""Layers (optional content) that are not shown when a PDF is opened: ISO 32000-2, 8.11.

PDFium does not say to which layer content belongs, only which names mark it. So pypdf reads the
layers, and marks hidden content with a name of ours, in changes that are added to the file's end.
PDFium then reads the changed file, and content with this name is left out of the text.
"""

import ctypes
import io
from collections.abc import Iterator, Mapping
from typing import Any

# What is hidden gets a name that begins so and ends with the names of its layers.
HIDDEN = "ragkv hidden content: "
# So many conditions of one membership are looked at; a file can write a few lines that have more.
MOST_CONDITIONS = 1000
FORM = 5  # PDFium's type of a form


class Layers:
    """Which layers of a file are on, by the numbers of their objects."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        said = root.get("/OCProperties", {})
        shown = said.get("/D", {})
        groups = list(said.get("/OCGs", ()))
        self.exist = bool(groups)
        self.told: set[str] = set()  # the names of layers that hide something
        self._named = {one.idnum: _name(one.get_object()) for one in groups}
        is_on = shown.get("/BaseState", "/ON") != "/OFF"
        self._off = set[int]() if is_on else set(self._named)
        self._off -= {one.idnum for one in shown.get("/ON", ())}
        self._off |= {one.idnum for one in shown.get("/OFF", ())}
        for usage in shown.get("/AS", ()):
            self._apply(usage.get_object())
        self._left = 0  # conditions that may be looked at

    def hiding(self, content: Any) -> str:
        """The names of the layers that hide content, by its entry `/OC` or its properties, which
        are a layer or a membership in layers; "" if it is shown.
        """
        self._left = MOST_CONDITIONS
        if not self.exist or content is None or self._shows(content):
            return ""
        number = getattr(content, "idnum", None)
        if number in self._named:
            return self._named[number]
        off = self._off.intersection(self._members(content.get_object()))
        return ", ".join(sorted({self._named[one] for one in off or self._named}))

    def _apply(self, usage: Mapping[str, Any]) -> None:
        """Switch layers as their usage says, as in a layer for printing alone."""
        if usage.get("/Event") != "/View" or "/View" not in usage.get("/Category", ()):
            return
        for one in usage.get("/OCGs", ()):
            state = one.get_object().get("/Usage", {}).get("/View", {}).get("/ViewState")
            if state == "/OFF":
                self._off.add(one.idnum)
            elif state == "/ON":
                self._off.discard(one.idnum)

    def _shows(self, content: Any) -> bool:
        number = getattr(content, "idnum", None)
        if number in self._named:
            return number not in self._off
        membership = content.get_object()
        if not isinstance(membership, dict) or membership.get("/Type") != "/OCMD":
            return True
        if condition := membership.get("/VE"):
            return self._holds(condition)
        on = [one not in self._off for one in self._members(membership)]
        match membership.get("/P", "/AnyOn"):
            case "/AllOn":
                return all(on)
            case "/AnyOff":
                return not on or not all(on)
            case "/AllOff":
                return not any(on)
        return not on or any(on)

    def _holds(self, condition: Any) -> bool:
        """Whether an expression holds: ["/And", ...], ["/Or", ...], ["/Not", one], or a layer."""
        self._left -= 1
        if self._left < 0:
            return True
        if getattr(condition, "idnum", None) in self._named:
            return condition.idnum not in self._off
        parts = condition.get_object()
        if not isinstance(parts, list) or not parts:
            return True
        inner = (self._holds(one) for one in parts[1:])
        match parts[0]:
            case "/Not":
                return not all(inner)
            case "/Or":
                return any(inner)
        return all(inner)

    def _members(self, membership: Mapping[str, Any]) -> list[int]:
        """The numbers of the layers of a membership."""
        given = raw_entry(membership, "/OCGs")
        is_one = given is None or getattr(given, "idnum", None) in self._named
        found = given if is_one else given.get_object()
        several = found if isinstance(found, list) else [found]
        numbers = [int(getattr(one, "idnum", -1)) for one in several]
        return [number for number in numbers if number in self._named]


def without_layers(pypdf: Any, data: bytes, layers: Layers) -> bytes:
    """The file, in which hidden content has the name `HIDDEN`; hidden forms are gone from it."""
    writer = pypdf.PdfWriter(io.BytesIO(data), incremental=True)
    changed = 0
    for resources in _resources(writer):
        for content in _references(resources, "/Properties").values():
            if names := layers.hiding(content):
                name = pypdf.generic.TextStringObject(f"{HIDDEN}{names}")
                content.get_object()[pypdf.generic.NameObject("/Name")] = name
                changed += 1
        for name, form in _references(resources, "/XObject").items():
            if names := layers.hiding(raw_entry(form.get_object(), "/OC")):
                layers.told.add(names)
                del resources["/XObject"][name]
                changed += 1
    if not changed:
        return data
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def _resources(writer: Any) -> Iterator[Any]:
    """The resources of each page and of each form on it, once."""
    seen = set[int]()
    for page in writer.pages:
        waiting = [page.get("/Resources")]
        while waiting:
            resources = waiting.pop()
            if not isinstance(resources, dict) or id(resources) in seen:
                continue
            seen.add(id(resources))
            forms = (one.get_object() for one in _references(resources, "/XObject").values())
            waiting += (one.get("/Resources") for one in forms if isinstance(one, dict))
            yield resources


def raw_entry(entries: Any, name: str) -> Any:
    """An entry as it stands in a dictionary, which may be a reference."""
    is_there = isinstance(entries, dict) and name in entries
    return entries.raw_get(name) if is_there else None


def _references(resources: Any, name: str) -> dict[str, Any]:
    """The resources of one kind by their names, unresolved if they are references."""
    entries = resources.get(name)
    return {key: raw_entry(entries, key) for key in entries} if isinstance(entries, dict) else {}


def _name(group: Any) -> str:
    name = group.get("/Name") if isinstance(group, dict) else None
    return str(name or "without a name")


def leave_out(pdfium: Any, page: Any) -> set[str]:
    """Switch off what is hidden on a page of PDFium. Returns the names of its layers."""
    raw = pdfium.raw
    left_out = set[str]()
    waiting = [
        raw.FPDFPage_GetObject(page, number) for number in range(raw.FPDFPage_CountObjects(page))
    ]
    while waiting:
        thing = waiting.pop()
        if hidden := {name for name in _names(raw, thing) if name.startswith(HIDDEN)}:
            raw.FPDFPageObj_SetIsActive(thing, False)
            left_out.update(name.removeprefix(HIDDEN) for name in hidden)
        elif raw.FPDFPageObj_GetType(thing) == FORM:
            inner = range(raw.FPDFFormObj_CountObjects(thing))
            waiting += (raw.FPDFFormObj_GetObject(thing, number) for number in inner)
    return left_out


def _names(raw: Any, thing: Any) -> set[str]:
    names = set[str]()
    for number in range(raw.FPDFPageObj_CountMarks(thing)):
        mark = raw.FPDFPageObj_GetMark(thing, number)
        size = ctypes.c_ulong()
        raw.FPDFPageObjMark_GetParamStringValue(mark, b"Name", None, 0, size)
        if size.value:
            buffer = (ctypes.c_ushort * (size.value // 2 + 1))()
            raw.FPDFPageObjMark_GetParamStringValue(mark, b"Name", buffer, size.value, size)
            names.add(bytes(buffer)[: size.value].decode("utf-16-le", "replace").rstrip("\0"))
    return names
