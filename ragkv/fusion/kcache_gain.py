"""Whether KCache pays: its two inequalities, for GQA (KCache section 3.2).

Decode. Ordinary attention reads S rows of V a KV head from device memory, KCache U rows from the host, U being the
union of what the head's query heads ask for, N <= U <= N H / G. Reading less at the price of a slower road pays if

    U / to_device < (S - U) / device,   i.e.   S / U > 1 + device / to_device

The paper has S / N > device / to_device (equation 4): one query head a KV head, and the 1 dropped, since a GPU's ratio
is about 64. Its equation 3 counts one byte an element on one side and two on the other, which 4 does not inherit.
What choosing the rows costs, and that the host must be told them, is in neither: on a CPU it is most of the price.

Prefill. A layer's V leaves while the next layer is computed, which hides it if that takes at least as long
(equations 1 and 2). Bandwidths in bytes a second, times in seconds. Pure Python.
"""

import math
from dataclasses import dataclass

from ragkv.config import KCacheConfig

from .profile import Profile


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """How fast bytes move, a second."""

    device: float  # read from the device's own memory
    to_device: float  # from host memory to the device
    to_host: float  # the other way

    def __post_init__(self) -> None:
        for name in ("device", "to_device", "to_host"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"A bandwidth is finite and above 0; {name} is {getattr(self, name)}.")

    @property
    def ratio(self) -> float:
        """Device memory's over the road's from the host; 64 on an A100 over PCIe 4 (KCache section 3.2)."""
        return self.device / self.to_device


@dataclass(frozen=True, slots=True)
class Advice:
    """What the inequalities say of one model, machine and setting."""

    pays: bool  # whether a decode step gets faster
    hidden: bool  # whether a prefill hides what leaves the device
    why: tuple[str, ...]  # short sentences, with numbers


def most_rows(top_n: int, group: int, tokens: int) -> int:
    """U at its worst: no two of the `group` query heads of a KV head ask for the same row."""
    return min(tokens, top_n * group)


def decode_pays(tokens: int, rows: float, bandwidths: Bandwidths) -> bool:
    """Whether fetching `rows` (U, a KV head) of `tokens` (S) from the host is faster than reading all on the device."""
    return rows <= 0 or tokens / rows > 1.0 + bandwidths.ratio


def tokens_from_which_it_pays(rows: float, bandwidths: Bandwidths) -> int:
    """The shortest context for which fetching U = `rows` pays."""
    return math.floor(rows * (1.0 + bandwidths.ratio)) + 1


def decode_saves_s(tokens: int, rows: float, row_bytes: int, kv_heads: int, bandwidths: Bandwidths) -> float:
    """Seconds saved in one layer of one decode step; below 0 if it costs. `row_bytes` is one KV head's V of a token."""
    size = row_bytes * kv_heads
    return (tokens - rows) * size / bandwidths.device - rows * size / bandwidths.to_device


def prefill_hides(layer_s: float, tokens: int, v_bytes_per_token: float, bandwidths: Bandwidths) -> bool:
    """Whether computing a layer of `tokens` takes longer than moving its V, of so many bytes a token, to the host."""
    return layer_s > tokens * v_bytes_per_token / bandwidths.to_host


def prefill_hides_by_flops(tokens: int, hidden: int, flops: float, to_host: float) -> bool:
    """The same by the paper's count for a LLaMA-2 block: 11 d + 2 s > FLOPS / bandwidth (equation 2)."""
    return 11 * hidden + 2 * tokens > flops / to_host


def bandwidths_of(profile: Profile) -> Bandwidths:
    """Those of a profile: KV read by a decode step, and the copy to the device; the way back is taken to be as fast.

    Where there is no copy, on a CPU, all three are the same memory's. Raises `ValueError` if decoding was measured to
    take no longer over more tokens: then nothing is read.
    """
    per_token_s = profile.decode.per_token_s
    if per_token_s <= 0.0:
        raise ValueError("The profile has a decode step that takes no longer over more tokens; it says nothing of V.")
    device = profile.kv_bytes_per_token / per_token_s
    road = profile.copy_bytes_per_s or device
    return Bandwidths(device, road, road)


def advise(profile: Profile, config: KCacheConfig, tokens: int, group: int, rows: float | None = None) -> Advice:
    """Whether `config` pays for prompts of `tokens` on the machine of `profile`.

    `group` is query heads a KV head; `rows` is U where it was measured, else it is taken at its worst.
    """
    if config.top_n is None:
        return Advice(False, False, ("kcache: top_n is None, so every step would fetch all of V",))
    try:
        speeds = bandwidths_of(profile)
    except ValueError as error:
        return Advice(False, False, (f"kcache: {error}",))
    worst = rows is None
    rows = most_rows(config.top_n, group, tokens) if rows is None else rows
    pays, least = decode_pays(tokens, rows, speeds), tokens_from_which_it_pays(rows, speeds)
    layer_s = profile.prefill.at(tokens) / profile.layers
    v_bytes = profile.kv_bytes_per_token / profile.layers / 2
    hidden = prefill_hides(layer_s, tokens, v_bytes, speeds)
    away = max(0, profile.layers - config.resident_layers)
    why = [
        f"kcache: S / U is {tokens / rows:.1f} (U {rows:.0f}{' at its worst' if worst else ''}) against 1 + "
        f"{speeds.ratio:.1f}: a decode step over {tokens} tokens is {'faster' if pays else 'not faster'}; from "
        f"{least} tokens on it would be",
        f"kcache: {away} of {profile.layers} layers' V away leaves {1 - away / (2 * profile.layers):.0%} of KV on the "
        f"device; moving a layer's is {'hidden' if hidden else 'not hidden'} by the prefill "
        f"({tokens * v_bytes / speeds.to_host * 1e3:.3g} ms against {layer_s * 1e3:.3g} ms)",
    ]
    if profile.copy_bytes_per_s is None:
        why.append("kcache: host and device are one memory here, so nothing is freed, and choosing rows costs as well")
    return Advice(pays, hidden, tuple(why))
