"""What rounding alone does to the gradients of a bf16 model, or in fp32 of one with states: how `verify` judges them.

Rounding errors grow with depth, and with experts that a rounded router chooses: no one tolerance fits. So plain Hugging
Face runs in bf16 too, with two kernels of attention, and all three are compared with its fp32 at the same, rounded
parameters. The planned model may be `FACTOR` times as far from that as a plain one is, plus a floor. Parameters of one
kind (one name but for its numbers) share the largest difference of any of them, or the median of all parameters where
that is larger: a single tensor's is half luck. The gradient of a state's decay is a sum that cancels, in fp32 wrong by
some 1e-4 whoever computes it: there all is compared with fp64, and plain fp32 says what rounding does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TOLERANCES = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 2e-3}  # in bf16 beside `FACTOR` times what rounding alone does
SUMS_TOLERANCE = 1e-5  # of fp32 sums of bf16 gradients: they differ by 1e-7, sums in bf16 by 1e-3
FACTOR = 2.0
SCORE_BYTES = 6  # of an entry of eager attention's score matrix: two tensors of bf16, one cast
MOST_SCORE_BYTES = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far a model is from the reference: its losses, and each parameter's gradient; all relative."""

    loss: float
    router_loss: float
    gradients: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """The larger difference of plain models by `kernels`; of gradients the largest of a kind, at least the median.

    precision, exact: of the plain models, and of what they are compared with.
    """

    kernels: tuple[str, ...]
    precision: str = "bf16"
    exact: str = "fp32"
    loss: float
    router_loss: float
    gradients: Mapping[str, float]

    def allows(self, difference: float) -> float:
        """Return how far from the reference the planned model may be where a plain one is that far."""
        return FACTOR * difference if math.isfinite(difference) else 0.0


def rounding_of(found: Mapping[str, Difference], *, precision: str = "bf16", exact: str = "fp32") -> Rounding:
    """Put together what plain models in `precision` are from the reference in `exact`, by kernel."""
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
        loss=_largest([each.loss for each in found.values()]),
        router_loss=_largest([each.router_loss for each in found.values()]),
        gradients={name: _larger(by_kind[kind_of(name)], least) for name in names},
    )


def kind_of(parameter: str) -> str:
    """Return a parameter's name without its numbers: those of the layer, and of the expert."""
    return re.sub(r"\d+", "N", parameter)


def plain_kernels(first: str, *, longest: int, heads: int, layers: int, on_gpu: bool) -> tuple[str, ...]:
    """Name the attention of the plain models: `first`, Hugging Face's own choice, and another that fits into memory.

    `eager` keeps the scores of all layers; where they are too many, a GPU has `flash`, which may be the first again.
    """
    if first == "eager":
        return ("eager",)
    if layers * heads * longest**2 * SCORE_BYTES <= MOST_SCORE_BYTES:
        return (first, "eager")
    return (first, "flash") if on_gpu else (first,)


def _larger(a: float, b: float) -> float:
    return a if math.isnan(a) else b if math.isnan(b) else max(a, b)


def _largest(values: Sequence[float]) -> float:
    largest = 0.0
    for value in values:
        largest = _larger(largest, value)
    return largest
