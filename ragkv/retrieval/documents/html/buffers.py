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
    parts: list[str | Part] = field(default_factory=list)  # a text alone is on the line
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
        self.parts += (before, text if place is Place.LINE else (text, place))
        self.gap = self.mark = ""

    @property
    def last(self) -> str:
        """What the next text is written behind; "" if there will be a gap."""
        if not self.parts or self.gap or self.mark:
            return ""
        part = self.parts[-1]
        return part if isinstance(part, str) else part[0]

    def take(self) -> str:
        """The text."""
        return joined((part, Place.LINE) if isinstance(part, str) else part for part in self.parts)
