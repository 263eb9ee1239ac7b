"""A device without a GPU: its tensors hold numbers that the host cannot read without being noticed.

A tensor of the fake device is a wrapper around one in host memory, and says that its device is
"meta". Each operation on it is counted. What would make the host of a GPU wait is noted: reading a
number, shapes that depend on numbers, copies to the host, and copies to the device that block. A
tensor of the host among tensors of the device is an error, as it is on a GPU.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ragkv.model.device.kernels import placing_kernel
from ragkv.model.layer_views import plain_layers

DEVICE = torch.device("meta")
# The devices of a test of Triton's kernels: its interpreter, and a GPU.
WHERE_KERNELS_RUN = pytest.mark.parametrize(
    "device",
    [
        pytest.param(
            "cpu",
            marks=pytest.mark.skipif(
                os.environ.get("TRITON_INTERPRET") != "1" or placing_kernel() is None,
                reason="needs Triton and TRITON_INTERPRET=1 (docs/research/gpu.md)",
            ),
        ),
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
            ],
        ),
    ],
)

_aten = torch.ops.aten

# Each makes a GPU's host wait until the queue is empty.
_READS = {
    _aten._local_scalar_dense.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten.equal.default,
    _aten._unique2.default,
    _aten.repeat_interleave.Tensor,
}
# They launch nothing.
_FREE = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.detach.default,
    _aten._reshape_alias.default,
    _aten._unsafe_view.default,
    _aten.alias.default,
    _aten.lift_fresh.default,
}


class DeviceTensor(torch.Tensor):
    """A tensor of the fake device."""

    held: torch.Tensor  # the same in host memory

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "DeviceTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on the fake device outside of `FakeDevice.running`")


def on_host(tree: Any) -> Any:
    """The same with tensors of the device as they are held."""
    return tree_map(lambda one: one.held if isinstance(one, DeviceTensor) else one, tree)


def sent(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a host tensor on the device."""
    return DeviceTensor(tensor.detach().clone())


class FakeDevice:
    """Runs the operations on its tensors, counts them, and notes waits."""

    def __init__(self) -> None:
        self.operations: Counter[str] = Counter()  # launches by name, while `counts`
        self.copies = 0  # calls of reader threads
        self.waits: list[str] = []
        self.counts = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within it tensors of the device can be used, by this thread."""
        with _Dispatch(self), _Functions(self):
            yield

    def note(self, wait: str) -> None:
        """The host waits."""
        if self.counts:
            self.waits.append(wait)

    def launch(self, name: str) -> None:
        """An operation is queued."""
        if self.counts:
            self.operations[name] += 1


class _Dispatch(TorchDispatchMode):
    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
        ours = any(isinstance(one, DeviceTensor) for one in tensors)
        target = kwargs.get("device")
        target = None if target is None else torch.device(target)
        if not ours and target != DEVICE:
            return func(*args, **kwargs)
        name = str(func).removeprefix("aten.")
        if ours and target is not None and target.type == "cpu":
            self._device.note(f"{name}: to the host")
            return func(*on_host(args), **on_host(kwargs))
        if func is _aten.copy_.default and ours:
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            if not isinstance(args[0], DeviceTensor):
                if not non_blocking:
                    self._device.note(f"{name}: to the host")
            elif not isinstance(args[1], DeviceTensor) and args[1].dim():
                self._blocks(name, non_blocking)
        elif func is _aten._to_copy.default and not ours:
            self._blocks(name, kwargs.get("non_blocking", False))
        elif func is _aten._foreach_copy_.default:
            self._blocks(name, args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        else:
            hosts = [one for one in tensors if not isinstance(one, DeviceTensor) and one.dim() > 0]
            if hosts:
                if func in (_aten.index.Tensor, _aten.index_put_.default):
                    self._device.note(f"{name}: an index of the host")
                else:
                    raise RuntimeError(f"{func}: tensors of the host and of the device.")
        if func in _READS or _has_mask_index(func, args):
            self._device.note(name)
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        if func is _aten._foreach_copy_.default:
            self._device.copies += self._device.counts
        elif not (func.is_view or func in _FREE):
            self._device.launch(name)
        args_there = on_host(args)
        if func is _aten.histc.default and args_there[0].dtype is torch.int32:  # a GPU counts them
            args_there = (args_there[0].float(), *args_there[1:])
        out = func(*args_there, **on_host(kwargs))
        if func._schema.is_mutable and isinstance(out, torch.Tensor):
            return kwargs.get("out", args[0])
        return tree_map(lambda one: _wrapped(one), out)

    def _blocks(self, name: str, non_blocking: bool) -> None:
        if not non_blocking:
            self._device.note(f"{name}: a copy to the device that blocks")


def _wrapped(one: Any) -> Any:
    return DeviceTensor(one) if isinstance(one, torch.Tensor) else one


def _has_mask_index(func: Any, args: Any) -> bool:
    return func in (_aten.index.Tensor, _aten.index_put_.default) and any(
        one is not None and one.dtype is torch.bool for one in args[1]
    )


class _Functions(TorchFunctionMode):
    """What is one launch on a GPU and several operations elsewhere; what tensors of a class of
    their own refuse.
    """

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and kwargs.get("device") == DEVICE:
            self._device.note("tensor: a copy to the device that blocks")
            del kwargs["device"]
            return DeviceTensor(func(*args, **kwargs))
        if func is torch.nn.functional.scaled_dot_product_attention and isinstance(
            args[0], DeviceTensor
        ):
            if not all(
                isinstance(one, DeviceTensor)
                for one in tree_leaves((args, kwargs))
                if isinstance(one, torch.Tensor)
            ):
                raise RuntimeError("attention over tensors of the host and of the device.")
            self._device.launch("scaled_dot_product_attention")
            return DeviceTensor(func(*on_host(args), **on_host(kwargs)))
        if func is torch.nn.functional.rms_norm and isinstance(args[0], DeviceTensor):
            self._device.launch("rms_norm")
            return DeviceTensor(func(*on_host(args), **on_host(kwargs)))
        if args and isinstance(args[0], DeviceTensor):
            if func in (torch.Tensor.tolist, torch.Tensor.numpy):
                self._device.note(func.__name__)
                return func(args[0].held)
            if func is torch.Tensor.pin_memory:
                raise RuntimeError("pin_memory of a tensor of the device.")
        elif func is torch.Tensor.pin_memory:
            return args[0]
        return func(*args, **kwargs)


def move(adapter: Any) -> None:
    """Move a host adapter's weights and tables to the fake device, in place."""
    done: dict[int, Any] = {}
    seen: set[int] = set()
    for part in (adapter.model, *adapter.layers, adapter._head):
        for module in part.modules():
            if id(module) in seen:
                continue
            seen.add(id(module))
            for name, weight in module._parameters.items():
                if weight is not None and not isinstance(weight, DeviceTensor):
                    if id(weight) not in done:
                        moved = DeviceTensor(weight.data)
                        done[id(weight)] = torch.nn.Parameter(moved, requires_grad=False)
                        done[-id(weight)] = weight  # so that no other gets its id
                    module._parameters[name] = done[id(weight)]
            for name, buffer in module._buffers.items():
                if buffer is not None and not isinstance(buffer, DeviceTensor):
                    module._buffers[name] = DeviceTensor(buffer)
    adapter.device = DEVICE
    adapter._identity = tuple(DeviceTensor(one) for one in adapter._identity)
    adapter.rope = _MovedRope(adapter.rope)
    if adapter._plain is not None:  # as on a device
        adapter._plain = plain_layers(adapter.layers, adapter.attention_name, fuse_norms=True)


class _MovedRope:
    """The tables of a host's rope, on the device."""

    def __init__(self, rope: Any) -> None:
        self._rope = rope
        self._made: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rope, name)

    def tables(self, length: int, start: int = 0) -> Any:
        """As `Rope.tables`."""
        tables = self._rope.tables(length, start)
        if id(tables) not in self._made:
            moved = {kind: DeviceTensor(both) for kind, both in tables.tables.items()}
            self._made[id(tables)] = (type(tables)(moved, tables.rope_digest, tables.start), tables)
        return self._made[id(tables)][0]


class InlineReaders:
    """Reader threads that are the calling thread, because only it can use the fake device."""

    threads = 4

    class pool:
        """Runs work when it is submitted."""

        @staticmethod
        def submit(work: Callable[..., Any], *args: Any) -> Any:
            """A future that is done."""
            from concurrent.futures import Future

            done: Future[Any] = Future()
            try:
                done.set_result(work(*args))
            except Exception as error:
                done.set_exception(error)
            return done

    def take(self, size: int, device: torch.device) -> torch.Tensor:
        """As `Readers.take`."""
        return torch.empty(size, dtype=torch.uint8)

    def give_back(self, buffer: torch.Tensor) -> None:
        """As `Readers.give_back`."""
