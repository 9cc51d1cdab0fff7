"""Which activations of a microbatch are kept for backward, and what does not run again in a recomputed layer.

In the recomputation attention runs again with its ring (`layer`), or takes the first run's (out, lse) and sends nothing
(`all_but_attention`). Products of matrices may be kept in the same way (`elementwise`). Layers without attention keep
the tensors that they received.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol, Self, cast

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from lengthwise.attention.partials import Attended
from lengthwise.core.plan import Again
from lengthwise.offload import ActivationSaver
from lengthwise.program import HeadRange

Kept = tuple[Callable[[], Tensor], Mapping[HeadRange, Callable[[], Tensor]]]
"""(out, lse by range of heads) of one layer, to be read once."""
_OVERWROTE = "the model overwrote the output of its attention or of a product"
_aten = torch.ops.aten
_PRODUCTS = frozenset(
    getattr(_aten, name).default
    for name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationPolicy:
    """The activations of a microbatch that are kept for backward, by its plan.

    recompute: as `core.plan.kinds_by_layer` reads it. saver: saver of the plan's offloaded share, None without.
    """

    recompute: str = "none"
    saver: ActivationSaver | None = None


class Recomputed(Protocol):
    """The owner of recomputed layers: a microbatch's `PlannedAttention`."""

    recomputation: Recomputation | None


class Recomputation:
    """One checkpointed call of one layer of `planned`: a context for its first run and then for its recomputation."""

    def __init__(self, planned: Recomputed, *, again: Again, saver: ActivationSaver | None = None) -> None:
        self._planned, self._keeps_attention, self._saver = planned, not again.attention, saver
        self._products = None if again.products else _Products(saver)
        self._kept = deque[Kept]()
        self._received = deque[list[Tensor]]()
        self.is_second_run = False

    def __enter__(self) -> None:
        """Set this as the running recomputation of `planned`."""
        assert self._planned.recomputation is None, "one checkpointed layer inside another"
        self._planned.recomputation = self
        if self._products is not None:
            self._products.__enter__()

    def __exit__(self, *error: Any) -> None:
        """End a run; later ones are recomputations."""
        if self._products is not None:
            self._products.__exit__(*error)
        self._planned.recomputation, self.is_second_run = None, True

    def receive(self, run: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return the tensors that `run` receives from other ranks, or received in the first run."""
        if not self.is_second_run:
            self._received.append([each.detach() for each in run()])
            return [each.detach() for each in self._received[-1]]
        return self._received.popleft()

    def attend(
        self,
        run: Callable[[], tuple[Tensor, Attended]],
        read_again: Callable[[Tensor, Mapping[HeadRange, Tensor]], Attended],
    ) -> tuple[Tensor, Attended]:
        """Return the result of `run`, or in the second run `read_again` of its (out, lse), if the first kept them."""
        if not self._keeps_attention:
            return run()
        if not self.is_second_run:
            out, attended = run()
            keep = partial(_keep, self._saver)
            lse = {heads: keep(saved.lse, saved.lse._version) for heads, (_, saved) in attended.items()}
            self._kept.append((keep(out.detach(), out._version), lse))
            return out, attended
        kept, lse = self._kept.popleft()
        return (out := kept()), read_again(out, {heads: each() for heads, each in lse.items()})


def _keep(saver: ActivationSaver | None, tensor: Tensor, version: int) -> Callable[[], Tensor]:
    """Keep or offload a tensor of this version; return a function that returns it, if it was not overwritten."""
    assert tensor._version == version, _OVERWROTE
    saved = tensor if saver is None else saver.pack(tensor)
    held = saved if isinstance(saved, Tensor) else saved.kept  # None if it is away

    def unwritten() -> Tensor:
        assert held is None or held._version == version, _OVERWROTE
        return cast(Tensor, saved) if saver is None else saver.unpack(saved)

    return unwritten


def keeps_products() -> bool:
    """Return whether a layer runs whose products are kept, and whose results must not be overwritten."""
    return any(isinstance(each, _Products) for each in _get_current_dispatch_mode_stack())


@cache
def _written(func: Any) -> tuple[int, ...]:
    """Return the places of the arguments that an operation writes."""
    schema = getattr(func, "_schema", None)  # a compiled region has none
    arguments = enumerate(schema.arguments if schema else ())
    return tuple(place for place, each in arguments if each.alias_info is not None and each.alias_info.is_write)


class _Products(TorchDispatchMode):
    """Keeps the results of a layer's products in its first run, and returns them in the second, where none runs.

    Torch ends the second run at the last tensor that the first saved, so later results are not kept. Products inside an
    autograd function, where gradients are off, are its own affair.
    """

    def __init__(self, saver: ActivationSaver | None) -> None:
        super().__init__()
        self._saver = saver
        self._made, self._kept = list[tuple[Tensor, int]](), deque[Callable[[], Tensor]]()  # results, their versions
        self._read = 0  # of the results, those that the second run comes to
        self._places = dict[int, int]()  # of results in `_made`, by storage
        self._hooks: saved_tensors_hooks | None = None
        self._is_second_run = False

    def __enter__(self) -> Self:
        """Begin a run, inside of the hooks of torch's checkpoint."""
        if not self._is_second_run:
            save, unpack = _top_saved_tensors_default_hooks(False)
            self._hooks = saved_tensors_hooks(lambda tensor: (self._read_later(), save(tensor))[1], unpack)
            self._hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """End a run."""
        super().__exit__(*error)
        if self._hooks is not None:
            self._hooks.__exit__(*error)
        self._hooks, self._is_second_run = None, True
        self._kept.extend(_keep(self._saver, *each) for each in self._made[: self._read] if error[0] is None)
        self._made.clear()
        self._places.clear()

    def _read_later(self) -> None:
        """Keep the results so far: the second run comes here."""
        self._read = len(self._made)

    def _before_write(self, tensor: Tensor) -> None:
        """Copy a result that the model is about to overwrite. Counters of writes do not see writes to its views."""
        place = self._places.pop(tensor.untyped_storage()._cdata, None)
        if place is not None:
            copy = self._made[place][0].clone()
            self._made[place] = copy, copy._version

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, or return the kept result of a product."""
        del types
        is_kept = func in _PRODUCTS and torch.is_grad_enabled()
        if self._is_second_run:
            return self._kept.popleft()() if is_kept and self._kept else func(*args, **(kwargs or {}))
        for place in _written(func):
            if place < len(args) and isinstance(args[place], Tensor):
                self._before_write(args[place])
        out = func(*args, **(kwargs or {}))
        if is_kept:
            self._places[out.untyped_storage()._cdata] = len(self._made)
            self._made.append((out.detach(), out._version))
        return out

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled forwards run as they are."""
        return True
