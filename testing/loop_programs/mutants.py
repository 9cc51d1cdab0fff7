"""Sessions with one defect each, which random programs must find: each does silent harm to a loop that people have.

A mutant wraps methods of `Session`, so that it does not depend on how a session keeps its promises. One that has to,
names what it replaces in `INSIDE`; `mock` raises where that is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from lengthwise import Session

Mutant = Callable[[], AbstractContextManager[object]]


def _slices(session: Session) -> list[nn.Parameter]:
    return [each for group in session.optimizer.param_groups for each in group["params"]]


def _instead(name: str, mutant: Callable[..., Any]) -> Mutant:
    """Replace a method of `Session` by one that is given the original first."""
    original = getattr(Session, name)

    def method(self: Session, *arguments: Any, **options: Any) -> Any:
        return mutant(original, self, *arguments, **options)

    return lambda: mock.patch.object(Session, name, method)


def _before(name: str, act: Callable[[Session], object]) -> Mutant:
    def mutant(original: Callable[..., Any], self: Session, *arguments: Any, **options: Any) -> Any:
        act(self)
        return original(self, *arguments, **options)

    return _instead(name, mutant)


def _after(name: str, act: Callable[[Session], object]) -> Mutant:
    def mutant(original: Callable[..., Any], self: Session, *arguments: Any, **options: Any) -> Any:
        found = original(self, *arguments, **options)
        if self.optimizer is not None:
            act(self)
        return found

    return _instead(name, mutant)


def _all_of(*mutants: Mutant) -> Mutant:
    @contextmanager
    def applied() -> Iterator[None]:
        with ExitStack() as stack:
            for each in mutants:
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
    return float(nn.utils.clip_grad_norm_(_slices(self), limit))


def _without_normalizer(original: Callable[..., Any], self: Session, *rows: Any, **options: Any) -> Any:
    return original(self, *rows, **{**options, "normalizer": None})


def _clear(session: Session) -> None:
    if session.optimizer is not None:
        session.optimizer.zero_grad()


def _zero_is_none(session: Session) -> None:
    clear = session.optimizer.zero_grad
    session.optimizer.zero_grad = lambda set_to_none=True: clear() if set_to_none in (True, False) else None


def _none_is_zero(session: Session) -> None:
    for each in _slices(session):
        if each.grad is None:
            each.grad = torch.zeros_like(each)


def _step_keeps_gradients(session: Session) -> None:
    kept = list[Tensor | None]()
    optimizer = session.optimizer

    def before(*_: object) -> None:
        kept[:] = [None if each.grad is None else each.grad.clone() for each in _slices(session)]

    def after(*_: object) -> None:
        for each, gradient in zip(_slices(session), kept, strict=True):
            each.grad = gradient

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def _gradients_of(session: Session) -> list[Tensor | None]:
    return [None if each.grad is None else each.grad.clone() for each in _slices(session)]


def _loses_changes_of_gradients(*, at_step: bool) -> Mutant:
    """Take gradients back to what the last backward made of them: before the next, or before a step."""
    kept = dict[int, list[Tensor | None]]()

    def keep(session: Session) -> None:
        kept[id(session)] = _gradients_of(session)

    def take_back(session: Session) -> None:
        slices = _slices(session)
        if any(each.grad is not None and each.grad.any() for each in slices):  # else they were cleared
            for each, before in zip(slices, kept.get(id(session), ()), strict=False):
                if each.grad is not None and before is not None:
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


def _loses_writes(parameters: Callable[[Session], list[nn.Parameter]]) -> Mutant:
    """Take weights back to what the last step made of them, before anything reads them."""
    kept = dict[int, list[Tensor]]()

    def keep(session: Session) -> None:
        kept[id(session)] = [each.detach().clone() for each in parameters(session)]

    def begin(session: Session) -> None:
        keep(session)
        session.optimizer.register_step_post_hook(lambda *_: keep(session))

    def take_back(session: Session) -> None:
        if session.optimizer is not None and id(session) in kept:
            for each, before in zip(parameters(session), kept[id(session)], strict=True):
                each.data.copy_(before)

    readers = [_before(name, take_back) for name in ("backward", "evaluate", "state_dict")]
    return _all_of(_after("__init__", begin), _after("load_state_dict", keep), *readers)


def _of_whole_model(session: Session) -> list[nn.Parameter]:
    is_whole = session.shard == "zero1" and session._engine.pipeline is None
    return [each for each in session.model.parameters() if each.requires_grad] if is_whole else []


def _load_without(part: str) -> Mutant:
    def mutant(original: Callable[..., Any], self: Session, state: Mapping[str, Any] | None) -> None:
        before = [group["lr"] for group in self.optimizer.param_groups]
        if state and part == "state":
            state = {**state, "optimizer": {**state["optimizer"], "state": {}}}
        original(self, state)
        if part == "lr":
            for group, rate in zip(self.optimizer.param_groups, before, strict=True):
                group["lr"] = rate

    return _instead("load_state_dict", mutant)


INSIDE: Mapping[str, tuple[str, object]] = {
    # name: (what is replaced, by what it is replaced), for defects that cannot be made from outside.
    "the copy of a tied weight in the last stage is old": (
        "lengthwise.engine.stage_parameters.StageParameters._give_values",
        lambda *_: None,
    ),
}
MUTANTS: Mapping[str, Mutant] = {
    "clipping goes by the norm of the last backward": _instead("clip_grad_norm_", _clip_by_norm_of_backward),
    "clipping goes by the norm of a rank's slices": _instead("clip_grad_norm_", _clip_by_own_slices),
    "a backward drops the gradients of the one before": _before("backward", _clear),
    "a normalizer is dropped": _instead("backward", _without_normalizer),
    "changes of gradients are lost at the next backward": _loses_changes_of_gradients(at_step=False),
    "changes of gradients are lost at a step": _loses_changes_of_gradients(at_step=True),
    "an evaluation clears gradients": _after("evaluate", _clear),
    "an evaluating session clears gradients at its end": _instead("close", _clear_of_evaluating),
    "a closure's gradients come after the update": _after("__init__", _closure_comes_late),
    "zero_grad to zero clears": _after("__init__", _zero_is_none),
    "a parameter without a gradient has one of zeros": _after("backward", _none_is_zero),
    "a step keeps its gradients": _after("__init__", _step_keeps_gradients),
    "weights written through groups are lost": _loses_writes(_slices),
    "weights written by name are lost": _loses_writes(_of_whole_model),
    "a loaded state has no moments": _load_without("state"),
    "a loaded state has no learning rates": _load_without("lr"),
    **{name: lambda given=given: mock.patch(*given) for name, given in INSIDE.items()},
}
