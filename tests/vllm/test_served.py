"""vLLM over the store of ragkv: its tokens are ragkv's own, fused KV is never served as exact.

Stores that stall or die fail no request, and `ragkv serve --engine vllm` gives the answers of
ragkv's own engine.
"""

import pytest

from . import models
from .serving import needs_vllm, run

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]
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


def test_requests_after_fused_preempted_and_aborted_ones_get_their_own_tokens() -> None:
    found = run("never_wrong")
    prompts = found["prompts"]
    assert found["preemptions"] > 0
    assert found["fused differ from full"] > prompts / 2
    assert found["mixed"] == found["exact after fused"] == found["fused after an abort"] == prompts
    assert found["promised to exact ones"] == 0
    assert found["fused when stored later"] == found["stored later"] == 1


@pytest.mark.parametrize(
    ("family", "rounds", "prompts"), [("llama", 8, 8), (models.SMOLLM2, 63, 4)]
)
def test_mixed_requests_of_two_tenants_beside_the_prefix_cache_get_the_tokens_of_vllm_and_of_ragkv(
    family: str, rounds: int, prompts: int
) -> None:
    found = run("mixed", family, str(rounds), str(prompts))
    assert found["equal"] == found["sent"] and min(found["sent"].values()) > 15
    assert found["hits"] == found["hits alone"] > 0
    assert (found["attacks"], found["reused"], found["different"]) == (8 * prompts, 0, 0)


def test_vllm_has_the_interface_that_is_used_and_what_it_lacks_is_said_in_one_sentence() -> None:
    assert "has no gone, vllm.config:Gone, vllm.gone:It, which RagKVConnector uses" in run(
        "interface"
    )


def test_damaged_entries_give_the_tokens_of_a_full_prefill() -> None:
    found = run("damaged")
    assert found["equal"] == 4
    assert found["fused"] == 0
    assert any("damage" in note or "checksum" in note for note in found["notes"]), found["notes"]


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("kv_cache_dtype", '"fp8"', "kv_cache_dtype"),
        (
            "hf_overrides",
            '{"quantization_config": {"quant_method": "compressed-tensors"}}',
            "weights are quantised",
        ),
    ],
)
def test_vllm_does_not_start_where_fused_kv_would_be_wrong(
    option: str, value: str, said: str
) -> None:
    assert said in run("refused", option, value)


def test_one_ingest_through_redis_serves_another_home_and_its_outages_change_no_token() -> None:
    found = run("redis", module="outages")
    prompts = found["prompts"]
    assert found.pop("fused differ from full") > prompts / 2
    # what is right, fused, read from Redis, and full
    assert found == dict.fromkeys(found, prompts) and len(found) == 9


def test_a_disk_that_stalls_leaves_prompts_to_vllm() -> None:
    found = run("stalled", module="outages")
    prompts = found["prompts"]
    assert found["fused differ from full"] > prompts / 2
    assert found["fused before"] == prompts
    assert found["full during"] == prompts
    assert any("no KV within 2.0 s" in note or "stalled" in note for note in found["notes"]), found[
        "notes"
    ]


def test_answers_in_front_of_vllm_are_those_of_ragkvs_engine() -> None:
    found = run("asked", module="front")
    count = found["questions"]
    assert (found["ready without vLLM"], found["asked without vLLM"]) == (503, 503)
    for ratio in (0.0, 0.15):
        assert (
            found[f"equal at {ratio}"]
            == found[f"fused at {ratio}"]
            == found[f"counted at {ratio}"]
            == count
        ), found
    assert found["equal in full"] == found["equal turns"] == count
    # the last one, after a restart of vLLM, computed its own tokens alone
    assert found["turns"][-1][1] < 100
    assert found["differ from full"] > 0  # so the fused KV was really used
    assert found["answers"]
    assert '"vllm_unavailable"' in found["killed"]
    assert (found["asked when killed"], found["ready when killed"]) == ("vllm_unavailable", 503)
