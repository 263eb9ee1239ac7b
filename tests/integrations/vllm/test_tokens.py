"""vLLM goes on from fused KV to the very tokens that ragkv itself decodes, in every supported family."""

import pytest

from . import models
from .serving import needs_vllm, run

pytestmark = [needs_vllm, pytest.mark.timeout(900)]
PROMPTS = 20


@pytest.mark.parametrize("family", models.FAMILIES)
def test_vllm_gives_the_tokens_of_ragkv_at_every_ratio(family: str) -> None:
    found = run("tokens", family)
    for ratio in ("0.0", "0.05", "0.15", "1.0"):
        assert found[ratio]["equal"] == PROMPTS, ratio
        assert found[ratio]["promised"] == PROMPTS, ratio
    for ratio in ("0.0", "0.05", "0.15"):
        assert found[ratio]["fused"] == PROMPTS, ratio
    assert found["0.0"]["differ"] > PROMPTS / 2  # so the fused KV was really used
    assert found["full"] == {"equal": PROMPTS, "cached": 0}
