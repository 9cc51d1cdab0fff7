"""Dropout that does not depend on the plan: it is a function of seed, step, sequence, position and place.

A token's key is made from the first four; the place is the number of dropout calls with p > 0 in the forward. Entry c
is dropped if the lower 32 bits of mix(key, place, c), a step of SplitMix64 (Steele, Lea, Flood 2014), are below p 2^32:
the same on every device. The recomputation of a layer counts from the layer's start. Costs a byte an entry until
backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lengthwise.core.errors import ModelRefused
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

_AT_ONCE = 1 << 22  # entries
_WORD = (1 << 64) - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_OTHER_DRAWS = frozenset(
    (
        *(F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout),
        *(torch.native_dropout, torch.bernoulli, torch.rand_like, torch.randn_like),
        *(Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutKey:
    """The key of a step's random numbers, beside its sequences."""

    seed: int = 0
    step: int = 0


ANY_KEY = DropoutKey()
"""Key of passes outside of a run's steps, for comparisons and measurements."""


class KeyedDropout(TorchFunctionMode):
    """Replaces `torch.nn.functional.dropout` inside the block by keyed dropout.

    keys: keys of the rows, (rows,) int64. If None, nothing is dropped, as in an evaluation. calls: dropout calls of the
    forward so far.

    Raises:
        ModelRefused: the model uses other random numbers, or drops from a tensor without one row per token.
    """

    def __init__(self, keys: Tensor | None, *, calls: int = 0) -> None:
        super().__init__()
        self._keys, self.calls = keys, calls

    def again(self) -> KeyedDropout:
        """Return a copy that continues from here, for a recomputation in backward."""
        return KeyedDropout(self._keys, calls=self.calls)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, or keyed dropout in its place."""
        if func is F.dropout:
            return self._drop(*args, **(kwargs or {}))
        if func in _OTHER_DRAWS:
            raise _refuse(f"random numbers by {getattr(func, '__name__', func)}")
        return func(*args, **(kwargs or {}))

    def _drop(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        del inplace  # callers take what is returned
        if not training or p == 0 or self._keys is None:
            return input
        self.calls += 1
        rows, x = len(self._keys), input
        while x.dim() > 1 and len(x) == 1 != rows:  # dimensions of the batch, and of latents that all heads share
            x = x[0]
        if len(x) != rows:
            raise _refuse(f"dropout of {tuple(input.shape)} in a microbatch of {rows} tokens")
        return drop(x, p, self._keys, self.calls).view(input.shape)


def drop(x: Tensor, p: float, keys: Tensor, place: int) -> Tensor:
    """Return x (rows, ...) with dropped entries 0 and the others divided by 1 - p. keys: (rows,), int64."""
    flat = x.reshape(len(x), -1)
    kept = torch.empty(flat.shape, dtype=torch.bool, device=x.device)
    columns = torch.arange(flat.shape[1], dtype=torch.int64, device=x.device)
    at_once = max(1, _AT_ONCE // max(1, flat.shape[1]))
    for start in range(0, len(flat), at_once):
        rows = slice(start, start + at_once)
        drawn = _mix(_mix(keys[rows], place)[:, None], columns)
        torch.ge(drawn.bitwise_and_(0xFFFFFFFF), round(p * 2**32), out=kept[rows])
    return torch.where(kept.view(x.shape), x * (1 / (1 - p) if p < 1 else 0.0), 0.0)


def token_keys(key: DropoutKey, sequences: Tensor, positions: Tensor) -> Tensor:
    """Return the keys of tokens, (tokens,), from numbers of their sequences and positions, (tokens,) int64."""
    start = _mix_number(_mix_number(0, key.seed), key.step)
    return _mix(_mix(torch.full_like(sequences, _signed(start)), sequences), positions)


def asks_for_dropout(config: Any) -> bool:
    """Return whether a config asks for dropout of hidden states in training."""
    return any(getattr(text_config(config), key, None) for key in DROPOUT_KEYS)


def has_dropout(model: nn.Module) -> bool:
    """Return whether a model, or its adapters, have dropout in training."""
    modules = any(isinstance(module, nn.Dropout) and module.p > 0 for module in modules_of(model))
    return modules or asks_for_dropout(model.config)


def rows_dropout(model: nn.Module, keys: Callable[[], Tensor]) -> KeyedDropout | None:
    """Return keyed dropout for the rows of a forward, or None for a model without dropout."""
    return KeyedDropout(keys()) if has_dropout(model) else None


def sequence_dropout(model: nn.Module, key: DropoutKey, sequence: int, tokens: Tensor) -> AbstractContextManager[Any]:
    """Let a plain model drop as a planned one, on one whole sequence, (tokens,)."""

    def keys() -> Tensor:
        positions = torch.arange(len(tokens), device=tokens.device)
        return token_keys(key, torch.full_like(positions, sequence), positions)

    return rows_dropout(model, keys) or nullcontext()


def _mix(state: Tensor, value: Tensor | int) -> Tensor:
    """Return SplitMix64's output `value` steps after a state, with int64 as words of 64 bits."""
    step = _signed(_STEP)
    word = state + (value * step if isinstance(value, Tensor) else _signed(value * _STEP & _WORD))
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        word ^= (word >> shift) & (_WORD >> shift)
        word *= _signed(factor)
    word ^= (word >> 31) & (_WORD >> 31)
    return word


def _mix_number(state: int, value: int) -> int:
    word = (state + value * _STEP) & _WORD
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        word = (word ^ (word >> shift)) * factor & _WORD
    return word ^ (word >> 31)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _refuse(got: str) -> ModelRefused:
    remedy = "Set the model's dropout to 0, or use another model."
    return ModelRefused("dropout", expected="dropout of one row per token", got=got, remedy=remedy)
