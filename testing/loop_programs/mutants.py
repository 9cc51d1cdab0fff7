"""Sessions with one defect each, which random programs must find: each does silent harm to a loop that people have.

Most wrap methods of `Session`, so that they do not depend on how a session keeps its promises. The others name what
they replace; `mock` raises where that is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from lengthwise import Session
from testing.loop_programs.program import Program, draw_program

Defect = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A defect, and what a program must have to show it: these operations in this order, in such a layout and model."""

    defect: Defect
    operations: tuple[str, ...]
    layout: str = ""
    model: str = ""

    def programs(self, seeds: Iterable[int], most: int) -> list[Program]:
        """Return the first `most` programs of the seeds that can show it."""
        able = (each for each in map(draw_program, seeds) if self._can_show_in(each))
        return list(islice(able, most))

    def _can_show_in(self, program: Program) -> bool:
        names = iter(each.name for each in program.operations)
        return (
            all(name in names for name in self.operations)
            and self.layout in program.layout
            and self.model in ("", program.model)
        )


_unguarded = torch._C.DisableTorchFunctionSubclass  # a mutant sees slices as the tensors that they are


def _slices(session: Session) -> list[nn.Parameter]:
    return [each for group in session.optimizer.param_groups for each in group["params"]]


def _instead(name: str, mutant: Callable[..., Any]) -> Defect:
    """Replace a method of `Session` by one that is given what was there first."""

    def applied() -> AbstractContextManager[object]:
        original = getattr(Session, name)

        def method(self: Session, *arguments: Any, **options: Any) -> Any:
            return mutant(original, self, *arguments, **options)

        return mock.patch.object(Session, name, method)

    return applied


def _before(name: str, act: Callable[[Session], object]) -> Defect:
    def mutant(original: Callable[..., Any], self: Session, *arguments: Any, **options: Any) -> Any:
        act(self)
        return original(self, *arguments, **options)

    return _instead(name, mutant)


def _after(name: str, act: Callable[[Session], object]) -> Defect:
    def mutant(original: Callable[..., Any], self: Session, *arguments: Any, **options: Any) -> Any:
        found = original(self, *arguments, **options)
        if self.optimizer is not None:
            act(self)
        return found

    return _instead(name, mutant)


def _all_of(*defects: Defect) -> Defect:
    @contextmanager
    def applied() -> Iterator[None]:
        with ExitStack() as stack:
            for each in defects:
                stack.enter_context(each())
            yield

    return applied


def _clip_by_norm_of_backward(_original: object, self: Session, limit: float) -> float:
    norm = self.grad_norm or 0.0
    for each in _slices(self):
        if each.grad is not None:
            each.grad.mul_(min(1.0, limit / (norm + 1e-6)))
    return norm


def _clip_by_own_slices(_original: object, self: Session, limit: float) -> float:
    slices = _slices(self)
    with _unguarded():
        norm = float(torch.cat([each.grad for each in slices if each.grad is not None] or [torch.zeros(1)]).norm())
    for each in slices:
        if each.grad is not None:
            each.grad.mul_(min(1.0, limit / (norm + 1e-6)))
    return norm


def _without_normalizer(original: Callable[..., Any], self: Session, *rows: Any, **options: Any) -> Any:
    return original(self, *rows, **{**options, "normalizer": None})


def _clear(session: Session) -> None:
    if session.optimizer is not None:
        session.optimizer.zero_grad()


def _zero_is_none(session: Session) -> None:
    clear = session.optimizer.zero_grad
    session.optimizer.zero_grad = lambda set_to_none=True: clear() if set_to_none in (True, False) else None


def _none_is_zero(session: Session) -> None:
    with _unguarded():
        for each in _slices(session):
            if each.grad is None:
                each.grad = torch.zeros_like(each, requires_grad=False)


def _step_clears(session: Session) -> None:
    session.optimizer.register_step_post_hook(lambda *_: session.optimizer.zero_grad())


def _gradients_of(session: Session) -> list[Tensor | None]:
    with _unguarded():
        return [None if each.grad is None else each.grad.clone() for each in _slices(session)]


def _loses_changes_of_gradients(*, at_step: bool) -> Defect:
    """Take gradients back to what the last backward made of them: before the next, or before a step."""
    kept = dict[int, list[Tensor | None]]()

    def keep(session: Session) -> None:
        kept[id(session)] = _gradients_of(session)

    def take_back(session: Session) -> None:
        slices = _slices(session)
        with _unguarded():
            is_cleared = not any(each.grad is not None and each.grad.any() for each in slices)
        for each, before in zip(slices, kept.get(id(session), ()), strict=False):
            if not is_cleared and each.grad is not None and before is not None:
                each.grad.copy_(before)

    def begin(session: Session) -> None:
        session.optimizer.register_step_pre_hook(lambda *_: take_back(session))

    return _all_of(_after("backward", keep), _after("__init__", begin) if at_step else _before("backward", take_back))


def _closure_comes_late(session: Session) -> None:
    """Let a step with a closure update by the gradients that there were before."""
    step = session.optimizer.step

    def late(closure: Callable[[], float] | None = None) -> float | None:
        step()
        return None if closure is None else closure()

    session.optimizer.step = late


def _clear_of_evaluating(original: Callable[..., Any], self: Session) -> None:
    original(self)
    if self.optimizer is None:
        self.model.zero_grad()


def _loses_writes(parameters: Callable[[Session], list[nn.Parameter]]) -> Defect:
    """Take weights back to what the last step made of them, before anything reads them."""
    kept = dict[int, list[Tensor]]()

    def keep(session: Session) -> None:
        with _unguarded():
            kept[id(session)] = [each.detach().clone() for each in parameters(session)]

    def begin(session: Session) -> None:
        keep(session)
        session.optimizer.register_step_post_hook(lambda *_: keep(session))

    def take_back(session: Session) -> None:
        if session.optimizer is not None and id(session) in kept:
            with _unguarded():
                for each, before in zip(parameters(session), kept[id(session)], strict=True):
                    each.data.copy_(before)

    readers = [_before(name, take_back) for name in ("backward", "evaluate", "state_dict")]
    return _all_of(_after("__init__", begin), _after("load_state_dict", keep), *readers)


def _of_whole_model(session: Session) -> list[nn.Parameter]:
    is_whole = session.shard == "zero1" and session.engine.pipeline is None
    return [each for each in session.model.parameters() if each.requires_grad] if is_whole else []


def _load_without(part: str) -> Defect:
    def mutant(original: Callable[..., Any], self: Session, state: Mapping[str, Any] | None) -> None:
        before = [group["lr"] for group in self.optimizer.param_groups]
        if state and part == "state":
            state = {**state, "optimizer": {**state["optimizer"], "state": {}}}
        original(self, state)
        if part == "lr":
            for group, rate in zip(self.optimizer.param_groups, before, strict=True):
                group["lr"] = rate

    return _instead("load_state_dict", mutant)


class _All:
    """Has everything in it."""

    def __contains__(self, _: object) -> bool:
        return True


def _dropping_own_gradients(updates: Any, settle: Callable[[Any], None]) -> None:
    for name, (parameter, withheld) in updates._withheld.items():
        if parameter.grad is not None and parameter.grad is not withheld:
            parameter.grad = withheld if name in updates.with_gradient else None
    settle(updates)


def _dropping_settle() -> AbstractContextManager[object]:
    from lengthwise.session.loop_optimizer import LoopOptimizer

    settle: Any = vars(LoopOptimizer)["settle"]
    return mock.patch.object(LoopOptimizer, "settle", lambda self: _dropping_own_gradients(self, settle))


def _nothing(*_: object, **__: object) -> None: ...


def _inside(name: str, instead: object) -> Defect:
    """Replace what only the inside of a session has."""
    return lambda: mock.patch(f"lengthwise.{name}", instead)


_OWN_BACKWARD = classmethod(lambda _cls, _func, _types, args=(), _kwargs=None: args[0])
_GIVE = "engine.stage_share.StageShare.share_tied"
_ACCUMULATES = ("backward", "backward")
MUTANTS: Mapping[str, Mutant] = {
    "clipping goes by the norm of the last backward": Mutant(
        defect=_instead("clip_grad_norm_", _clip_by_norm_of_backward), operations=("backward", "clip", "clip")
    ),
    "clipping goes by the norm of a rank's slices": Mutant(
        defect=_instead("clip_grad_norm_", _clip_by_own_slices), operations=("backward", "clip"), layout="zero3"
    ),
    "norms of slices are taken for those of the whole": Mutant(
        defect=_inside("session.guards._ALLOWED", _All()), operations=("backward", "clip_groups"), layout="zero"
    ),
    "a backward drops the gradients of the one before": Mutant(
        defect=_before("backward", _clear), operations=_ACCUMULATES
    ),
    "a normalizer is dropped": Mutant(defect=_instead("backward", _without_normalizer), operations=("backward",)),
    "changes of gradients are lost at the next backward": Mutant(
        defect=_loses_changes_of_gradients(at_step=False), operations=("backward", "scale_groups", "backward")
    ),
    "changes of gradients are lost at a step": Mutant(
        defect=_loses_changes_of_gradients(at_step=True), operations=("backward", "scale_groups", "step")
    ),
    "an evaluation clears gradients": Mutant(
        defect=_after("evaluate", _clear), operations=("backward", "evaluate", "step")
    ),
    "an evaluating session clears gradients at its end": Mutant(
        defect=_instead("close", _clear_of_evaluating), operations=("backward", "evaluate_elsewhere"), layout="zero1"
    ),
    "a closure's gradients come after the update": Mutant(
        defect=_after("__init__", _closure_comes_late), operations=("step_closure",)
    ),
    "zero_grad to zero clears": Mutant(
        defect=_after("__init__", _zero_is_none), operations=("backward", "step", "backward", "zero_grad", "step")
    ),
    "a parameter without a gradient has one of zeros": Mutant(
        defect=_after("backward", _none_is_zero), operations=("backward", "step"), model="unreached"
    ),
    "a step clears gradients": Mutant(defect=_after("__init__", _step_clears), operations=("backward", "step", "step")),
    "weights written through groups are lost": Mutant(
        defect=_loses_writes(_slices), operations=("write_groups", "backward")
    ),
    "weights written by name are lost": Mutant(
        defect=_loses_writes(_of_whole_model), operations=("write_named", "backward"), layout="zero1"
    ),
    "one copy of a tied weight stays": Mutant(
        defect=_inside("session.agreement.Agreement._share_tied", _nothing),
        operations=("write_named", "backward"),
        layout="stages",
        model="tied",
    ),
    "the copy of a tied weight in the last stage is old": Mutant(
        defect=_inside(_GIVE, _nothing), operations=("step", "backward"), layout="stages", model="tied"
    ),
    "a backward of the loop's own before the session's is dropped": Mutant(
        defect=_dropping_settle, operations=("backward_of_model", "backward"), layout="zero1"
    ),
    "a backward of the loop's own after the session's is dropped": Mutant(
        defect=_inside("session.guards.WithheldGradient.__torch_dispatch__", _OWN_BACKWARD),
        operations=("backward", "backward_of_model"),
        layout="zero1",
    ),
    "ranks are not compared": Mutant(
        defect=_inside("session.agreement.Agreement._refuse_others", _nothing), operations=("alone",)
    ),
    "a loaded state has no moments": Mutant(
        defect=_load_without("state"), operations=("step", "reload", "backward", "step")
    ),
    "a loaded state has no learning rates": Mutant(
        defect=_load_without("lr"), operations=("scale_lr", "reload", "backward", "step")
    ),
}
"""Defects by name; to add one, write what it replaces and the operations that show it."""
