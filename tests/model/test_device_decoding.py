"""Decoding on a fake device: how often the host waits in a step, and equal numbers."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ragkv import KCacheConfig
from ragkv.model import PromptKV, full_pass
from ragkv.model.decode.batching import DecodeRow, decode_rows
from ragkv.model.device import kernels
from ragkv.model.families import ADAPTERS
from ragkv.model.kcache import OffloadedKV
from ragkv.model.kcache.topn import unique, unique_unread
from tests import tiny_models
from tests.fusion.fake_device import WHERE_KERNELS_RUN, DeviceTensor, FakeDevice, move, on_host
from tests.fusion.fake_device import sent as to_device

PROMPT = 60
TOP_N = 7
RESIDENT = 1
STEPS = ((5,), (6, 7, 8), (9,))  # tokens; the later ones are drafts


class GatheringDevice:
    """Stands in for the Triton kernel: the device reads the host's memory."""

    @staticmethod
    def gather(values: torch.Tensor, rows: DeviceTensor) -> torch.Tensor:
        """As `gathering_kernel.gather`."""
        return DeviceTensor(values[rows.held.clamp_min(0)])


def decoded(
    adapter: Any, kv: PromptKV, send: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """The logits of some steps behind a prompt."""
    full_pass(adapter, send(torch.tensor(tiny_models.tokens(PROMPT))), kv)
    for layer in range(adapter.layer_count):
        kv.finish_prefill(layer, PROMPT)
    kv.length = PROMPT
    steps = STEPS if kv.takes_drafts else [(token,) for step in STEPS for token in step]
    # without inference mode, which tensors of a class of their own cannot be in
    step_of: Any = inspect.unwrap(decode_rows)
    return [step_of(adapter, [DecodeRow(kv, step[0], drafts=step[1:])]) for step in steps]


def new_kv(adapter: Any, offloaded: bool) -> PromptKV:
    if not offloaded:
        kv: PromptKV = adapter.new_kv(PROMPT + 20)
        return kv
    config = KCacheConfig(TOP_N, RESIDENT)
    return OffloadedKV(adapter.kv_shape, PROMPT + 20, adapter.dtype, adapter.device, config)


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere2"])
@pytest.mark.parametrize("gathers", ["nothing", "host", "device"])
def test_a_step_waits_for_nothing_but_the_list_of_rows_that_the_host_gathers(
    family: str, gathers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_models.model(family)
    adapter: Any = ADAPTERS[model.config.model_type](model)
    offloaded = gathers != "nothing"
    with torch.no_grad():
        wanted = decoded(adapter, new_kv(adapter, offloaded), lambda tensor: tensor)
    device = FakeDevice()
    if gathers == "device":
        monkeypatch.setattr("ragkv.model.kcache.values.gathering_kernel", lambda _: GatheringDevice)
    with device.running(), torch.no_grad():
        move(adapter)
        adapter.rope.tables(1)
        kv = new_kv(adapter, offloaded)
        device.counts = True
        found = decoded(adapter, kv, to_device)
        device.counts = False
        assert not offloaded or kv.host_bytes > 0
    layers = adapter.layer_count - RESIDENT if gathers == "host" else 0
    assert len(device.waits) == layers * len(found)
    for logits, own in zip(found, wanted, strict=True):
        torch.testing.assert_close(on_host(logits), own, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_found_once_without_a_shape_that_depends_on_them(seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    rows = torch.randint(1 + 3 * seed, (1 + seed,), generator=chance)
    found, places = unique(rows)
    unread, its_places = unique_unread(rows)
    assert torch.equal(unread[: len(found)], found)
    assert unread.shape == rows.shape and bool((unread[len(found) :] == -1).all())
    assert torch.equal(its_places, places)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [3, 16, 80])
@WHERE_KERNELS_RUN
def test_the_kernel_gathers_the_rows_of_host_memory(
    device: str, width: int, dtype: torch.dtype
) -> None:
    values = torch.randn(40, width).to(dtype)
    rows = torch.tensor([0, 3, 4, 17, 39, -1, -1])
    if device == "cuda":
        kernel = kernels.gathering_kernel(torch.device("cuda"))
        values = values.pin_memory()
    else:
        kernel = kernels._kernel("gathering_kernel")
    assert kernel is not None
    found = kernel.gather(values, rows.to(device)).cpu()
    assert torch.equal(found[:5], values[rows[:5]])
