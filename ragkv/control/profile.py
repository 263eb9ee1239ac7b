"""A profile: the measured speeds of one model on one machine, from which the controller estimates
(CacheBlend 5.1).

`ragkv profile` measures it once and saves it next to the store. It is valid only for its model,
dtype, device and machine. Any other use is refused, and the message has the differences. The paper
takes a share of one figure, `Prefill(LLM, L)`. Here recompute has its own fit, because a row costs
more in a small pass than in a large one. Times in seconds.
"""

import hashlib
import json
import logging
import math
import typing
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from ragkv.errors import ProfileError
from ragkv.runtime import DAMAGED, make_private_folder, read_own, replace_file
from ragkv.runtime.setting_values import build

log = logging.getLogger(__name__)

FILE_NAME = "profile.json"
NO_PROFILE = "No profile in {} yet: an idle server measures one, or `ragkv profile` now."
VERSION = 4
# the bound where a prefill's time does not depend on its length
MOST_TOKENS = 2**31


@dataclass(frozen=True, slots=True)
class Subject:
    """The model and the machine that were measured. Digests are those of an entry's `Identity`."""

    weights: str
    architecture: str
    rope: str
    dtype: str
    codec: str  # of stored entries: decoding is a part of loading
    machine: str  # the machine's name
    cpu: str  # its processor's model
    threads: int  # compute threads
    device: str  # "cpu", or the GPU's name
    version: int = VERSION
    packed_bytes: int = 0  # of copies of weights, see `model/cpu/packing.py`
    torch: str = ""  # its version
    storage: str = ""  # the file system of the disk tier

    @property
    def key(self) -> str:
        """Hex digest under which a profile is saved."""
        return hashlib.blake2b(
            json.dumps(asdict(self), sort_keys=True).encode(), digest_size=16
        ).hexdigest()

    def differences(self, other: Self) -> tuple[str, ...]:
        """The fields that differ in `other`, such as "threads is 2, not 8"."""
        pairs = (
            (field.name, getattr(self, field.name), getattr(other, field.name))
            for field in fields(self)
        )
        return tuple(
            f"{name} is {_short(mine)}, not {_short(its)}"
            for name, mine, its in pairs
            if mine != its
        )


@dataclass(frozen=True, slots=True)
class TimedPoint:
    """One measurement of a tier."""

    size: int  # bytes of a slice that readers deliver together with many others
    measured_s: float


@dataclass(frozen=True, slots=True)
class LengthFit:
    """A time as a function of the length: fixed + per_token S + per_token_squared S^2."""

    fixed_s: float
    per_token_s: float
    per_token_squared_s: float

    def at(self, tokens: float) -> float:
        """Seconds at that length."""
        return self.fixed_s + tokens * (self.per_token_s + tokens * self.per_token_squared_s)


@dataclass(frozen=True, slots=True)
class RecomputeFit:
    """Time of one layer over R rows and S keys: fixed + per_key S + per_row R + per_row_key R S."""

    fixed_s: float
    per_key_s: float  # masks, and reading the keys, which does not depend on the rows
    per_row_s: float
    per_row_key_s: float

    def at(self, rows: float, keys: float) -> float:
        """Seconds of one layer."""
        return self.fixed_s + self.per_key_s * keys + rows * self.row_s(keys)

    def row_s(self, keys: float) -> float:
        """Seconds of one more row."""
        return self.per_row_s + self.per_row_key_s * keys


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """How fast a tier delivers slices: a fit, latency + bytes, and measurements at some sizes."""

    latency_s: float
    # 0 if slices are used in place, or if the bytes' share of the time is too small to measure
    per_byte_s: float
    points: tuple[TimedPoint, ...] = ()  # by ascending size
    # by which reading a byte delays what is computed meanwhile: checking and unpacking it
    hindered_s_per_byte: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth; infinite if reading takes no time that depends on the bytes."""
        return 1.0 / self.per_byte_s if self.per_byte_s else math.inf

    def times(self, factor: float) -> "TierSpeed":
        """A tier that delivers `factor` times as late; the processor's part stays."""
        points = tuple(
            replace(point, measured_s=point.measured_s * factor) for point in self.points
        )
        return replace(
            self,
            latency_s=self.latency_s * factor,
            per_byte_s=self.per_byte_s * factor,
            points=points,
        )

    def slice_s(self, size: float) -> float:
        """Seconds of a slice of `size` bytes: interpolated between the measured sizes, beyond them
        by the fit.

        Measurements come first because disks and threads have steps that no single fit follows.
        """
        if not self.points:
            return self.latency_s + size * self.per_byte_s
        low = 0.0
        low_s = min(self.latency_s, self.points[0].measured_s)
        for point in self.points:
            if size <= point.size:
                return low_s + (point.measured_s - low_s) * (size - low) / (point.size - low)
            low = point.size
            low_s = point.measured_s
        return low_s + (size - low) * self.per_byte_s


@dataclass(frozen=True, slots=True)
class Profile:
    """Speeds of one model on one machine."""

    subject: Subject
    layers: int  # L
    kv_bytes_per_token: int  # over all layers, in the model's dtype
    stored_bytes_per_token: float  # the same, as stored by the codec
    prefill: LengthFit  # full prefill of S tokens
    recompute: RecomputeFit  # one layer of a selective pass
    place_token_layer_s: float  # rotating and copying one token's KV in one layer
    start_s: float  # of a request of any size: embedding, logits of one row
    tiers: Mapping[str, TierSpeed]  # by tier kind: "memory", "disk"
    copy_bytes_per_s: float | None = None  # host to device; None on a CPU

    def __post_init__(self) -> None:
        for name, value in _numbers(asdict(self), ""):
            if not math.isfinite(value) or value < 0:
                raise ProfileError(
                    f"{name} is {value}; it must be finite and not negative. Measure again."
                )
        if min(self.layers, self.kv_bytes_per_token) < 1 or 0 in (
            self.stored_bytes_per_token,
            self.copy_bytes_per_s,
        ):
            raise ProfileError(
                "A profile needs at least one layer, one byte a token and a copy bandwidth above 0."
            )

    def corrected(self, factor: float, tiers: Mapping[str, TierSpeed]) -> "Profile":
        """Of a machine on which computing takes `factor` times as long, and reading is as fast as
        `tiers`.
        """
        return replace(
            self,
            tiers=tiers,
            prefill=LengthFit(*(factor * value for value in astuple(self.prefill))),
            recompute=RecomputeFit(*(factor * value for value in astuple(self.recompute))),
            place_token_layer_s=factor * self.place_token_layer_s,
            start_s=factor * self.start_s,
        )

    def tokens_within(self, ttft_s: float) -> int:
        """The most tokens of a prompt whose prefill takes `ttft_s` at most (xi of the T-LRU paper);
        0 if none does.
        """
        fit = self.prefill
        missing = self.prefill.fixed_s - ttft_s
        if missing >= 0.0:
            return 0
        if not fit.per_token_squared_s:
            return int(-missing / fit.per_token_s) if fit.per_token_s else MOST_TOKENS
        root = math.sqrt(fit.per_token_s**2 - 4 * fit.per_token_squared_s * missing)
        return int((root - fit.per_token_s) / (2 * fit.per_token_squared_s))

    def xi_blocks(self, ttft_target_ms: float, block_tokens: int) -> int:
        """The blocks of a conversation that a turn may compute within its target: T-LRU's xi."""
        tokens = self.tokens_within(ttft_target_ms / 1e3)
        log.info("store.ttft_target_ms = %g: xi is %d tokens.", ttft_target_ms, tokens)
        if tokens < block_tokens:
            what = "Within %g ms no block of %d tokens is computed: policies work as LRU."
            log.warning(what, ttft_target_ms, block_tokens)
        return tokens // block_tokens

    def tier(self, name: str) -> TierSpeed:
        """The speed of a tier; raises `ProfileError` with the measured tiers' names."""
        if name not in self.tiers:
            known = ", ".join(sorted(self.tiers))
            raise ProfileError(
                f"The profile has no tier {name!r}; it has {known}. Measure again: `ragkv profile`."
            )
        return self.tiers[name]

    def check(self, subject: Subject) -> None:
        """Raise `ProfileError` with the differences unless this was measured on `subject`."""
        if different := self.subject.differences(subject):
            raise ProfileError(
                f"The profile is of another model or machine: {'; '.join(different)}. Measure: "
                "`ragkv profile`."
            )

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """A profile from nested mappings, as `asdict` makes them; raises `ProfileError`."""
        try:
            return typing.cast(Self, build(cls, values))
        except DAMAGED as error:
            raise ProfileError(
                f"Not a profile of this version ({error}). Measure: `ragkv profile`."
            ) from error


def save(profile: Profile, directory: str | Path) -> Path:
    """Save `profile` in `directory`, replacing an earlier one of the same subject; returns the
    file's path.
    """
    return save_measurement(Path(directory) / FILE_NAME, profile.subject.key, asdict(profile))


def load(directory: str | Path, subject: Subject) -> Profile:
    """The profile of `subject` saved in `directory`.

    Raises `ProfileError` if there is none; if there are profiles of other subjects, it says how the
    nearest differs.
    """
    try:
        values = read_measurements(Path(directory) / FILE_NAME)
    except OSError as error:
        raise ProfileError(
            f"The profiles cannot be read: {error}. Check who may read them."
        ) from error
    if subject.key in values:
        profile = Profile.from_dict(values[subject.key])
        profile.check(subject)  # someone may have edited the values under this key
        return profile
    others = [Profile.from_dict(value) for value in values.values()]
    if not others:
        raise ProfileError(NO_PROFILE.format(directory))
    nearest = min(others, key=lambda other: len(other.subject.differences(subject)))
    nearest.check(subject)
    raise AssertionError("a profile of the wanted subject is saved under another key")


def read_measurements(path: Path) -> dict[str, Any]:
    """The values in `path`, a JSON object, by key; none without such a file, or if it is damaged.
    Raises `OSError`.
    """
    return read_own(path, lambda values: dict(values.items())) or {}


def save_measurement(path: Path, key: str, value: Any) -> Path:
    """Set `key` in `path` to `value`, replacing the whole file. Raises `OSError`."""
    make_private_folder(path.parent)
    values = read_measurements(path)
    replace_file(path, (json.dumps({**values, key: value}, indent=1) + "\n").encode())
    return path


def _numbers(value: Any, name: str) -> typing.Iterator[tuple[str, float]]:
    """Every number in nested mappings and sequences, with its path."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{name}[{index}]")
    elif isinstance(value, int | float):
        yield name, value


def _short(value: object) -> str:
    """A value for a message; digests are cut."""
    text = str(value)
    return (
        f"{text[:12]}..."
        if len(text) == 32 and all(c in "0123456789abcdef" for c in text)
        else repr(value)
    )
