"""What a waiting request will read, told to the store while it waits (CachedAttention section 3.3)."""

from dataclasses import dataclass, field

from .entry import Identity


@dataclass(frozen=True, slots=True)
class HintedEntry:
    """One entry that will be looked up."""

    identity: Identity
    token_ids: tuple[int, ...]
    size_bytes: int  # what it takes in memory, as far as can be known
    group: str = ""  # the conversation it is stored under; "" for a chunk, which stands alone
    key: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.identity.key(self.token_ids))


@dataclass(frozen=True, slots=True, eq=False)
class PrefetchHint:
    """All that one request will look up, in the order in which it is needed. Equal to itself alone."""

    entries: tuple[HintedEntry, ...] = ()

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups its entries belong to, as policies know them, each once."""
        return tuple(dict.fromkeys(wanted.group or wanted.key for wanted in self.entries))
