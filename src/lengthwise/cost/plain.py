"""Costs of which only coefficients are known.

A piece of d ranks with sequences of s_i tokens, S in all, takes, by its quadratic, linear, ring and hop seconds,

    (q sum s_i^2 + l S) / d  +  max(0, c S (d - 1) / d  -  q sum s_i^2 / d)  +  h (d - 1)
"""

from __future__ import annotations

from typing import Any

from lengthwise.cost.checks import check_seconds
from lengthwise.cost.links import Link
from lengthwise.cost.passes import PassShares
from lengthwise.cost.terms import Cost

_SWIFT = 2.0**100  # bytes per second: a power of two keeps seconds exact, and gathers are free
# Each pass has as large a part of a ring's transfers as of the attention; quarters keep sums exact.
_FORWARD = PassShares(attention=1 / 4, linear=1 / 3, ring=1 / 4, exchange=1 / 2)
_BACKWARD = PassShares(attention=3 / 4, linear=2 / 3, ring=3 / 4, exchange=1 / 2)


def plain_cost(*, ring_seconds: float = 0.0, hop_seconds: float = 0.0, **others: Any) -> Cost:
    """Return costs of known coefficients only: ranks lie anywhere, and other transfers are free.

    ring_seconds: seconds per token and link to move keys, values and gradients, hidden by attention as a whole.
    hop_seconds: latency per ring step, both passes together. others: fields of `Cost`.

    Raises:
        ConfigError: a coefficient that is negative or not finite, or all of them zero.
    """
    check_seconds(ring_seconds=ring_seconds, hop_seconds=hop_seconds)
    link = Link(bytes_per_second=_SWIFT, hop_seconds=hop_seconds / 2)
    links = {"near": link, "far": link, "ring_bytes": ring_seconds * _SWIFT}
    return Cost(**links, forward=_FORWARD, backward=_BACKWARD, **others)
