"""What a session checks of a loss: that it is a number, and a sum over tokens, whoever made it and however.

A mean would be right on one microbatch alone. Every step calls a `TokenLoss` on a few tokens of a rank's first
microbatch, whole and in halves: nothing about the function has to be known or remembered for it. What a rank finds is
in the numbers of the step's end. A `ComputeLoss` runs the model, and is checked when it is new (`share_check`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lengthwise.attention import to_device
from lengthwise.core.errors import ConfigError
from lengthwise.data import NO_LOSS
from lengthwise.engine.objective import Objective
from lengthwise.session.misuse import shown
from lengthwise.session.source import PlannedStep
from lengthwise.session.tokens import TokenLoss, Tokens

UNEQUAL = 2e-2  # relative: half of a mean is far more, rounding in bf16 less
ROUNDINGS = 512  # of a number of order 1: what sums that cancel differ by
_CHECKED_TOKENS = 128

Evaluate: TypeAlias = Callable[[PlannedStep, Objective], float]
"""Returns the loss of a step. Collective."""


@dataclass(kw_only=True)
class LossCheck:
    """A check of one step's loss. found: whether some rank's `number` is not 0, known at the step's end."""

    found: bool = False

    @property
    def number(self) -> float:
        """Return what this rank shares of it."""
        raise NotImplementedError

    def finish(self, evaluate: Evaluate) -> None:
        """Refuse the loss after the step, on all ranks, where it is none. Collective.

        Raises:
            ConfigError: it is no sum.
        """
        raise NotImplementedError


@dataclass(kw_only=True)
class SumCheck(LossCheck):
    """Whether a `TokenLoss` is a sum over tokens: of some of the first microbatch here that has two."""

    sums: Tensor | None = None  # of all these tokens and of both halves, (3,), in fp64
    least: float = 0.0  # difference that is none of rounding
    is_due: bool = True

    def compare(self, loss: TokenLoss, output: Any, tokens: Tokens, labels: np.ndarray) -> None:
        """Call the loss on tokens that have labels, whole and in halves; one that cannot take a part is not checked.

        labels: of the tokens, on the host, so that the device is not waited for.
        """
        numbers = np.flatnonzero(labels != NO_LOSS)
        numbers = numbers if len(numbers) > 1 else np.arange(len(labels))
        if len(numbers) < 2:
            return
        self.is_due, chosen = False, min(len(numbers), _CHECKED_TOKENS)
        numbers = numbers[np.linspace(0, len(numbers) - 1, chosen).astype(int)]
        parts = [
            to_device(torch.from_numpy(each), tokens.input_ids.device)
            for each in (numbers, *np.array_split(numbers, 2))
        ]
        device, found = tokens.input_ids.device, list[Tensor]()
        before = random_states(device)
        with torch.no_grad(), random_states_kept(device), suppress(Exception):
            for part in parts:  # the function is the user's, and may ask for what a part does not have
                found.append(loss(_part_of(output, len(labels), part), tokens.part(part)).detach().double().reshape(()))
                if not all(map(torch.equal, before, random_states(device))):
                    return  # random numbers differ from part to part
            self.sums = torch.stack(found)
            self.least = ROUNDINGS * torch.finfo(torch.promote_types(output.logits.dtype, torch.float32)).eps

    @property
    def is_wrong(self) -> bool:
        """Whether the halves do not add up."""
        whole, *halves = self._numbers()
        apart = abs(whole - sum(halves))
        return math.isfinite(whole) and not apart <= max(UNEQUAL * (abs(whole) + sum(map(abs, halves))), self.least)

    @property
    def number(self) -> float:
        """1 where they do not."""
        return float(self.is_wrong)

    def finish(self, evaluate: Evaluate) -> None:
        """Refuse the loss where a rank found it wrong; the others know no numbers."""
        del evaluate
        if self.found:
            whole, *halves = self._numbers()
            got = (
                f"{whole:g} of some tokens, {sum(halves):g} of both halves"
                if self.is_wrong
                else "none, by another rank"
            )
            remedy = 'Return a sum, reduction="sum" for example; the session divides it once.'
            raise ConfigError("loss", expected="the sum over a microbatch's tokens", got=got, remedy=remedy)

    def _numbers(self) -> list[float]:
        return [math.nan] * 3 if self.sums is None else self.sums.tolist()


def random_states(device: torch.device) -> list[Tensor]:
    """Return the states of the generators that a loss may draw from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def random_states_kept(device: torch.device) -> AbstractContextManager[None]:
    """Leave those states as they are."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def _part_of(output: Any, num_tokens: int, part: Tensor) -> Any:
    """Return a model's outputs for some of their tokens: of every tensor (1, tokens, ...) or (tokens, ...)."""

    def cut(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(cut, value))
        if not isinstance(value, Tensor):
            return value
        if tuple(value.shape[:2]) == (1, num_tokens):
            return value[:, part]
        return value[part] if value.dim() and len(value) == num_tokens else value

    cut_output = copy.copy(output)
    for name, value in output.items():
        cut_output[name] = cut(value)
    return cut_output


_IN_GRAPH = "Return the sum over the tokens, in the graph of the outputs: no .item(), .detach() or torch.no_grad()."


def one_number(
    what: str, found: object, device: torch.device, *, of: str = "the model's outputs", remedy: str = _IN_GRAPH
) -> Tensor:
    """Return what a function of the loop's gave as a tensor (), on the device.

    Raises:
        ConfigError: it is none, or has no gradient where one is asked for.
    """
    got = shown(found)
    if isinstance(found, Tensor):
        needs = torch.is_grad_enabled() and not found.requires_grad
        if found.numel() == 1 and found.is_floating_point() and not found.is_meta and not needs:
            return found.reshape(()).to(device)
        got = f"{str(found.dtype).removeprefix('torch.')} of {tuple(found.shape)}"
        got += " on the meta device" if found.is_meta else f", which does not depend on {of}" if needs else ""
    raise ConfigError(what, expected=f"a tensor of one number, computed of {of}", got=got, remedy=remedy)
