"""`ragkv serve --engine vllm` gives the answers of ragkv's own engine, from KV that vLLM's connector reuses."""

import pytest

from .serving import needs_vllm, run

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]


def test_answers_in_front_of_vllm_are_those_of_ragkvs_engine() -> None:
    found = run("asked", module="front")
    count = found["questions"]
    assert (found["ready without vLLM"], found["asked without vLLM"]) == (503, 503)
    for ratio in (0.0, 0.15):
        assert found[f"equal at {ratio}"] == found[f"fused at {ratio}"] == found[f"counted at {ratio}"] == count, found
    assert found["equal in full"] == count
    assert found["differ from full"] > 0  # so the fused KV was really used
    assert found["equal in a conversation"] == 3
    assert found["streamed"]
    assert found["answers"] and found["failed"]
    assert '"vllm_unavailable"' in found["killed"]
    assert (found["asked when killed"], found["ready when killed"]) == ("vllm_unavailable", 503)
