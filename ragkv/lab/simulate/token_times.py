"""How blocks become time: TTFT = c + alpha B b + load B d, b blocks computed, d loaded (T-LRU paper, figure 3)."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ragkv.errors import ConfigError, ProfileError

if TYPE_CHECKING:
    from ragkv.fusion.profile import Profile, TierSpeed

SLICE_TOKENS = 512  # The tokens of a stored chunk, of which a layer slice is read at once.


@dataclass(frozen=True)
class TokenTimes:
    """Times of prefill and loading, measured or given. The default is the paper's alpha and no fixed cost."""

    token_ms: float = 0.1  # alpha: computing one token
    fixed_ms: float = 0.0  # c: any request
    load_token_ms: float = 0.0  # loading one token's KV from the slower tier

    def __post_init__(self) -> None:
        if not self.token_ms > 0 or min(self.fixed_ms, self.load_token_ms) < 0:
            raise ConfigError(f"A profile needs token_ms > 0 and no negative time, not {self}.")

    @classmethod
    def of(cls, profile: "Profile") -> "TokenTimes":
        """The times that `ragkv profile` measured: straight lines through those of the shortest and longest prompt."""
        first, *_, last = profile.prefill.points
        token_s = (last.fitted_s - first.fitted_s) / (last.tokens - first.tokens)
        disk = profile.tiers.get("disk")
        return cls(
            token_ms=1e3 * token_s,
            fixed_ms=max(0.0, 1e3 * (first.fitted_s - token_s * first.tokens)),
            load_token_ms=0.0 if disk is None else 1e3 * _load_token_s(profile, disk),
        )

    def xi_blocks(self, xi_ms: float, block_tokens: int) -> int:
        """The blocks that may be computed within `xi_ms`, rounded down."""
        # the factor mends rounding: .3 / .1 is 2.9999999999999996
        return max(0, int((xi_ms - self.fixed_ms) / (self.token_ms * block_tokens) * (1 + 1e-12)))

    def xi_ms(self, xi_blocks: int, block_tokens: int) -> float:
        """The time of a request with `xi_blocks` computed blocks."""
        return self.fixed_ms + self.token_ms * block_tokens * xi_blocks


def read_profile(path: Path) -> "Profile":
    """The profile that `ragkv profile` saved last in the file `path`; raises `ConfigError`."""
    from ragkv.fusion.profile import Profile, read_measurements  # loads torch, which the rest of the simulator does not

    try:
        values = list(read_measurements(path).values())
        if not values:
            raise ConfigError(f"There is no profile in {path}. Measure one: `ragkv profile`.")
        return Profile.from_dict(values[-1])
    except (ValueError, ProfileError) as error:
        raise ConfigError(f"The profile {path} cannot be used: {error}") from error


def _load_token_s(profile: "Profile", speed: "TierSpeed") -> float:
    """Seconds to load one token's KV, read in slices of `SLICE_TOKENS` tokens."""
    slice_bytes = SLICE_TOKENS * profile.stored_bytes_per_token / profile.layers
    return profile.layers * speed.slice_s(slice_bytes) / SLICE_TOKENS
