"""Units of a model, whose parameters are gathered while they run and freed afterwards, and sums of gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.comm import Pending, Transport
from lengthwise.core.errors import ModelRefused
from lengthwise.engine.wave_order import CallKey, UnitKind


class Accumulation:
    """Adds the gradients of `parameters` up in `sums`, of the same shapes.

    Autograd adds in place if dtypes are equal; otherwise a hook adds a backward's gradient and drops it. made: callback
    with a parameter's number, once a backward has made its gradient.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], sums: Sequence[Tensor], *, made: Callable[[int], None] | None = None
    ) -> None:
        self._parameters, self._sums, self._made = parameters, sums, made
        self._adds = any(own.dtype != total.dtype for own, total in zip(parameters, sums, strict=True))
        self._places, self._collects = [each.data_ptr() for each in parameters], True
        self._hooks = [
            each.register_post_accumulate_grad_hook(partial(self._take, number))
            for number, each in enumerate(parameters if self._adds or made is not None else ())
        ]
        self.attach()

    def are_in_place(self) -> bool:
        """Return whether the parameters still have their memory."""
        return [each.data_ptr() for each in self._parameters] == self._places

    def attach(self) -> None:
        """Begin to add gradients up."""
        self._collects = True
        for own, total in zip(self._parameters, self._sums, strict=True):
            own.grad = None if self._adds else total

    def detach(self) -> None:
        """Ignore gradients until they are attached again."""
        self._collects = False
        for own in self._parameters:
            own.grad = None

    def release(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _take(self, number: int, parameter: Tensor) -> None:
        """Add a backward's gradient of a parameter; ignore backwards while detached, and replaced parameters."""
        if not self._collects or parameter.data_ptr() != self._places[number]:
            return
        if self._adds and parameter.grad is not None:
            self._sums[number].add_(parameter.grad)
            parameter.grad = None
        if self._made is not None:
            self._made(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUnit:
    """A unit of a model: names of its parameters, tied ones once, and the modules before which it is gathered."""

    kind: UnitKind
    names: tuple[str, ...]
    enters: tuple[nn.Module, ...]


def units_of(model: nn.Module, layers: Sequence[nn.Module]) -> list[ModelUnit]:
    """Cut a model into units: the modules registered before its decoder `layers`, every layer, and those after them.

    The modules outside of layers form one unit, which stays gathered, if they share tied parameters, if layers share a
    parameter, or if anything but norms and the head is registered after the layers, as that may run before them.
    """
    in_layers = {id(module) for layer in layers for module in layer.modules()}
    last, outside = len(layers) + 1, 0
    places, enters = dict[int, set[int]](), {number + 1: [layer] for number, layer in enumerate(layers)}
    for number, layer in enumerate(layers):
        for each in layer.parameters():
            places.setdefault(id(each), set()).add(number + 1)
    for module in model.modules():
        if id(module) in in_layers:
            outside = last
            continue
        for each in module.parameters(recurse=False):
            places.setdefault(id(each), set()).add(outside)
        # Not only the owners: an adapter around a module may read its values without a call.
        if any(True for _ in module.parameters()) and not any(id(each) in in_layers for each in module.modules()):
            enters.setdefault(outside, []).append(module)
    before, after = enters.get(0, []), enters.get(last, [])
    is_one = any(len(each) > 1 for each in places.values()) or not _ends_a_model(model, after)
    if is_one:
        enters[0] = before + after
        places = {key: {0} if len(each) > 1 or last in each else each for key, each in places.items()}
    members: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        (number,) = places[id(parameter)]
        members.setdefault(number, []).append((name, parameter))
    units = []
    for number, named in sorted(members.items()):
        name = {0: "modules outside of layers" if is_one else "embedding", last: "norm and head"}.get(number)
        kind = UnitKind(
            name=name or f"layer {number - 1}",
            again=0 < number < last,
            stays=number == last or (not number and not all(isinstance(each, nn.Embedding) for each in enters[0])),
            trains=any(each.requires_grad for _, each in named),
        )
        units.append(ModelUnit(kind=kind, names=tuple(name for name, _ in named), enters=tuple(enters[number])))
    return units


def _ends_a_model(model: nn.Module, modules: Sequence[nn.Module]) -> bool:
    """Return whether all modules are norms or belong to the output head."""
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[operator]
    of_head = set() if head is None else set(head.modules())
    return all(module in of_head or "norm" in type(module).__name__.lower() for module in modules)


class FreedParameter(nn.Parameter):
    """A parameter while its values lie over the ranks: it has a shape and a gradient, but no values.

    It stays the same object for optimizers, hooks and tied modules: only its class and data change. The data is one NaN
    expanded to its shape, so that a read past this class (as torch.tensor's) gives NaN, not freed memory.

    comes_to: view of the buffer with its values while they are gathered.
    """

    comes_to: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run functions that read no values.

        Raises:
            ModelRefused: another function.
        """
        del types
        if func in _WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        name = func.__self__.__name__ if name in ("__get__", "__set__") else name
        raise ModelRefused(
            f"{name} of a parameter",
            expected="a parameter with values, as sharded models have them while a layer runs in a step",
            got="a parameter whose values lie over the ranks",
            remedy="Use the session's whole_on_first on all ranks, which makes rank 0's model whole.",
        )

    def __repr__(self) -> str:  # type: ignore[override]
        """Return a text with shape and dtype, not values."""
        return f"Parameter of shape {tuple(self.shape)} in {self.dtype}, whose values lie over the ranks"

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of its gathered values, which is empty now."""
        return self.comes_to.untyped_storage()

    def __deepcopy__(self, memo: object) -> Any:
        """Refuse a copy."""
        del memo
        return self.clone()


def _without_values() -> frozenset[Any]:
    attributes = "shape dtype device layout ndim grad grad_fn requires_grad is_leaf nbytes itemsize retains_grad"
    flags = "is_meta is_cuda is_cpu is_mps is_xpu is_sparse is_quantized is_nested _version _is_view"
    hooks = "_backward_hooks _post_accumulate_grad_hooks"
    methods = "size dim ndimension numel nelement element_size get_device requires_grad_ __len__"
    asked = "is_floating_point is_complex register_hook register_post_accumulate_grad_hook __format__"
    tensor: Any = Tensor
    of_tensor = [getattr(tensor, name) for name in f"{attributes} {flags} {hooks} {methods} {asked}".split()]
    read = [each.__get__ if hasattr(each, "__set__") else each for each in of_tensor]
    written = [tensor.grad.__set__, tensor.grad.__delete__, tensor.requires_grad.__set__]
    is_asked = (torch.is_floating_point, torch.is_complex, torch.numel)
    return frozenset([*read, *written, *is_asked])


_WITHOUT_VALUES = _without_values()


def let_go(parameter: Any) -> None:
    """Remove the values of a parameter that a sharded model has replaced, in case others keep it."""
    value = _no_value(parameter.dtype, parameter.device)
    parameter.data = value.expand(parameter.shape)
    parameter.__class__, parameter.comes_to = FreedParameter, value


def _no_value(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the stand-in for missing values, (): NaN, or 0 in dtypes without NaN."""
    return torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device)


class UnitPart:
    """Parameters of a unit that all train, or are all frozen: views of one buffer, whose storage exists while gathered.

    Autograd may save views of the buffer, because its storage object stays the same. own: this rank's slice of them,
    (entries / ranks,), in any dtype. gradient: the sum of the slice's gradient so far, or None for frozen parameters.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        starts: Sequence[int],
        *,
        entries: int,
        dtype: torch.dtype,
        own: Tensor,
        gradient: Tensor | None,
    ) -> None:
        self._whole = torch.empty(entries, dtype=dtype, device=own.device)
        self._own, self._gradient = own, gradient
        stops = [start + math.prod(shape) for start, shape in zip(starts, shapes, strict=True)]
        borders = zip((0, *stops), (*starts, entries), strict=True)
        self._gaps = [slice(stop, start) for stop, start in borders if stop < start]  # entries of no parameter
        self._places = list(zip(map(slice, starts, stops), shapes, strict=True))
        # `.data`: autograd must not count writes to the buffer as changes of a parameter.
        self._views = [view.data for view in self._cut(self._whole)]
        no_value = _no_value(dtype, own.device)
        self._no_values = [no_value.expand(shape) for shape in shapes]
        self.parameters = [nn.Parameter(view, requires_grad=gradient is not None) for view in self._views]
        self._arriving: Pending | None = None
        self._sum: tuple[Tensor, Pending] | None = None
        self.free()

    def _cut(self, whole: Tensor) -> list[Tensor]:
        return [whole[place].view(shape) for place, shape in self._places]

    @property
    def trains(self) -> bool:
        """Whether the parameters train."""
        return self._gradient is not None

    @property
    def size(self) -> tuple[object, ...]:
        """The properties that its collectives depend on: entries, dtype, and whether gradients are summed."""
        return self._whole.numel(), self._whole.dtype, self.trains

    def gather(self, transport: Transport, key: CallKey | None) -> None:
        """Begin to gather the ranks' slices of the values. Collective."""
        storage = self._whole.untyped_storage()
        storage.resize_(self._whole.numel() * self._whole.element_size())
        own = self._own.to(self._whole.dtype)
        self._arriving = transport.all_gather_async(self._whole, own, key=key)

    def wait(self) -> None:
        """Wait for gathered values."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
            for parameter, view in zip(self.parameters, self._views, strict=True):
                parameter.__class__, parameter.data = nn.Parameter, view

    def free(self) -> None:
        """Free the values."""
        self.wait()
        parameters: list[Any] = self.parameters
        for parameter, view, no_value in zip(parameters, self._views, self._no_values, strict=True):
            parameter.__class__, parameter.data = nn.Parameter, no_value
            # A class, because reading freed storage ends the process, and no other mark reaches every operator.
            parameter.__class__, parameter.comes_to = FreedParameter, view
        self._whole.untyped_storage().resize_(0)

    def reduce(self, transport: Transport, key: CallKey | None) -> None:
        """Begin to sum the gradients over the ranks; missing ones count as zeros. Collective."""
        assert self._gradient is not None, "frozen parameters have no gradients"
        wide = torch.empty(self._whole.numel(), dtype=self._gradient.dtype, device=self._gradient.device)
        for gap in self._gaps:
            wide[gap].zero_()
        with torch._C.DisableTorchFunctionSubclass():  # most are freed, and their class makes every access slower
            for parameter, room in zip(self.parameters, self._cut(wide), strict=True):
                if parameter.grad is None:
                    room.zero_()
                else:
                    room.copy_(parameter.grad)
                    parameter.grad = None
        own = torch.empty_like(self._gradient)
        self._sum = own, transport.reduce_scatter_async(own, wide, key=key)

    def add_sum(self) -> None:
        """Wait for the sum, and add it to the sums of earlier waves."""
        if self._sum is not None:
            own, pending = self._sum
            pending.wait()
            assert self._gradient is not None, "frozen parameters have no gradients"
            self._gradient.add_(own)
            self._sum = None
