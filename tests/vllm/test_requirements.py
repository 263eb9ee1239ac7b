"""What vLLM must be configured as: everything else is refused in one sentence."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ragkv.errors import RagKVError, UnsupportedModelError
from ragkv.model import adapt
from ragkv.vllm.settings import check_config, check_layer
from tests import tiny_models


def config(**changes: Any) -> SimpleNamespace:
    """vLLM's configuration as far as it is read, with `changes` by names such as
    `cache_config.cache_dtype`.
    """
    made = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=False, cache_dtype="auto"),
        speculative_config=None,
        model_config=SimpleNamespace(
            dtype=torch.float32,
            quantization=None,
            enable_sleep_mode=False,
            hf_config=SimpleNamespace(model_type="llama", rope_parameters={"rope_type": "default"}),
        ),
    )
    for path, value in changes.items():
        *groups, name = path.split("__")
        at = made
        for group in groups:
            at = getattr(at, group)
        setattr(at, name, value)
    return made


def test_a_plain_configuration_is_accepted() -> None:
    check_config(config())
    check_config(config(cache_config__cache_dtype="float32"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parallel_config__tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"parallel_config__data_parallel_size": 2}, "data_parallel_size is 2"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size is 2"),
        ({"cache_config__cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8'"),
        ({"speculative_config": object()}, "Speculative decoding"),
        ({"model_config__enable_sleep_mode": True}, "Sleep mode"),
        ({"model_config__quantization": "awq"}, "quantised .awq."),
        ({"model_config__hf_config__model_type": "mamba"}, "family 'mamba'"),
        ({"model_config__hf_config__rope_parameters": {"rope_type": "dynamic"}}, "'dynamic'"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_sentence(
    change: dict[str, Any], said: str
) -> None:
    with pytest.raises(RagKVError, match=said) as caught:
        check_config(config(**change))
    assert "\n" not in str(caught.value)


def test_a_layer_with_another_window_is_refused() -> None:
    adapter = adapt(tiny_models.model("mistral"))
    attention = SimpleNamespace(num_kv_heads=2, head_size=16, sliding_window=tiny_models.WINDOW)
    check_layer(0, attention, adapter)
    attention.sliding_window = None
    with pytest.raises(UnsupportedModelError, match="sliding window"):
        check_layer(0, attention, adapter)
