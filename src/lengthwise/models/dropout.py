"""Dropout by torch's generator, which is seeded for every forward of a chunk on a rank.

What is dropped follows the plan. It is the same when backward computes a layer again, and when a step runs again under
its plan on as many ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from lengthwise.models.modules import modules_of
from lengthwise.models.text_part import text_config

# Config keys for the probability of dropout of hidden states, in supported families.
DROPOUT_KEYS = (
    *("dropout", "hidden_dropout", "hidden_dropout_prob", "activation_dropout", "resid_pdrop", "embd_pdrop"),
    *("residual_dropout", "embedding_dropout"),
)
DROPOUT_FAMILIES = (
    *("biogpt", "ctrl", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neox", "opt", "persimmon", "phi", "phi3", "seed_oss"),
    "starcoder2",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutKey:
    """The seed of a run and the step, which determine the seeds of the step's forwards."""

    seed: int = 0
    step: int = 0

    def at(self, *place: int) -> int:
        """Return the seed of a forward. place: rank, microbatch and chunk."""
        digest = hashlib.blake2b(repr((self.seed, self.step, *place)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


@contextmanager
def drawing(seed: int, device: torch.device) -> Iterator[None]:
    """Draw random numbers from `seed` on inside the block; afterwards torch's generators are as before."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


class NoDropout(TorchFunctionMode):
    """Drops nothing inside the block, as an evaluation in training mode. calls: number of dropout's calls inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, unless it is dropout."""
        if func is F.dropout:
            return self._pass_on(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _pass_on(self, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        del inplace
        self.calls += training and p > 0
        return input


def asks_for_dropout(config: Any) -> bool:
    """Return whether a config asks for dropout of hidden states in training."""
    return any(getattr(text_config(config), key, None) for key in DROPOUT_KEYS)


def has_dropout(model: nn.Module) -> bool:
    """Return whether a model, or its adapters, have dropout in training."""
    modules = any(isinstance(module, nn.Dropout) and module.p > 0 for module in modules_of(model))
    return modules or asks_for_dropout(model.config)


def stop_dropping(model: nn.Module) -> bool:
    """Set a model's dropout to 0, and that of its adapters; return whether there was any."""
    found = has_dropout(model)
    for each in (*modules_of(model), text_config(model.config)):
        for key in ("p",) if isinstance(each, nn.Dropout) else DROPOUT_KEYS:
            if isinstance(getattr(each, key, None), float):
                setattr(each, key, 0.0)
    return found
