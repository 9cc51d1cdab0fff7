"""The gradients of a model's own parameters while a session has them: out of the loop's reach.

Each rank has a part of them alone, so any use raises. The loop may set them to None, which clears them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial

from torch import Tensor, nn

from lengthwise.core.errors import ConfigError
from lengthwise.engine.units import let_go
from lengthwise.session.guards import WithheldGradient


class WithheldGradients:
    """What stands for the gradients of the parameters that train.

    own: of those that the model has on this rank, by name in the whole model. The parameters that it had when the
    session took it, `given`, may be others: a loop that kept them finds no values in them, and no gradients. reached:
    names of the parameters that a loss of this rank has reached in the last backward.
    """

    def __init__(self, model: nn.Module, given: Mapping[str, nn.Parameter]) -> None:
        self.own = {name: each for name, each in model.named_parameters() if name in given}
        now = {id(each) for each in model.parameters()}
        left = {name: each for name, each in given.items() if self.own.get(name) is not each}
        own = list(self.own.items())
        every = (*own, *left.items())
        self._withheld = [(name, each, WithheldGradient(each)) for name, each in every]
        for each in left.values():
            if id(each) not in now:
                let_go(each)
        self.reached = set[str]()
        self._hooks = [each.register_post_accumulate_grad_hook(partial(self._note, name)) for name, each in own]

    def _note(self, name: str, _parameter: Tensor) -> None:
        """Note that a loss has made a gradient of a parameter."""
        self.reached.add(name)

    def begin(self) -> None:
        """Begin a backward of the session.

        Raises:
            ConfigError: the loop has hooks that would see parts of a gradient.
        """
        refuse_hooks(self.own)
        self.reached.clear()

    def release(self) -> None:
        """Note nothing any more."""
        for each in self._hooks:
            each.remove()

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return the name in the whole model of a parameter that trains, or of its copy."""
        return next(name for name, each, _ in self._withheld if each is parameter)

    def show(self, names: Collection[str]) -> None:
        """Let the parameters of these names have a gradient that any use of raises, and the others none."""
        for name, parameter, withheld in self._withheld:
            shown = withheld if name in names else None
            if parameter.grad is not shown:
                parameter.grad = shown

    def cleared(self, names: Collection[str]) -> Iterator[str]:
        """Yield which of the parameters of these names the loop has left without a gradient.

        Raises:
            ConfigError: it gave some a gradient.
        """
        for name, parameter, withheld in self._withheld:
            found = parameter.grad
            if found is None and name in names:
                yield name
            elif found is not None and found is not withheld:
                expected = "gradients of the session alone, which sums them over the ranks"
                got = f"a gradient of {name} that a plain backward made, or that was set by hand"
                remedy = "Put that loss into session.backward, or change slices in optimizer.param_groups."
                raise ConfigError("gradient of a parameter", expected=expected, got=got, remedy=remedy)


def refuse_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse hooks of a loop that run once a gradient has been accumulated.

    They would see what one microbatch has made on one rank, and a sum over the ranks may have begun.

    Raises:
        ConfigError: there are some.
    """
    for name, parameter in parameters.items():
        hooks = (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
        if not all(str(getattr(each, "func", each).__module__).startswith("lengthwise.") for each in hooks):
            expected = "no register_post_accumulate_grad_hook: gradients are whole when session.backward returns"
            remedy = "Change them then, in the optimizer's groups, or use register_hook for what is linear."
            raise ConfigError(f"parameter {name}", expected=expected, got="one", remedy=remedy)
