"""What a loop finds in its model and optimizer while a session has them: methods and hooks, until it closes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lengthwise.core.errors import ConfigError, ModelRefused
from lengthwise.engine.placing import pickled
from lengthwise.session.loop_optimizer import LoopOptimizer


def guard_models(updates: LoopOptimizer, models: Sequence[nn.Module], closing: ExitStack) -> None:
    """Keep the models as they are, and uses of what only the optimizer's slices have out of them, until it closes."""
    parameters = updates.parameters
    closing.callback(lambda: updates.optimizer.register_step_pre_hook(_refuse_closed))
    closing.callback(updates.release)
    for register in (models[-1].register_forward_pre_hook, models[-1].register_state_dict_pre_hook):
        _hook(register, updates.refuse_unpublished, models[0], closing)
    for each in models:
        _put_in_place(each, "zero_grad", updates.zero_grad, models[0], closing)
    if parameters.keeps_values:  # else the model has none here, and refuses all of this by itself
        _hook(models[-1].register_load_state_dict_post_hook, parameters.take_values, models[0], closing)
        closing.callback(parameters.release)
        for module in models[0].modules():
            _put_in_place(module, "_apply", partial(_convert_nothing, module), models[0], closing)


def _hook(register: Callable[[Any], Any], call: Callable[[], object], whole: nn.Module, closing: ExitStack) -> None:
    """Register a hook of a model until the session closes, which copies of the model do not have."""
    closing.callback(register(_OfSession(whole, lambda *_: call(), lambda _: _do_nothing)).remove)


def _put_in_place(
    module: nn.Module, name: str, method: Callable[..., Any], whole: nn.Module, closing: ExitStack
) -> None:
    """Give a module a method until the session closes, in place of what another session or a copy left there."""

    def of_copy(memo: dict[int, Any]) -> Callable[..., Any]:
        return partial(getattr(type(module), name), memo.get(id(module), module))

    own = vars(module)[name] = _OfSession(whole, method, of_copy)
    closing.callback(lambda: vars(module).pop(name) if vars(module).get(name) is own else None)


class _OfSession:
    """What the modules of a `whole` model call while its session is open; a copy of them has what `of_copy` returns.

    Pickles of the modules are refused here: a method that `copy` and pickle ask for would be found in wraps, too.
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
    remedy = "Make a new optimizer of the model's parameters; session.state_dict has what a plain one loads."
    raise ConfigError("optimizer.step", expected="an open session", got="slices of one that is closed", remedy=remedy)


def _do_nothing(*_: object) -> None: ...


def _convert_nothing(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Refuse what `to`, `half` and their like would change, before they do; return the module.

    Raises:
        ModelRefused: a parameter or buffer would have another dtype or device.
    """
    for each in (*module.parameters(recurse), *module.buffers(recurse)):
        sample = torch.empty(0, dtype=each.dtype, device=each.device)
        found = convert(sample)
        if (found.dtype, found.device) != (sample.dtype, sample.device):
            raise ModelRefused(
                f"model {type(module).__name__}",
                expected=f"{each.dtype} on {each.device}, as the session took it",
                got=f"a conversion to {found.dtype} on {found.device}",
                remedy="Convert and move a model before its session, or after (trainer.)session.close().",
            )
    return module
