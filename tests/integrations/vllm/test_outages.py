"""Stores that stall or die: no request fails, and every token is one that ragkv itself gives."""

import pytest

from .serving import needs_vllm, run

pytestmark = [needs_vllm, pytest.mark.timeout(900)]


def test_one_ingest_through_redis_serves_another_home_and_its_outages_change_no_token() -> None:
    found = run("redis", module="outages")
    prompts = found["prompts"]
    assert found["fused differ from full"] > prompts / 2
    assert found["fused from Redis"] == prompts
    assert found["bytes from Redis"] == prompts
    assert found["right while Redis stalls"] == prompts
    assert found["fused again"] == prompts
    assert found["right after the stall"] == prompts
    assert found["right when Redis is killed"] == prompts
    assert found["right without Redis"] == prompts
    assert found["full without Redis"] == prompts


def test_a_disk_that_stalls_leaves_prompts_to_vllm() -> None:
    found = run("stalled", module="outages")
    prompts = found["prompts"]
    assert found["fused differ from full"] > prompts / 2
    assert found["fused before"] == prompts
    assert found["full during"] == prompts
    assert any("no KV within 2.0 s" in note or "stalled" in note for note in found["notes"]), found["notes"]
