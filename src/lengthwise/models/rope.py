"""RoPE whose frequencies depend on a sequence's length (dynamic, longrope), by the length of every sequence in a row.

Hugging Face takes the largest position in a row as the length, but a planned row is a pack or a shard. Inside
`sequence_lengths` such a module runs once per sequence, with the sequence's last position appended. The host knows the
numbers that Hugging Face reads, four per sequence, so it does not wait for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from lengthwise.core.errors import ModelRefused
from lengthwise.models.modules import modules_of

LENGTH_ROPE = ("dynamic", "longrope")
"""RoPE kinds whose frequencies depend on the sequence's length."""


@contextlib.contextmanager
def sequence_lengths(model: nn.Module, spans: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Let rotary modules use the length of each sequence inside the block.

    spans: (tokens here, tokens of the whole sequence) of a row, in order; padding follows.

    Raises:
        ModelRefused: such a module is part of a layer, and would be recomputed in backward, outside the block.
    """
    modules: list[Any] = _length_rope(model)
    for module in modules:
        module.forward = _by_sequence(module, spans)
    try:
        yield
    finally:
        for module in modules:
            del module.forward  # the class's forward is left


def has_length_rope(model: nn.Module) -> bool:
    """Return whether a rotary module uses the length of a sequence."""
    return bool(_length_rope(model))


def forget_lengths(model: nn.Module) -> None:
    """Reset dynamic frequencies to those of a new model."""
    device = next(model.parameters()).device
    for module in _length_rope(model):
        kinds = module.rope_type if isinstance(module.rope_type, dict) else {None: module.rope_type}
        for kind in kinds:
            options = {} if kind is None else {"layer_type": kind}
            module(torch.zeros(1, device=device), torch.zeros(1, 1, dtype=torch.int64, device=device), **options)


def _length_rope(model: nn.Module) -> list[nn.Module]:
    found = [module for module in modules_of(model) if "rope_type" in vars(module) and _is_by_length(module)]
    names = {module: name for name, module in model.named_modules()} if found else {}
    for module in found:
        name = names[module]
        parents = [model.get_submodule(name[:end]) for end, sign in enumerate(name) if sign == "."]
        if any(isinstance(parent, GradientCheckpointingLayer) for parent in parents):
            expected, got = f"rope of kind {' or '.join(LENGTH_ROPE)} made once for all layers", "a module of one layer"
            remedy = "Use another rope_type. Support needs the lengths of sequences when a layer is recomputed."
            raise ModelRefused(f"{name} ({type(module).__name__})", expected=expected, got=got, remedy=remedy)
    return found


def _is_by_length(module: Any) -> bool:
    kinds = module.rope_type
    return bool(set(kinds.values() if isinstance(kinds, dict) else (kinds,)) & set(LENGTH_ROPE))


class _Positions(Tensor):
    """Positions (1, tokens) of a sequence, with their largest on the host."""

    largest: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the known maximum for max; run other functions on the plain tensor."""
        del types
        if func in (torch.max, Tensor.max) and len(args) == 1 and not kwargs:
            return args[0].largest
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _of_length(positions: Tensor, length: int) -> Tensor:
    """Return positions of which the last is `length` - 1, for a rope that compares it on the host."""
    made = positions.as_subclass(_Positions)
    made.largest = torch.tensor(length - 1, device="cpu")  # also where a device is the default
    return made


def _by_sequence(module: Any, spans: Sequence[tuple[int, int]]) -> Callable[..., Any]:
    forward: Callable[..., Any] = module.forward

    def run(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        options = {} if layer_type is None else {"layer_type": layer_type}
        kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
        # Dynamic RoPE compares lengths on the host, longrope on its frequencies' device.
        known = _of_length if kind == "dynamic" else lambda positions, _: positions
        sizes = [tokens for tokens, _ in spans]
        *parts, padding = position_ids.split([*sizes, position_ids.shape[-1] - sum(sizes)], dim=-1)
        made = []
        for positions, length in [*zip(parts, (length for _, length in spans), strict=True), (padding, 1)]:
            if not positions.shape[-1]:
                continue
            with x.device:  # frequencies are made there, because a copy would wait for the device
                # Dynamic RoPE remembers the longest row since a short one: reset it by position 0.
                forward(x, known(torch.zeros_like(positions[:, :1]), 1), **options)
                last = torch.full_like(positions[:, :1], length - 1)
                made.append(forward(x, known(torch.cat((positions, last), dim=-1), length), **options))
        if isinstance(made[0], Tensor):
            return torch.cat([part[:, :-1] for part in made], dim=1)
        return tuple(torch.cat([part[:, :-1] for part in each], dim=1) for each in zip(*made, strict=True))

    return run
