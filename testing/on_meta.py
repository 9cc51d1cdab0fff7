"""A GPU's work without a GPU: tensors of the meta device, the calls of a GPU, and a record of what waits for it.

Tensors without values go through the same operations with the same shapes and arguments, which torch checks. What needs
a value on the host (a number that is read, a shape that depends on values, a copy that is waited for) is recorded with
the function of ours, or of transformers, that asked, and gets zeros, or True.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import peft
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lengthwise
from lengthwise.attention import Proof, choose
from lengthwise.attention.abilities import LEAST_CUDNN, GpuAbilities
from lengthwise.comm import Lone, Pending
from lengthwise.comm.transport import Message
from lengthwise.offload import PinnedStore

META = torch.device("meta")
HOPPER = GpuAbilities(capability=(9, 0), torch_flash=True, cudnn=LEAST_CUDNN)
_ASKING = (
    *(f"{package.__path__[0]}/" for package in (lengthwise, transformers, peft)),
    f"{Path(__file__).parents[1] / 'tests'}/",
)
_VALUES: dict[str, Callable[..., Any]] = {}  # what an operation whose result depends on values gives


class DeviceWaits(TorchDispatchMode):
    """Takes the meta device for a GPU; `found` are the waits for it, by what they are and the function that asked."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.posted = self.reached = 0  # events: all that were posted before the last wait are reached
        self.operators: set[str] = set()
        self._pinned: list[Tensor] = []  # which keeps their addresses from being given to others

    def note(self, what: str) -> None:
        """Record a wait."""
        self.found.append(f"{what}: {_asking()}")
        self.reached = self.posted

    def take(self) -> list[str]:
        found, self.found = self.found, []
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if name == "is_pinned":
            return self._is_pinned(args[0])
        if name == "_pin_memory":
            return self._pin(args[0].clone())
        if kwargs.pop("pin_memory", None):
            return self._pin(func(*args, **kwargs))
        if name in ("_to_copy", "copy_"):
            return self._copy(name, func, args, kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if not any(map(_is_there, tensors)):
            return func(*args, **kwargs)
        self.operators.add(name)
        if any(each.device.type == "cpu" and each.dim() for each in tensors):
            self.note(f"{name} of a host tensor")
        if name in _VALUES:
            self.note("number" if name == "_local_scalar_dense" else name)
            return _VALUES[name](*args, **kwargs)
        if name in ("index", "index_put", "index_put_"):
            args = (args[0], self._indices(name, args[1]), *args[2:])
        if name == "histc" and not (len(args) > 3 and args[2] < args[3]):
            self.note(name)
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            self.note(name)
        return func(*args, **kwargs)

    def _copy(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Copy; wait where a copy between host and device is not one through pinned memory that goes by itself."""
        if name == "copy_":
            into, source = args[0], args[1]
            there, behind = into.device, (args[2:] or (kwargs.get("non_blocking"),))[0]
        else:
            into, source = None, args[0]
            there, behind = kwargs.get("device") or source.device, kwargs.get("non_blocking")
        if _is_there(source) == (there.type == "meta"):
            return func(*args, **kwargs)
        host = source if into is None or _is_there(into) else into
        if not (behind and not _is_there(host) and self._is_pinned(host)):
            self.note("copy to the host" if _is_there(source) else "copy to the device")
        if not _is_there(source):
            return func(*args, **kwargs)
        if into is not None:
            return into
        dtype = kwargs.get("dtype") or source.dtype
        return torch.full(source.shape, dtype == torch.bool, dtype=dtype)

    def _indices(self, name: str, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        found = list[Tensor | None]()
        for each in indices:
            if each is not None and each.dtype in (torch.bool, torch.uint8):
                self.note(f"{name} by a mask")
                found += [torch.zeros(each.numel(), dtype=torch.int64, device=META)] * each.dim()
            else:
                found.append(each)
        return found

    def _pin(self, host: Tensor) -> Tensor:
        self._pinned.append(host)
        return host

    def _is_pinned(self, host: Tensor) -> bool:
        storage = host.untyped_storage().data_ptr()
        return any(each.untyped_storage().data_ptr() == storage for each in self._pinned)


def _is_there(value: Tensor) -> bool:
    return value.device.type == "meta"


def _is_meta(value: Tensor) -> bool:
    return _is_there(value) and _is_asked_by_torch()


def _is_cuda(value: Tensor) -> bool:
    return _is_there(value) and not _is_asked_by_torch()


def _is_asked_by_torch() -> bool:
    return sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] == "torch"


def _number(value: Tensor) -> Any:
    return True if value.dtype == torch.bool else 0.0 if value.is_floating_point() else 1


def _rows(value: Tensor) -> Tensor:
    return torch.zeros(value.numel(), value.dim(), dtype=torch.int64, device=META)


_VALUES |= {
    "_local_scalar_dense": _number,
    "is_nonzero": lambda _: True,
    "equal": lambda *_: True,
    "nonzero": _rows,
    "masked_select": lambda value, _: value.new_empty(value.numel()),
    "bincount": lambda _value, _weights=None, minlength=0: torch.zeros(minlength, dtype=torch.int64, device=META),
    "_unique2": lambda value, *_, **__: (value.flatten(), _rows(value)[:, 0], _rows(value)[:, 0]),
    "unique_consecutive": lambda value, *_, **__: (value.flatten(), _rows(value)[:, 0], _rows(value)[:, 0]),
}


def _asking() -> str:
    """Name the innermost function that is neither torch's nor of this file."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_ASKING):
            return f"{Path(path).stem}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


class OneOfMany(Lone):
    """One rank without the others, which checks what it asks of them; what comes has no values."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        for tensor, peer in (*sends, *receives):
            assert tensor.is_contiguous(), f"messages must be contiguous, got strides {tensor.stride()}"
            assert 0 <= peer < self.world_size, f"rank {peer} of {self.world_size}"
        return super().exchange(sends, receives)

    def reduce_scatter(self, output: Tensor, source: Tensor) -> None:
        assert self.world_size * output.numel() == source.numel(), (output.shape, source.shape)

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        """Check sizes; the part of this rank arrives."""
        assert output.numel() == self.world_size * source.numel(), (output.shape, source.shape)
        output.view(self.world_size, -1)[self.rank].copy_(source.view(-1))


@contextmanager
def device_without_values() -> Iterator[DeviceWaits]:
    """Take the meta device for a GPU inside the block, whose clock stands still; yield what waits for it."""
    waits = DeviceWaits()

    class Event:
        def __init__(self, **_options: object) -> None:
            self.record()

        def record(self, *_: object) -> None:
            waits.posted += 1
            self.number, self.is_asked = waits.posted, False

        def query(self) -> bool:
            self.is_asked = True
            return True

        def synchronize(self) -> None:
            if not self.is_asked and self.number > waits.reached:
                waits.note("event")

        def elapsed_time(self, _later: object) -> float:
            return 0.0

    def stream(*_: object) -> Any:
        return SimpleNamespace(wait_stream=lambda _: None, wait_event=lambda _: None)

    def from_host(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(data: Any, *args: Any, **options: Any) -> Tensor:
            found = make(data, *args, **options)
            if _is_there(found) and not isinstance(data, Tensor):
                waits.note("copy to the device")
            return found

        return made

    patches = [
        patch.object(torch, "tensor", from_host(torch.tensor)),
        patch.object(torch, "as_tensor", from_host(torch.as_tensor)),
        patch.object(torch.cuda, "Event", Event),
        patch.object(torch.cuda, "Stream", stream),
        patch.object(torch.cuda, "current_stream", stream),
        patch.object(torch.cuda, "stream", lambda _: nullcontext()),
        patch.object(torch.cuda, "synchronize", lambda *_: waits.note("synchronize")),
        patch.object(torch.Tensor, "record_stream", lambda *_: None),
        patch.object(torch.Tensor, "is_meta", property(_is_meta), create=True),
        patch.object(torch.Tensor, "is_cuda", property(_is_cuda), create=True),
        patch.object(choose, "_abilities", lambda _: HOPPER),
        patch.object(choose, "_proof", lambda *_: Proof(fault=None)),  # which compares values
        patch.object(torch, "autocast", _Autocast),
        patch.object(torch, "is_autocast_enabled", _of_meta(torch.is_autocast_enabled)),
        patch.object(torch, "get_autocast_dtype", _of_meta(torch.get_autocast_dtype)),
        patch.object(
            sys.modules["torch.optim.optimizer"], "_get_fused_kernels_supported_devices", lambda: ["cuda", "meta"]
        ),
    ]
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        stack.enter_context(waits)
        yield waits


class _Autocast(torch.autocast):
    """Autocast of the meta device, which torch has not: that of the CPU, which leaves meta tensors as they are."""

    def __init__(self, device_type: str, *args: Any, **options: Any) -> None:
        super().__init__("cpu" if device_type == "meta" else device_type, *args, **options)


def _of_meta(asked: Callable[[str], Any]) -> Callable[..., Any]:
    return lambda kind="cuda": asked("cpu" if kind == "meta" else kind)


def pinned_store_on_meta() -> PinnedStore:
    """Return the store of a GPU's host for the meta device, inside `device_without_values`."""
    store = PinnedStore(torch.device("cuda", 0), where="test")
    store.device = META
    return store
