"""Settings of fusion for prompts of a few tokens, whose outcome no measurement decides."""

from typing import Any

from ragkv import FusionConfig
from ragkv.config import R_STAR


def fixed(**fusion: Any) -> FusionConfig:
    """No floor, which would recompute all of a tiny prompt, and a ratio that no controller chooses.

    What `fusion` gives wins.
    """
    return FusionConfig(**{"floor_tokens": 0, "ratio": R_STAR, **fusion})
