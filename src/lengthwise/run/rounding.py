"""The effect of rounding alone on gradients, by which `verify` judges bf16 models, and fp32 models with states.

Rounding errors grow with depth, and with a rounded router's choice of experts, so no single tolerance fits. Plain
Hugging Face therefore runs in bf16 too, with two attention kernels, and all three models are compared with fp32 at the
same rounded parameters. The planned model may differ `FACTOR` times as much as a plain one, plus a floor. Parameters of
one kind (whose names differ in numbers only) share their largest difference, or the median over all parameters if that
is larger. The gradient of a state's decay has an fp32 error of about 1e-4 in any implementation: such models are
compared with fp64, and plain fp32 gives the effect of rounding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

TOLERANCES = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 2e-3}  # in bf16 plus `FACTOR` times the effect of rounding
SUMS_TOLERANCE = 1e-5  # for fp32 sums of bf16 gradients, which differ by 1e-7; sums in bf16 differ by 1e-3
FACTOR = 2.0
SCORE_BYTES = 6  # bytes of an entry of eager attention's scores: two bf16 tensors and a cast
MOST_SCORE_BYTES = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Relative differences of a model from the reference: of its losses, and of gradients by parameter."""

    loss: float
    router_loss: float
    gradients: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """Largest differences of plain models with `kernels`; of a gradient the largest of its kind, at least the median.

    precision, exact: precision of the plain models, and of the reference.
    """

    kernels: tuple[str, ...]
    precision: str = "bf16"
    exact: str = "fp32"
    loss: float
    router_loss: float
    gradients: Mapping[str, float]

    def allows(self, difference: float) -> float:
        """Return the allowed difference of the planned model, from a plain model's difference."""
        return FACTOR * difference if math.isfinite(difference) else 0.0


def rounding_of(found: Mapping[str, Difference], *, precision: str = "bf16", exact: str = "fp32") -> Rounding:
    """Combine the differences of plain models, by kernel, from the reference."""
    by_kind: dict[str, float] = {}
    for each in found.values():
        for name, difference in each.gradients.items():
            by_kind[kind_of(name)] = _larger(by_kind.get(kind_of(name), 0.0), difference)
    names = next(iter(found.values())).gradients
    finite = sorted(filter(math.isfinite, (by_kind[kind_of(name)] for name in names)))
    least = finite[len(finite) // 2] if finite else 0.0
    return Rounding(
        kernels=tuple(found),
        precision=precision,
        exact=exact,
        loss=reduce(_larger, (each.loss for each in found.values()), 0.0),
        router_loss=reduce(_larger, (each.router_loss for each in found.values()), 0.0),
        gradients={name: _larger(by_kind[kind_of(name)], least) for name in names},
    )


def kind_of(parameter: str) -> str:
    """Return a parameter's name without the numbers of layers and experts."""
    return re.sub(r"\d+", "N", parameter)


def plain_kernels(first: str, *, longest: int, heads: int, layers: int, on_gpu: bool) -> tuple[str, ...]:
    """Return the attention kernels of the plain models: `first`, Hugging Face's choice, and another that fits.

    `eager` keeps the scores of all layers; if they are too many, a GPU uses `flash`, which may equal the first.
    """
    if first == "eager":
        return ("eager",)
    if layers * heads * longest**2 * SCORE_BYTES <= MOST_SCORE_BYTES:
        return (first, "eager")
    return (first, "flash") if on_gpu else (first,)


def _larger(a: float, b: float) -> float:
    return a if math.isnan(a) else b if math.isnan(b) else max(a, b)
