"""The model and the optimizer of a user's own loop in a session.

While the session is open, the model and the optimizer have methods and hooks of it; closing removes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lengthwise.core.errors import ConfigError, ModelRefused
from lengthwise.engine.optimizer import SlicedOptimizer, made_on_slices
from lengthwise.engine.parameters import Parameters
from lengthwise.engine.placing import pickled
from lengthwise.engine.whole_optimizer import optimizer_of, read_optimizer
from lengthwise.models import whole_model
from lengthwise.session.loop_optimizer import LoopOptimizer
from lengthwise.session.settings import SessionSettings
from lengthwise.session.withheld import refuse_hooks


def slices_of(settings: SessionSettings, closing: ExitStack) -> Callable[[Parameters, int], SlicedOptimizer] | None:
    """Return a function that makes the optimizer on slices of laid parameters, or None if nothing trains.

    The optimizer is the loop's own or a section's, with all its states, so that a memory shortage shows before a step.
    Arguments of the function: the parameters, and this rank's number among the ranks that share them.
    """
    model, text, offloads = settings.model, settings.text, settings.trained.offloads
    if settings.optimizer is None:
        return None
    if settings.section is not None:
        return partial(made_on_slices, optimizer_of(settings.section, text), offloads=offloads)
    assert isinstance(settings.optimizer, Optimizer), "it was checked"
    whole = read_optimizer(settings.optimizer, text)
    refuse_hooks(whole.given)

    def point(parameters: Parameters, rank: int) -> LoopOptimizer:
        optimizer = LoopOptimizer(whole, parameters, rank, text, offloads=offloads)
        _guard_models(optimizer, (model, whole_model(text)), closing)
        return optimizer

    return point


def _guard_models(updates: LoopOptimizer, models: Sequence[nn.Module], closing: ExitStack) -> None:
    """Until the session closes, refuse conversions of the models, and uses while only slices have new weights."""
    parameters = updates.parameters
    closing.callback(lambda: updates.optimizer.register_step_pre_hook(_refuse_closed))
    closing.callback(updates.release)
    for register in (models[-1].register_forward_pre_hook, models[-1].register_state_dict_pre_hook):
        hook_until_closed(register, updates.refuse_unpublished, models[0], closing)
    for each in models:
        _put_in_place(each, "zero_grad", updates.zero_grad, models[0], closing)
    if parameters.keeps_values:  # else the model has none here, and refuses all of this by itself
        hook_until_closed(models[-1].register_load_state_dict_post_hook, updates.take_values, models[0], closing)
        closing.callback(parameters.release)
        for module in models[0].modules():
            _put_in_place(module, "_apply", partial(_convert_nothing, module), models[0], closing)


def hook_until_closed(
    register: Callable[[Any], Any], call: Callable[[], object], whole: nn.Module, closing: ExitStack
) -> None:
    """Register a hook of a model until the session closes; copies of the model do not have it."""
    closing.callback(register(_OfSession(whole, lambda *_: call(), lambda _: _do_nothing)).remove)


def _put_in_place(
    module: nn.Module, name: str, method: Callable[..., Any], whole: nn.Module, closing: ExitStack
) -> None:
    """Give a module a method until the session closes, in place of one that another session or a copy left there."""

    def of_copy(memo: dict[int, Any]) -> Callable[..., Any]:
        return partial(getattr(type(module), name), memo.get(id(module), module))

    own = vars(module)[name] = _OfSession(whole, method, of_copy)
    closing.callback(lambda: vars(module).pop(name) if vars(module).get(name) is own else None)


class _OfSession:
    """A method or hook of a `whole` model's modules while its session is open; their copies get that of `of_copy`.

    It also refuses to pickle the modules: a method on the modules themselves would be found in wraps, too.
    """

    def __init__(
        self, whole: nn.Module, method: Callable[..., Any], of_copy: Callable[[dict[int, Any]], Callable[..., Any]]
    ) -> None:
        self._whole, self._method, self._of_copy = whole, method, of_copy

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._method(*arguments, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return self._of_copy(memo)

    def __reduce_ex__(self, _protocol: object) -> NoReturn:  # type: ignore[override]
        raise pickled(self._whole)


def _refuse_closed(*_: object) -> NoReturn:
    remedy = "Make a new optimizer of the model's parameters; it loads what `lengthwise checkpoint export` makes."
    raise ConfigError("optimizer.step", expected="an open session", got="slices of a closed session", remedy=remedy)


def _do_nothing(*_: object) -> None: ...


def _convert_nothing(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Stand in for `to`, `half` and the like: refuse another dtype or device, and return the module unchanged."""
    for each in (*module.parameters(recurse), *module.buffers(recurse)):
        sample = torch.empty(0, dtype=each.dtype, device=each.device)
        found = convert(sample)
        if (found.dtype, found.device) != (sample.dtype, sample.device):
            expected = f"{each.dtype} on {each.device}, as the session took it"
            got = f"a conversion to {found.dtype} on {found.device}"
            remedy = "Convert and move a model before its session, or after (trainer.)session.close()."
            raise ModelRefused(f"model {type(module).__name__}", expected=expected, got=got, remedy=remedy)
    return module
