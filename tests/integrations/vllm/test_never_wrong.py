"""Fused KV is never served as exact, and whatever goes wrong is computed by vLLM."""

import pytest

from .serving import needs_vllm, run

pytestmark = [needs_vllm, pytest.mark.timeout(900)]


def test_requests_after_fused_preempted_and_aborted_ones_get_their_own_tokens() -> None:
    found = run("never_wrong")
    prompts = found["prompts"]
    assert found["preemptions"] > 0
    assert found["fused differ from full"] > prompts / 2
    assert found["mixed"] == prompts
    assert found["exact after fused"] == prompts
    assert found["promised to exact ones"] == 0
    assert found["fused after an abort"] == prompts
    assert found["fused when stored later"] == 1
    assert found["stored later"] == 1


def test_damaged_entries_give_the_tokens_of_a_full_prefill() -> None:
    found = run("damaged")
    assert found["equal"] == 4
    assert found["fused"] == 0
    assert any("damage" in note or "checksum" in note for note in found["notes"]), found["notes"]


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [("enable_prefix_caching", "true", "--no-enable-prefix-caching"), ("kv_cache_dtype", '"fp8"', "kv_cache_dtype")],
)
def test_vllm_does_not_start_where_fused_kv_would_be_wrong(option: str, value: str, said: str) -> None:
    assert said in run("refused", option, value)
