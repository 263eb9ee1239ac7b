"""The path of prompts on a device, with a fake one: equal numbers, few launches, no waits."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import transformers

from ragkv.fusion import (
    Plan,
    Readers,
    Recompute,
    Span,
    SpanKind,
    SpanState,
    make_selector,
)
from ragkv.fusion.device.placing import DevicePlacing
from ragkv.fusion.device.staging import StagedReader
from ragkv.fusion.passes import Fusor
from ragkv.model import Recording, RotaryTables
from ragkv.model.device import masked
from ragkv.model.device.kernels import placing_kernel
from ragkv.model.families import ADAPTERS
from ragkv.registry import SELECTORS
from ragkv.store.entry import Entry, EntryInfo, Identity, StoredEntry
from ragkv.store.stored_form import stored_form
from ragkv.store.tiers import MemoryLease
from tests import tiny_models
from tests.fusion.fake_device import (
    WHERE_KERNELS_RUN,
    DeviceTensor,
    FakeDevice,
    InlineReaders,
    move,
    on_host,
)

MOST_OPERATIONS = 45  # a layer and pass

# 1 + sum of chunks and separators + question
QUESTION = tiny_models.tokens(7, 99)


def encoded_entry(adapter: Any, ids: list[int], codec: str) -> StoredEntry:
    """An entry of random KV for `ids`."""
    chance = torch.Generator().manual_seed(sum(ids))
    shape = (adapter.layer_count, 2, adapter.kv_heads, len(ids), adapter.head_dim)
    kv = torch.randn(shape, generator=chance).to(adapter.dtype)
    dtype = str(adapter.dtype).removeprefix("torch.")
    identity = Identity("w", "a", "r", dtype, "", "", "", codec=codec)
    info = EntryInfo(identity.key(ids), identity, tuple(ids), "f", *shape[::2])
    return stored_form(Entry(info, kv))


def plan_of(adapter: Any, chunks: int, codecs: tuple[str, ...] = ("int8",)) -> Plan:
    """A prompt of `chunks` fused chunks of unequal length, each with a separator; the second one
    skips its first tokens.
    """
    ids = [1]
    spans = [Span(SpanKind.PREFIX, 0, 1, SpanState.COMPUTED)]
    for chunk in range(chunks):
        own = tiny_models.tokens(9 + chunk % 4, chunk)
        offset = 2 if chunk == 1 else 0
        start = len(ids)
        ids += own[offset:]
        lease = MemoryLease(encoded_entry(adapter, own, codecs[chunk % len(codecs)]))
        spans += [
            Span(SpanKind.CHUNK, start, len(ids), SpanState.FUSED, lease, chunk, offset),
            Span(SpanKind.TEMPLATE, len(ids), len(ids) + 1, SpanState.COMPUTED),
        ]
        ids.append(5)
    spans.append(Span(SpanKind.QUESTION, len(ids), len(ids) + len(QUESTION), SpanState.COMPUTED))
    return Plan.of(torch.tensor([*ids, *QUESTION]), spans)


def adapter_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A host's adapter of the tiny model."""
    model = tiny_models.model(family).to(dtype)
    return ADAPTERS[model.config.model_type](model)


def prefill(
    adapter: Any,
    plan: Plan,
    selector: str,
    ratio: float,
    record: Recording | None = None,
    early: int = 0,
) -> Any:
    """What a pass over the prompt gives."""
    recompute = Recompute(make_selector(selector), ratio, early)
    fusor = Fusor(adapter, InlineReaders(), 1, 0)  # type: ignore[arg-type]
    with fusor.prepared(plan, recompute, record=record) as prompt:
        fusor.run([prompt], lambda: None)
        return prompt.result()


@contextmanager
def counting(device: FakeDevice, adapter: Any) -> Iterator[None]:
    """Count from the first layer's slices to the last layer."""
    take = StagedReader.take
    logits = adapter.logits

    def first(reader: StagedReader, number: int) -> None:
        device.counts = True
        take(reader, number)

    def last(hidden: torch.Tensor) -> torch.Tensor:
        device.counts = False
        return logits(hidden)

    patch = pytest.MonkeyPatch()
    patch.setattr(StagedReader, "take", first)
    adapter.logits = last
    try:
        yield
    finally:
        patch.undo()


def on_device(
    family: str,
    selector: str,
    ratio: float = 0.3,
    chunks: int = 4,
    codecs: tuple[str, ...] = ("int8",),
    dtype: torch.dtype = torch.float32,
) -> tuple[Any, torch.Tensor, FakeDevice, Any]:
    """The result on the fake device, its logits, the device and its adapter."""
    adapter = adapter_of(family, dtype)
    plan = plan_of(adapter, chunks, codecs)
    device = FakeDevice()
    with device.running(), torch.no_grad():
        move(adapter)
        record = adapter.new_recording(3, 40)
        with counting(device, adapter):
            passed = prefill(adapter, plan, selector, ratio, record if chunks < 8 else None)
    return passed, on_host(passed.logits), device, (adapter, on_host(record.kv))


def same(device: torch.Tensor, host: torch.Tensor) -> None:
    """To rounding: numbers of random weights reach 50."""
    assert (device - host).abs().max() <= 1e-5 * max(1.0, float(host.abs().max()))


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
@pytest.mark.parametrize("selector", ["first-k", "hkvd", "attention"])
def test_a_device_computes_what_the_host_does(family: str, selector: str) -> None:
    adapter = adapter_of(family)
    plan = plan_of(adapter, 4)
    record = adapter.new_recording(3, 40)
    with torch.no_grad():
        host = prefill(adapter, plan, selector, 0.3, record)
    passed, logits, _, (_, recorded) = on_device(family, selector)
    same(logits, host.logits)
    for ours, wanted in zip(passed.selected_by_layer, host.selected_by_layer, strict=True):
        assert torch.equal(ours, wanted)
    length = host.fused.kv.length
    for made in ("keys", "values"):
        pairs = zip(getattr(passed.fused.kv, made), getattr(host.fused.kv, made), strict=True)
        for ours, wanted in pairs:
            same(on_host(ours)[:, :, :length], wanted[:, :, :length])
    same(recorded, record.kv)


def test_tokens_that_are_recomputed_early_are_so_on_a_device() -> None:
    adapter = adapter_of("llama")
    plan = plan_of(adapter, 4)
    with torch.no_grad():
        host = prefill(adapter, plan, "attention", 0.3, early=11)
    device = FakeDevice()
    with device.running(), torch.no_grad():
        move(adapter)
        with counting(device, adapter):
            passed = prefill(adapter, plan, "attention", 0.3, early=11)
    same(on_host(passed.logits), host.logits)
    assert torch.equal(passed.selected_by_layer[-1], host.selected_by_layer[-1])


def test_entries_of_several_codecs_are_placed_together() -> None:
    codecs = ("int8", "raw", "bfloat16")
    adapter = adapter_of("llama")
    with torch.no_grad():
        host = prefill(adapter, plan_of(adapter, 6, codecs), "hkvd-gradual", 0.3)
    _, logits, device, _ = on_device("llama", "hkvd-gradual", chunks=6, codecs=codecs)
    same(logits, host.logits)
    assert not device.waits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("selector", sorted(SELECTORS))
def test_a_pass_has_few_operations_none_for_each_chunk_and_waits_for_none(
    selector: str, dtype: torch.dtype
) -> None:
    passes = 2 if selector == "attention" else 1
    counts = []
    for chunks in (8, 32):
        _, _, device, (adapter, _) = on_device("llama", selector, 0.15, chunks, dtype=dtype)
        assert not device.waits
        counts.append(sum(device.operations.values()) / adapter.layer_count / passes)
        print(
            f"{selector}, {dtype}, {chunks} chunks: {counts[-1]:.2f} operations, "
            f"{len(device.waits)} waits"
        )
    assert counts[0] == counts[1]
    assert counts[0] <= MOST_OPERATIONS


def test_no_depth_has_more_operations_in_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_models.config("llama")
    config.num_hidden_layers = 12
    deep = transformers.LlamaForCausalLM(config).eval().to(torch.bfloat16)
    monkeypatch.setitem(globals(), "adapter_of", lambda *_: ADAPTERS["llama"](deep))
    _, _, device, (adapter, _) = on_device("llama", "hkvd-gradual", 0.15, 8, dtype=torch.bfloat16)
    assert adapter.layer_count == 12
    count = sum(device.operations.values()) / adapter.layer_count
    print(f"hkvd-gradual, 12 layers: {count:.2f} operations")
    assert count <= MOST_OPERATIONS


def test_what_ends_a_prompt_frees_its_pass_at_once() -> None:
    adapter = adapter_of("llama")
    fusor = Fusor(adapter, InlineReaders(), 1, 0)  # type: ignore[arg-type]
    with (
        pytest.raises(ZeroDivisionError),
        fusor.prepared(
            plan_of(adapter, 2, ("raw",)), Recompute(make_selector("first-k"), 0.3)
        ) as prompt,
    ):
        raise ZeroDivisionError
    assert prompt.steps.gi_frame is None


def joint(adapter: Any, plans: Sequence[Plan], selectors: Sequence[str]) -> list[torch.Tensor]:
    """The logits of prompts in one pass, a selector each."""
    fusor = Fusor(adapter, InlineReaders(), 1, 0)  # type: ignore[arg-type]
    with ExitStack() as stack:
        prompts = [
            stack.enter_context(fusor.prepared(plan, Recompute(make_selector(selector), 0.3)))
            for plan, selector in zip(plans, selectors, strict=True)
        ]
        fusor.run(prompts, lambda: None)
        results = [prompt.result() for prompt in prompts]
    assert all(result.prompts == len(plans) for result in results)
    return [result.logits for result in results]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize(
    "selectors", [*([name] * 3 for name in sorted(SELECTORS)), sorted(SELECTORS)], ids=str
)
def test_prompts_that_share_a_pass_wait_for_none_and_get_what_they_get_alone(
    family: str, selectors: list[str]
) -> None:
    adapter = adapter_of(family)
    plans = [plan_of(adapter, 2 + place % 3) for place in range(len(selectors))]
    with torch.no_grad():
        alone = [
            prefill(adapter, plan, selector, 0.3).logits
            for plan, selector in zip(plans, selectors, strict=True)
        ]
    device = FakeDevice()
    with device.running(), torch.no_grad():
        move(adapter)
        with counting(device, adapter):
            together = joint(adapter, plans, selectors)
    assert device.operations and not device.waits
    for logits, wanted in zip(together, alone, strict=True):
        same(on_host(logits), wanted)


# For a prompt of two kinds of layer: masks, and gatherings from the tables of cos and sin. Others
# have two masks, and gather for the rows and for what is placed.
MADE = {
    "attention": (4, 7),  # the question's rows, and what it chose; the last layer has some more
    "hkvd-gradual": (2, 5),  # masks are narrowed, and each check is followed by one kind of layer
}


@pytest.mark.parametrize("prompts", [1, 3])
@pytest.mark.parametrize("selector", sorted(SELECTORS))
def test_masks_and_tables_are_made_once_and_the_last_rows_alone_get_logits(
    selector: str, prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = adapter_of("gemma3_text")  # sliding and full layers, a kind of table each
    plans = [plan_of(adapter, 3) for _ in range(prompts)]
    made: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def counted(*given: Any) -> Any:
            made[name] += 1
            return call(*given)

        monkeypatch.setattr(owner, name, counted)

    rows = []
    logits = adapter.logits
    adapter.logits = lambda hidden: rows.append(hidden.shape[1]) or logits(hidden)
    with FakeDevice().running(), torch.no_grad():
        move(adapter)
        count(masked, "_masked")
        count(adapter.rope, "tables")
        count(RotaryTables, "rows")
        joint(adapter, plans, [selector] * prompts)
    masks, gathered = MADE.get(selector, (2, 4))
    assert made == Counter(
        {"tables": prompts, "_masked": masks * prompts, "rows": gathered * prompts}
    )
    assert rows == [prompts]


@pytest.mark.parametrize(
    "read",
    [
        lambda tensor: tensor.tolist(),
        lambda tensor: int(tensor[0]),
        lambda tensor: tensor.cpu(),
        lambda tensor: tensor[tensor > 1],
        lambda tensor: tensor.nonzero(),
        lambda tensor: tensor.copy_(torch.ones(3)),
        lambda tensor: torch.ones(3).to(tensor.device),
        lambda tensor: torch.tensor([1, 2], device=tensor.device),
    ],
)
def test_the_fake_device_notes_waits(read: Callable[[torch.Tensor], object]) -> None:
    """Proves that the test above can fail."""
    device = FakeDevice()
    with device.running():
        tensor = DeviceTensor(torch.arange(3.0))
        device.counts = True
        assert torch.equal(on_host(tensor + tensor), 2 * torch.arange(3.0))
        assert not device.waits
        read(tensor)
    assert len(device.waits) == 1


def test_tensors_of_the_host_and_of_the_device_do_not_mix() -> None:
    with FakeDevice().running(), pytest.raises(RuntimeError, match="of the host and of the device"):
        DeviceTensor(torch.ones(3)) + torch.ones(3)


def placed(
    family: str, dtype: torch.dtype, codecs: tuple[str, ...], kernel: Any, device: str = "cpu"
) -> torch.Tensor:
    """The KV of all layers after placing on the device's path."""
    model = tiny_models.model(family).to(device, dtype)
    adapter = ADAPTERS[model.config.model_type](model)
    plan = plan_of(adapter, 5, codecs)
    length = plan.token_ids.numel()
    kv = adapter.new_kv(length)
    for tensor in (*kv.keys, *kv.values):
        tensor.zero_()
    leases = [span.lease for span in plan.loaded if span.lease]
    tables = adapter.rope.tables(length)
    with (
        Readers(2) as readers,
        StagedReader(leases, adapter.layer_count, 1, readers, adapter.device) as reader,
    ):
        placing = DevicePlacing(reader, adapter, tables, plan.loaded, kv, None)
        placing.kernel = kernel
        for layer in range(adapter.layer_count):
            placing.place(layer)
    return torch.stack((*kv.keys, *kv.values)).float().cpu()


@WHERE_KERNELS_RUN
@pytest.mark.parametrize("codecs", [("int8",), ("raw",), ("bfloat16", "int8", "raw")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_neox", "smollm3", "stablelm"])
def test_the_kernel_places_what_torch_places(
    family: str, dtype: torch.dtype, codecs: tuple[str, ...], device: str
) -> None:
    wanted = placed(family, dtype, codecs, None, device)
    ours = placed(family, dtype, codecs, placing_kernel(), device)
    assert wanted.abs().sum() > 0
    least = 1e-5 if dtype is torch.float32 else 0.04  # two roundings of numbers up to 4
    torch.testing.assert_close(ours, wanted, atol=least, rtol=least)
