"""The units in which a model's parameters are gathered, and the buffers that hold a unit's parameters while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lengthwise.comm import Pending, Transport
from lengthwise.engine.wave_order import CallKey, UnitKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUnit:
    """A unit of a model: its parameters by name, tied ones once, and the modules that its gather comes before."""

    kind: UnitKind
    names: tuple[str, ...]
    enters: tuple[nn.Module, ...]


def units_of(model: nn.Module, layers: Sequence[nn.Module]) -> list[ModelUnit]:
    """Cut a model into units: what is registered before its decoder `layers`, each layer, and what is after them.

    All that is in no layer is one unit, which stays, where tied parameters connect it, where layers share a parameter,
    or where something else than norms and the head is registered after the layers: it may run before them.
    """
    layer_of = {id(module): number for number, layer in enumerate(layers) for module in layer.modules()}
    last, outside = len(layers) + 1, 0
    places, enters = dict[int, set[int]](), {number + 1: [layer] for number, layer in enumerate(layers)}
    for module in model.modules():
        is_in_layer = id(module) in layer_of
        outside = last if is_in_layer else outside
        number = layer_of[id(module)] + 1 if is_in_layer else outside
        own = [each for each in module._parameters.values() if each is not None]
        if own and not is_in_layer:
            enters.setdefault(number, []).append(module)
        for each in own:
            places.setdefault(id(each), set()).add(number)
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
        name = {0: "what is in no layer" if is_one else "embedding", last: "norm and head"}.get(number)
        kind = UnitKind(
            name=name or f"layer {number - 1}",
            again=0 < number < last,
            stays=number == last or (not number and not all(isinstance(each, nn.Embedding) for each in enters[0])),
            trains=any(each.requires_grad for _, each in named),
        )
        units.append(ModelUnit(kind=kind, names=tuple(name for name, _ in named), enters=tuple(enters[number])))
    return units


def _ends_a_model(model: nn.Module, modules: Sequence[nn.Module]) -> bool:
    """Whether modules are norms, or of the output head."""
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[operator]
    of_head = set() if head is None else set(head.modules())
    return all(each in of_head or "norm" in type(each).__name__.lower() for each in modules)


class UnitPart:
    """Parameters of a unit that all train, or all do not: views of one buffer, which has storage while it is gathered.

    views: of the buffer, by parameter; autograd may save them: the storage is the same whenever it is filled. own: what
    this rank has of them, (entries / ranks,), in any dtype. gradient: of the same entries, the sum so far; None: they
    do not train.
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
        self._own, self._gradient, self._starts = own, gradient, starts
        # Of `.data`: what is written to the buffer is no change of a parameter, as autograd counts changes.
        self.parameters = [
            nn.Parameter(view.data, requires_grad=gradient is not None) for view in self._cut(self._whole, shapes)
        ]
        self._arriving: Pending | None = None
        self._sum: tuple[Tensor, Pending] | None = None
        self.free()

    def _cut(self, whole: Tensor, shapes: Sequence[tuple[int, ...]]) -> Iterator[Tensor]:
        for start, shape in zip(self._starts, shapes, strict=True):
            yield whole[start : start + torch.Size(shape).numel()].view(shape)

    @property
    def trains(self) -> bool:
        """Whether they have gradients."""
        return self._gradient is not None

    def gather(self, transport: Transport, key: CallKey) -> None:
        """Begin to gather what each rank has of the values. Collective."""
        storage = self._whole.untyped_storage()
        storage.resize_(self._whole.numel() * self._whole.element_size())
        own = self._own.to(self._whole.dtype)
        self._arriving = transport.all_gather_async(self._whole, own, key=key)

    def wait(self) -> None:
        """Wait for the values."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None

    def free(self) -> None:
        """Let the values go."""
        self.wait()
        self._whole.untyped_storage().resize_(0)

    def reduce(self, transport: Transport, key: CallKey) -> None:
        """Begin to sum the gradients that autograd has made, zeros where there are none. Collective."""
        assert self._gradient is not None, "of what trains"
        shapes = [tuple(each.shape) for each in self.parameters]
        wide = torch.zeros(self._whole.numel(), dtype=self._gradient.dtype, device=self._gradient.device)
        for parameter, room in zip(self.parameters, self._cut(wide, shapes), strict=True):
            if parameter.grad is not None:
                room.copy_(parameter.grad)
                parameter.grad = None
        own = torch.empty_like(self._gradient)
        self._sum = own, transport.reduce_scatter_async(own, wide, key=key)

    def add_sum(self) -> None:
        """Wait for the sum, and add it to those of the waves before."""
        if self._sum is not None:
            own, pending = self._sum
            pending.wait()
            assert self._gradient is not None, "of what trains"
            self._gradient.add_(own)
            self._sum = None
