"""The choice of how a mixture's experts compute: one by one, or in grouped matrix products (both transformers' code).

One by one waits for the device at each expert. `torch.nn.functional.grouped_mm` does not, but takes only bf16 and fp32,
and needs rows of whole 16 bytes. Not measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lengthwise.core.errors import ConfigError

ONE_BY_ONE, GROUPED = "eager", "grouped_mm"  # transformers' names

_LEAST_CAPABILITY = (8, 0)
_ROW_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsNeeds:
    """The facts that decide how experts compute.

    rows_bytes: bytes of a row, by weight. replaceable: True if the family uses transformers' interface. capability: the
    GPU's compute capability, None if unknown or without a GPU.
    """

    dtype: torch.dtype
    rows_bytes: Sequence[int]
    replaceable: bool
    on_gpu: bool
    capability: tuple[int, int] | None = None


def expert_weights(model: Any) -> list[Tensor]:
    """List the parameters that hold the weights of many experts."""
    modules = (module for module in model.modules() if type(module).__name__.endswith("Experts"))
    return [weight for module in modules for weight in module.parameters(recurse=False) if weight.dim() == 3]


def needs_of(model: Any, dtype: torch.dtype, *, on_gpu: bool, capability: tuple[int, int] | None) -> ExpertsNeeds:
    """Read the facts from a model, which may be on the meta device."""
    weights = expert_weights(model)
    return ExpertsNeeds(
        dtype=dtype,
        rows_bytes=sorted({size * dtype.itemsize for weight in weights for size in weight.shape[1:]}),
        replaceable=bool(weights) and taking_experts(model) is not None,
        on_gpu=on_gpu,
        capability=capability,
    )


def taking_experts(model: Any) -> Any:
    """Return the model, or the first inside of its wrapper, that uses transformers' interface of experts, or None."""
    models = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    return next((each for each in models if each._can_set_experts_implementation()), None)


def choose_experts(asked: str, needs: ExpertsNeeds) -> tuple[str, str]:
    """Return (implementation, reason) for `auto` or the one asked for.

    Raises:
        ConfigError: it is not available here.
    """
    against = _against_grouped(needs)
    if asked == GROUPED and against is not None:
        remedy = "Set experts: auto, or eager."
        raise ConfigError(
            "experts", expected="auto, eager, or a model and precision for it", got=against, remedy=remedy
        )
    if asked != "auto":
        return asked, "it is asked for"
    if against is not None:
        return ONE_BY_ONE, against
    if needs.on_gpu and needs.dtype == torch.bfloat16:
        return GROUPED, "experts in bf16 on a GPU"
    return ONE_BY_ONE, "this is not bf16 on a GPU"


def _against_grouped(needs: ExpertsNeeds) -> str | None:
    if not needs.rows_bytes:
        return "no experts in one parameter"
    if not needs.replaceable:
        return "this family computes its experts itself"
    if needs.dtype not in (torch.bfloat16, torch.float32):
        return f"grouped products take bf16 and fp32, not {str(needs.dtype).removeprefix('torch.')}"
    if any(each % _ROW_BYTES for each in needs.rows_bytes):
        return f"grouped products need rows of whole {_ROW_BYTES} bytes, and this model's have {needs.rows_bytes}"
    if needs.capability is not None and needs.capability < _LEAST_CAPABILITY:
        return f"grouped products need compute capability 8.0, and this GPU has {'.'.join(map(str, needs.capability))}"
    return None
