"""Text that is being put together from the parts of a page."""

from dataclasses import dataclass, field

from ..marks import Part, Place, joined

# What stands between two texts, from the weakest to the strongest.
GAPS = ("", " ", "\n", "\n\n")


@dataclass(slots=True)
class Buffer:
    """The text within an element that is taken as a whole. Of the gaps between two texts the
    strongest counts.
    """

    tag: str
    parts: list[Part] = field(default_factory=list)
    gap: str = ""
    mark: str = ""  # of a list's item, before its first text
    lead: str = ""  # the gap before the first text

    def separate(self, gap: str) -> None:
        """The next text stands at least `gap` away."""
        if not self.mark and GAPS.index(gap) > GAPS.index(self.gap):
            self.gap = gap

    def item(self, mark: str) -> None:
        """The next text begins an item."""
        self.mark = ""
        self.separate("\n")
        self.mark = mark

    def write(self, text: str, place: Place = Place.LINE) -> None:
        """Add a text."""
        if not self.parts:
            self.lead = self.gap
        before = f"{self.gap if self.parts else ''}{self.mark}"
        self.parts += ((before, Place.LINE), (text, place))
        self.gap = self.mark = ""

    @property
    def last(self) -> str:
        """What the next text is written behind; "" if there will be a gap."""
        return self.parts[-1][0] if self.parts and not self.gap and not self.mark else ""

    def take(self) -> str:
        """The text."""
        return joined(self.parts)
