"""How blocks become time: TTFT = c + alpha B b + load B d, b blocks computed, d loaded (T-LRU paper, figure 3).

A token found in a tier that replicas share costs `remote`; where chunks are fused, each token found costs `found`.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path

from ragkv.errors import ConfigError


@dataclass(frozen=True)
class Profile:
    """Times of prefill and loading, measured or given. The default is the paper's alpha and no fixed cost."""

    token_ms: float = 0.1  # alpha: computing one token
    fixed_ms: float = 0.0  # c: any request
    load_token_ms: float = 0.0  # loading one token's KV from the slower tier
    remote_token_ms: float = 0.0  # loading one token's KV from the tier that replicas share
    found_token_ms: float = 0.0  # placing one found token, and its share of the recomputed tokens

    def __post_init__(self) -> None:
        others = (self.fixed_ms, self.load_token_ms, self.remote_token_ms, self.found_token_ms)
        if not self.token_ms > 0 or min(others) < 0:
            raise ConfigError(f"A profile needs token_ms > 0 and no negative time, not {self}.")

    @classmethod
    def read(cls, path: Path) -> "Profile":
        """From a JSON object with any of the fields; raises `ConfigError`."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            known = {field.name for field in fields(cls)}
            if not isinstance(values, dict) or set(values) - known:
                raise ConfigError(f"The profile {path} must be a JSON object of {', '.join(sorted(known))}.")
            return cls(**{name: float(value) for name, value in values.items()})
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"The profile {path} cannot be read: {error}.") from error

    def ttft_ms(self, computed: int, memory: int, disk: int, remote: int) -> float:
        """The TTFT of a prompt with so many tokens computed, and found in each tier."""
        loaded = self.load_token_ms * disk + self.remote_token_ms * remote
        return self.fixed_ms + self.token_ms * computed + self.found_token_ms * (memory + disk + remote) + loaded

    def xi_blocks(self, xi_ms: float, block_tokens: int) -> int:
        """The blocks that may be computed within `xi_ms`, rounded down."""
        # the factor mends rounding: .3 / .1 is 2.9999999999999996
        return max(0, int((xi_ms - self.fixed_ms) / (self.token_ms * block_tokens) * (1 + 1e-12)))

    def xi_ms(self, xi_blocks: int, block_tokens: int) -> float:
        """The time of a request with `xi_blocks` computed blocks."""
        return self.fixed_ms + self.token_ms * block_tokens * xi_blocks
