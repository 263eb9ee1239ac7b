"""Whether KCache pays: its two inequalities, for GQA (KCache section 3.2).

Decode. Ordinary attention reads S rows of V per KV head from device memory. KCache reads U rows from the host. U is the
union of the rows that the query heads of the KV head need, N <= U <= N H / G. Fewer rows over a slower link pay if

    U / to_device < (S - U) / device,   i.e.   S / U > 1 + device / to_device

The paper has S / N > device / to_device (equation 4): one query head per KV head, and without the 1, because a GPU's
ratio is about 64. Its equation 3 counts one byte per element on one side and two on the other; equation 4 does not.
Neither counts the time to choose the rows and to send their indices to the host, which is most of the cost on a CPU.

Prefill. A layer's V moves to the host while the next layer is computed, which hides the copy if computing takes at
least as long (equations 1 and 2). Bandwidths in bytes per second, times in seconds.
"""

import math
from dataclasses import dataclass

from ragkv.config import KCacheConfig
from ragkv.fusion.profile import Profile


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Bytes per second."""

    device: float  # reads from device memory
    to_device: float  # from host to device
    to_host: float  # from device to host

    @property
    def ratio(self) -> float:
        """Device memory's bandwidth over that from host to device; 64 on an A100 with PCIe 4 (KCache section 3.2)."""
        return self.device / self.to_device


@dataclass(frozen=True, slots=True)
class Advice:
    """The inequalities, evaluated for one model, machine and setting."""

    pays: bool  # whether a decode step gets faster
    hidden: bool  # whether the prefill hides the copies to the host
    why: tuple[str, ...]  # short sentences with numbers


def most_rows(top_n: int, group: int, tokens: int) -> int:
    """The largest U: no two of the `group` query heads of a KV head need the same row."""
    return min(tokens, top_n * group)


def decode_pays(tokens: int, rows: float, bandwidths: Bandwidths) -> bool:
    """Whether fetching `rows` (U per KV head) of `tokens` (S) from the host beats reading all on the device."""
    return rows <= 0 or tokens / rows > 1.0 + bandwidths.ratio


def tokens_from_which_it_pays(rows: float, bandwidths: Bandwidths) -> int:
    """The shortest context for which fetching U = `rows` pays."""
    return math.floor(rows * (1.0 + bandwidths.ratio)) + 1


def prefill_hides(layer_s: float, tokens: int, v_bytes_per_token: float, bandwidths: Bandwidths) -> bool:
    """Whether computing a layer of `tokens` takes longer than copying its V to the host."""
    return layer_s > tokens * v_bytes_per_token / bandwidths.to_host


def bandwidths_of(profile: Profile) -> Bandwidths:
    """The bandwidths of a profile, from its decode step and its copy to the device; `to_host` is assumed equal.

    On a CPU, without copies, all three are those of its memory. Raises `ValueError` if the measured decode step does
    not slow down with more tokens, because then it says nothing about reading V.
    """
    per_token_s = profile.decode.per_token_s
    if per_token_s <= 0.0:
        raise ValueError(
            "The profile's decode step does not slow down with more tokens, so the bandwidth of V is unknown."
        )
    device = profile.kv_bytes_per_token / per_token_s
    copy = profile.copy_bytes_per_s or device
    return Bandwidths(device, copy, copy)


def advise(profile: Profile, config: KCacheConfig, tokens: int, group: int) -> Advice:
    """Whether `config` pays for prompts of `tokens` on the machine of `profile`, with the largest U.

    `group` is the number of query heads per KV head.
    """
    if config.top_n is None:
        return Advice(False, False, ("kcache: top_n is None, so every step would fetch all of V",))
    try:
        speeds = bandwidths_of(profile)
    except ValueError as error:
        return Advice(False, False, (f"kcache: {error}",))
    rows = most_rows(config.top_n, group, tokens)
    pays, least = decode_pays(tokens, rows, speeds), tokens_from_which_it_pays(rows, speeds)
    layer_s = profile.prefill.at(tokens) / profile.layers
    v_bytes = profile.kv_bytes_per_token / profile.layers / 2
    hidden = prefill_hides(layer_s, tokens, v_bytes, speeds)
    away = max(0, profile.layers - config.resident_layers)
    why = [
        f"kcache: S / U is {tokens / rows:.1f} (U {rows} at most) against 1 + "
        f"{speeds.ratio:.1f}: a decode step over {tokens} tokens is {'faster' if pays else 'not faster'}; from "
        f"{least} tokens on it is",
        f"kcache: {away} of {profile.layers} layers' V on the host leaves {1 - away / (2 * profile.layers):.0%} of KV "
        f"on the device; copying a layer's V is {'hidden' if hidden else 'not hidden'} by the prefill "
        f"({tokens * v_bytes / speeds.to_host * 1e3:.3g} ms against {layer_s * 1e3:.3g} ms)",
    ]
    if profile.copy_bytes_per_s is None:
        why.append(
            "kcache: host and device share one memory here, so nothing is freed, and choosing the rows takes time"
        )
    return Advice(pays, hidden, tuple(why))
