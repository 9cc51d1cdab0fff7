"""Dropout that does not depend on the plan: what falls out is a function of seed, step, sequence, position and place.

Tokens have keys of the first four; the place counts calls of dropout with p > 0 in a forward. Entry c falls out if the
lower 32 bits of mix(key, place, c), a step of SplitMix64 (Steele, Lea, Flood 2014), are below p 2^32: the same on every
device. Backward that recomputes a layer counts from its start. A byte an entry until backward.
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

# What a config calls the chance that an entry of hidden states falls out, in the families known to be right.
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
    """What the draws of a step depend on beside its sequences."""

    seed: int = 0
    step: int = 0


ANY_KEY = DropoutKey()
"""Of what is run outside of a run's steps, to compare or to measure."""


class KeyedDropout(TorchFunctionMode):
    """Calls of `torch.nn.functional.dropout` inside the block draw by the keys of the rows, (rows,) int64.

    None: nothing falls out, as in an evaluation. calls: of the forward so far.

    Raises:
        ModelRefused: other random numbers, or dropout of what has no row for each token.
    """

    def __init__(self, keys: Tensor | None, *, calls: int = 0) -> None:
        super().__init__()
        self._keys, self.calls = keys, calls

    def again(self) -> KeyedDropout:
        """Return what draws from here on as this will: for what backward computes a second time."""
        return KeyedDropout(self._keys, calls=self.calls)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, or drop entries in its place."""
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
        while x.dim() > 1 and len(x) == 1 != rows:  # of the batch, and of latents that all heads share
            x = x[0]
        if len(x) != rows:
            raise _refuse(f"dropout of {tuple(input.shape)}, where a microbatch has {rows} tokens")
        return drop(x, p, self._keys, self.calls).view(input.shape)


def drop(x: Tensor, p: float, keys: Tensor, place: int) -> Tensor:
    """Return x (rows, ...) / (1 - p) where entries stay, 0 where they fall out. `keys`: (rows,), int64."""
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
    """Return the keys of tokens, (tokens,): of these sequences of the data at these positions, (tokens,) int64 each."""
    start = _mix_number(_mix_number(0, key.seed), key.step)
    return _mix(_mix(torch.full_like(sequences, _signed(start)), sequences), positions)


def asks_for_dropout(config: Any) -> bool:
    """Return whether a Hugging Face config lets entries of hidden states fall out in training."""
    return any(getattr(text_config(config), key, None) for key in DROPOUT_KEYS)


def has_dropout(model: nn.Module) -> bool:
    """Return whether entries of a model's hidden states, or of what its adapters see, fall out in training."""
    modules = any(isinstance(module, nn.Dropout) and module.p > 0 for module in modules_of(model))
    return modules or asks_for_dropout(model.config)


def rows_dropout(model: nn.Module, keys: Callable[[], Tensor]) -> KeyedDropout | None:
    """Return what draws by the keys of the rows that a forward will have; None: a model without dropout."""
    return KeyedDropout(keys()) if has_dropout(model) else None


def sequence_dropout(model: nn.Module, key: DropoutKey, sequence: int, tokens: Tensor) -> AbstractContextManager[Any]:
    """Let a plain model that is given one whole sequence of the data, (tokens,), draw as a plan's would."""

    def keys() -> Tensor:
        positions = torch.arange(len(tokens), device=tokens.device)
        return token_keys(key, torch.full_like(positions, sequence), positions)

    return rows_dropout(model, keys) or nullcontext()


def _mix(state: Tensor, value: Tensor | int) -> Tensor:
    """Return SplitMix64's output of a state that is `value` steps further, int64 as words of 64 bits."""
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
    return ModelRefused("dropout", expected="dropout of one row a token", got=got, remedy=remedy)
