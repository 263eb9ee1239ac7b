"""Invented names, split into names seen in training and names held out.

A name is a first syllable, sometimes a middle one, and an ending that depends on its kind (a man's
name ends differently from a woman's, a city's from a company's). This file knows nothing of worlds
or of tokens.

Invariant: `is_held_out` is a function of the name alone, so a name held out here is held out in
every run.
"""

from __future__ import annotations

import zlib
from enum import Enum
from random import Random
from typing import Literal

NameSplit = Literal["train", "heldout", "any"]


class Kind(Enum):
    """The kind of thing that has the name; it decides the name's ending."""

    MAN = "man"
    WOMAN = "woman"
    COMPANY = "company"
    CITY = "city"
    COUNTRY = "country"
    EVENT = "event"
    CODE = "code"


def words(text: str) -> tuple[str, ...]:
    """The words of a text: makes lists of words readable without quotes."""
    return tuple(text.split())


FIRST = words(
    "Tal Bren Mor Zek Quin Lir Vas Dor Hal Fen Gar Jun Kel Nor Pel Ras Sil Tor Ulm Ver Wex Yar "
    "Zan Bal Cor Dran Eld "
    "Fos Gil Hurn Ist Jas Kor Lam Mel Nim Osk Pra Rul Sten Tig Urs Vel Wim Yol Zor Ald Bir Cas "
    "Der Ens Fal Gor Hest "
    "Ing Jor Kam Lun Mar Nes Orl Pon Rem Sor Tam Uld Vin Wol Yst Zim Arn Bos Cul Dim Ebb Fin Gul "
    "Hob Ilk Jel Kir Lod "
    "Mun Nal Ost Pik Rov Sal Tul Umb Vor Wen Yed Zul Ack Bel Cad Dus Erl Fir Gat Hin Irv Jod Kos "
    "Les Mik Nad Opp Pir "
    "Rad Sev Tes Ung Vid War"
)
MIDDLE = words("ar el in or am ud ev is ok al en ur ib om")
ENDINGS: dict[Kind, tuple[str, ...]] = {
    Kind.MAN: words("o us ric ald ton win mund dor"),
    Kind.WOMAN: words("a ia elle ina ette issa une wyn"),
    Kind.COMPANY: words("corp tex soft max dyne works lab tron co gen"),
    Kind.CITY: words("ville stad burg mouth ford haven dale gate bridge minster"),
    Kind.COUNTRY: words("land onia istan mark avia eria reich desh"),
    Kind.EVENT: words("fest fair con gala rally fete"),
    Kind.CODE: words("ix ox ax yx zar que"),
}
_HELD_OUT_SHARE = 6  # one name in six


def is_held_out(name: str) -> bool:
    """Whether training never sees this name."""
    return zlib.crc32(name.encode()) % _HELD_OUT_SHARE == 0


class NameGenerator:
    """Draws the names of one world, never the same twice."""

    def __init__(self, random: Random, split: NameSplit, middle_share: float = 0.25) -> None:
        self._random = random
        self._split = split
        self._middle_share = middle_share
        self._taken: set[str] = set()

    def draw(self, kind: Kind) -> str:
        """A new name of this kind, from the generator's side of the split."""
        while True:
            middle = (
                self._random.choice(MIDDLE) if self._random.random() < self._middle_share else ""
            )
            name = self._random.choice(FIRST) + middle + self._random.choice(ENDINGS[kind])
            wanted = self._split == "any" or is_held_out(name) == (self._split == "heldout")
            if wanted and name not in self._taken:
                self._taken.add(name)
                return name
