"""The controller's estimators: recompute time, loading time, storage cost and TTFT (CacheBlend
section 5.1).

Pure functions of a profile; times in seconds, lengths in tokens. T_recompute is the time one layer
keeps the model busy while the next layers load: placing reused KV, and computing the selected
tokens, the question and the cache misses. The paper's `r x Prefill` counts the selected tokens
only, so in the paper less work hides the loading. The paper's loading also takes no processor time.
Ours checks and unpacks on the cores that compute, so a part of it cannot be hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ragkv.fusion import Selection

from .profile import Profile
from .token_counts import Load, TokenCounts, is_fused_chunk

MARGIN = 1.05  # Fusing must be faster by this factor. A smaller gain may be noise.
# A profile leaves out the time to find entries and to select tokens.
UNPROFILED_S = 8e-4


@dataclass(frozen=True, slots=True)
class Phase:
    """Some layers of a prompt, one after another, each with the same work."""

    layers: int
    busy_s: float  # in each layer
    loads: bool  # whether each layer must have been read before


def load_s(profile: Profile, loads: Sequence[Load]) -> float:
    """T_load of a layer from any mix of tiers.

    The times of the slices are added: reader threads take them in prompt order, so tiers do not
    read in parallel.
    """
    return sum(_slice_s(profile, load) for load in loads)


def ttft_s(profile: Profile, counts: TokenCounts, ratio: float, loads: Sequence[Load]) -> float:
    """Time to first token of the pipeline, which reads the next layers while it fuses one.

    Reading goes on without a pause. So the last wait is for some layer: reading up to it, and then
    all work from it on, take as long as the prompt. Entries that a static selector recomputes
    entirely are neither read nor placed. A prompt of which nothing is loaded takes as long as its
    prefill, which was measured by itself.
    """
    if counts.selection is Selection.STATIC and ratio >= 1.0 and counts.fused_tokens:
        loads = [load for load in loads if not load.fused]
        counts = TokenCounts(0, counts.computed_rows + counts.fused_tokens, counts.prompt_tokens)
    if not loads and not counts.fused_tokens:
        return profile.prefill.at(counts.prompt_tokens)
    layer_s = load_s(profile, loads)
    phases = _phases(profile, counts, ratio, hindered_s(profile, loads))
    left_s = sum(phase.layers * phase.busy_s for phase in phases)
    took_s = left_s
    read = 0  # layers
    for phase in phases:
        if phase.loads and phase.layers:
            # the wait for the first of its layers, or for the last one
            took_s = max(took_s, (read + 1) * layer_s + left_s)
            read += phase.layers
            took_s = max(took_s, read * layer_s + left_s - (phase.layers - 1) * phase.busy_s)
        left_s -= phase.layers * phase.busy_s
    return profile.start_s + max(took_s, profile.layers * layer_s)


def exposed_s(profile: Profile, counts: TokenCounts, ratio: float, loads: Sequence[Load]) -> float:
    """Seconds of the time to first token in which the model waits for loading."""
    phases = _phases(profile, counts, ratio, hindered_s(profile, loads))
    busy_s = sum(phase.layers * phase.busy_s for phase in phases)
    return max(0.0, ttft_s(profile, counts, ratio, loads) - profile.start_s - busy_s)


def hindered_s(profile: Profile, loads: Sequence[Load]) -> float:
    """Seconds by which reading a layer delays what is computed meanwhile: checks and unpacking take
    the same cores.
    """
    return sum(
        profile.tier(load.tier).hindered_s_per_byte * _layer_bytes(profile, load) for load in loads
    )


def recompute_ttft_s(profile: Profile, counts: TokenCounts, loads: Sequence[Load]) -> float:
    """Time to first token if all fused chunks are computed; exact chunks and history are loaded as
    before.
    """
    kept = [load for load in loads if not is_fused_chunk(load)]
    rows = min(counts.prompt_tokens, counts.computed_rows + counts.fused_tokens)
    return ttft_s(profile, TokenCounts(0, rows, counts.prompt_tokens), 0.0, kept)


def pays(fused_s: float, recompute_s: float) -> bool:
    """Whether fusing is faster by more than the margin and the unprofiled time."""
    return fused_s * MARGIN + UNPROFILED_S < recompute_s


def _layer_bytes(profile: Profile, load: Load) -> float:
    """Bytes of a layer of `load`, as stored."""
    return load.tokens * profile.stored_bytes_per_token / profile.layers


def _slice_s(profile: Profile, load: Load) -> float:
    """Seconds to read one layer of `load`; on a GPU its copy runs in parallel with the next slice's
    read.
    """
    read_s = profile.tier(load.tier).slice_s(_layer_bytes(profile, load))
    if profile.copy_bytes_per_s is None:
        return read_s
    return max(
        read_s, load.tokens * profile.kv_bytes_per_token / profile.layers / profile.copy_bytes_per_s
    )


def _phases(profile: Profile, counts: TokenCounts, ratio: float, hindered_s: float) -> list[Phase]:
    """The layers of a prompt in the order in which they are computed.

    In the last layer only keys and values of the rows, and one row's output, are computed; the
    profile counts its time in the other layers.
    """
    layers = max(1, profile.layers - 1)
    keys = counts.prompt_tokens
    at = profile.recompute.at
    placing_s = profile.place_token_layer_s * counts.placed_tokens + hindered_s
    selected = ratio * counts.fused_tokens
    selected_s = placing_s + at(counts.computed_rows + selected, keys)
    if counts.selection is Selection.STATIC or not selected:
        return [Phase(layers, selected_s, True)]
    if counts.selection is Selection.NARROWING:
        all_s = placing_s + at(counts.computed_rows + counts.fused_tokens, keys)
        return [Phase(1, all_s, True), Phase(layers - 1, selected_s, True)]
    asked = min(layers, counts.asked_layers)
    early = counts.early_tokens
    asking_s = placing_s + at(counts.computed_rows - counts.unasked_rows + early, keys)
    again_s = at(counts.computed_rows - counts.leading_rows + selected, keys)
    return [
        Phase(asked, asking_s, True),
        Phase(asked, again_s, False),
        Phase(layers - asked, placing_s + at(counts.computed_rows + selected + early, keys), True),
    ]
