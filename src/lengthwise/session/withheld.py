"""Stand-ins for the gradients of a model's own parameters while a session keeps the real ones.

Each rank has only a part of the gradients, so any use of a stand-in raises. A loop may set one to None, which clears
the gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial

from torch import Tensor, nn

from lengthwise.core.errors import ConfigError
from lengthwise.engine.units import let_go
from lengthwise.session.guards import WithheldGradient


class WithheldGradients:
    """Stand-ins for the gradients of the parameters that train.

    own: trained parameters of this rank, by name in the whole model. given: parameters before the session took the
    model; a loop that kept replaced ones finds neither values nor gradients in them. reached: names of the parameters
    that a loss of this rank reached in the last backward.
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
        self.reached.add(name)

    def begin(self) -> None:
        """Prepare a backward of the session; refuse the loop's hooks, which would see parts of a gradient."""
        refuse_hooks(self.own)
        self.reached.clear()

    def release(self) -> None:
        """Remove the hooks."""
        for each in self._hooks:
            each.remove()

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return the name in the whole model of a trained parameter, or of the one it replaced."""
        return next(name for name, each, _ in self._withheld if each is parameter)

    def show(self, names: Collection[str]) -> None:
        """Give these parameters stand-ins as gradients, and the others None."""
        for name, parameter, withheld in self._withheld:
            shown = withheld if name in names else None
            if parameter.grad is not shown:
                parameter.grad = shown

    def cleared(self, names: Collection[str]) -> Iterator[str]:
        """Yield those of these parameters whose gradients the loop has set to None; refuse others that it has set."""
        for name, parameter, withheld in self._withheld:
            found = parameter.grad
            if found is None and name in names:
                yield name
            elif found is not None and found is not withheld:
                expected = "only the session's gradients, which are summed over the ranks"
                got = f"a gradient of {name} from a plain backward, or set by hand"
                remedy = "Put that loss into session.backward, or change slices in optimizer.param_groups."
                raise ConfigError("gradient of a parameter", expected=expected, got=got, remedy=remedy)


def refuse_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse the loop's hooks on accumulated gradients.

    They would see the gradient of one microbatch on one rank, and the sum over the ranks may have begun.
    """
    for name, parameter in parameters.items():
        hooks = (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
        if not all(str(getattr(each, "func", each).__module__).startswith("lengthwise.") for each in hooks):
            expected = "no register_post_accumulate_grad_hook: gradients are whole when session.backward returns"
            remedy = "Change gradients then, in optimizer.param_groups, or use register_hook for linear changes."
            raise ConfigError(f"parameter {name}", expected=expected, got="such a hook", remedy=remedy)
