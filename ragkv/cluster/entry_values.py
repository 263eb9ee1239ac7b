"""The values of one entry on shared storage: the head and the layers of its record, one value a
layer group.

    value 0    [the record's head, which names the layers of a group][the layers of group 0]
    value n    [the layers of group n]

The head has identity and token ids, so that a lookup proves a hit before a layer is loaded. It also
has the checksum of every layer. So values of two replicas may be mixed if they computed the same
bytes. Any other mixture is detected. Checksums are xxh3_128, against damage. Under a secret they
are the first half of an HMAC-SHA256 (twice as fast here as keyed blake2b), and a process without
the secret cannot write a value that verifies.
"""

import hashlib
import hmac
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ragkv.errors import EntryDamagedError
from ragkv.store.entry import EntryInfo, EntryKey, StoredEntry
from ragkv.store.record import CHECKSUM_CHARS, Bytes, Digest, RecordHead, checksum, record_of
from ragkv.store.record import parse_head as parse_record_head


def digest_of(secret: str | None) -> Digest:
    """What makes the checksums: with a `secret`, bytes that verify were written by a process that
    has it.
    """
    if secret is None:
        return checksum
    key = hashlib.blake2b(secret.encode(), digest_size=32).digest()
    # releases the GIL
    return lambda data: hmac.new(key, data, "sha256").hexdigest()[:CHECKSUM_CHARS]


@dataclass(frozen=True, slots=True)
class RemoteHead:
    """The head of an entry, verified, and how its layers lie in values."""

    record: RecordHead
    # for a bad part
    dropped: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)

    @property
    def info(self) -> EntryInfo:
        """The entry without its tensors."""
        return self.record.info

    @property
    def layer_groups(self) -> int:
        """The number of the entry's values."""
        return -(-self.info.layers // self.record.layers_per_value)

    @property
    def content_digest(self) -> bytes:
        """The digest of all that this writing of the entry holds, with which its head begins."""
        return self.record.checksum.encode()

    def layers_of(self, layer_group: int) -> range:
        """The layers in `layer_group`; the last group may have fewer."""
        first = layer_group * self.record.layers_per_value
        step = self.record.layers_per_value
        return range(first, min(self.info.layers, first + step))

    def place_of(self, layer_group: int) -> tuple[int, int]:
        """Where the layers of a group begin in its value, and how many bytes they have."""
        start = 0 if layer_group else self.record.head_bytes
        return start, len(self.layers_of(layer_group)) * self.record.layer_bytes

    def check(self, layer_group: int, payload: Bytes) -> None:
        """Raise `EntryDamagedError` unless `payload` is exactly the layers that were written with
        this head.
        """
        size = self.record.layer_bytes
        if len(payload) != len(self.layers_of(layer_group)) * size:
            raise EntryDamagedError(
                self.info.key, f"layer group {layer_group} has not the bytes that were written"
            )
        for number, layer in enumerate(self.layers_of(layer_group)):
            self.record.check_layer(layer, memoryview(payload)[number * size : (number + 1) * size])


def pack(entry: StoredEntry, group_bytes: int, digest: Digest) -> list[bytes]:
    """The values of `entry`, one a layer group: a group has the fewest layers that make
    `group_bytes`.
    """
    step = max(1, -(-group_bytes // max(1, entry.size_bytes // entry.info.layers)))
    head, layers = record_of(entry, digest, layers_per_value=step)
    groups = [layers[first : first + step] for first in range(0, len(layers), step)]
    return [b"".join((head, *groups[0])), *(b"".join(group) for group in groups[1:])]


def parse_head(
    key: EntryKey, start: Bytes, first: Callable[[int], bytes], digest: Digest
) -> RemoteHead:
    """The verified head of a value that begins with `start`; `first(n)` returns its first n bytes,
    or all it has.

    Raises `EntryDamagedError`.
    """
    head = parse_record_head(key, bytes(start), first, digest)
    if head.layers_per_value < 1:
        raise EntryDamagedError(key, "its head is not that of a value")
    return RemoteHead(head)
