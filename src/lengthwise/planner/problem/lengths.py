"""The lengths of a step, checked once: whole numbers of tokens that the cluster can hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.errors import PlanError
from lengthwise.core.names import counted
from lengthwise.core.shape import Cluster
from lengthwise.core.sizes import MOST, whole_number

NAMED = 5  # sequences or ranks named in one message: what fits a screen; the others are counted
ROUNDING = 1e-12  # of a time: what sums in another order may differ by
NEARLY = 1e-9  # of a time: what many such sums may differ by; nobody waits for less


def read_tokens(tokens: Sequence[int]) -> tuple[int, ...]:
    """Return lengths as ints from any whole numbers, NumPy's included; PlanError: none, or one below 1."""
    if len(tokens) and set(map(type, tokens)) == {int} and min(tokens) >= 1 and max(tokens) <= 2**53:
        return tuple(tokens)  # the usual case, ten times quicker
    for i, value in enumerate(tokens):
        number = whole_number(value)
        if number is None or not 1 <= number <= MOST:
            raise PlanError(
                f"sequence {i}",
                expected="a length of 1 to 2^53 tokens",
                got=repr(value),
                remedy="Leave sequences without tokens out of the step.",
            )
    if len(tokens) == 0:
        raise PlanError("tokens", expected="at least one sequence", got="none", remedy="Plan steps that hold data.")
    return tuple(int(value) for value in tokens)


def least_degrees_held(lengths: NDArray[np.int64], capacity_tokens: int) -> NDArray[np.int64]:
    """Count the ranks that memory needs for each sequence."""
    return -(-lengths // capacity_tokens)


def refuse_unheld(tokens: Sequence[int], cluster: Cluster) -> None:
    """Raise a PlanError naming every sequence that no degree can hold, its length and what would hold it."""
    if max(tokens) <= cluster.longest_tokens:
        return
    unheld = [i for i, length in enumerate(tokens) if length > cluster.longest_tokens]
    named = [
        f"sequence {i} of {tokens[i]} tokens (needs {-(-tokens[i] // cluster.capacity_tokens)} ranks at this capacity"
        f" or a capacity of {-(-tokens[i] // cluster.ranks)} at these ranks)"
        for i in unheld[:NAMED]
    ]
    more = f" and {len(unheld) - NAMED} more" if len(unheld) > NAMED else ""
    longest = max(tokens[i] for i in unheld)
    held = f"{counted(cluster.ranks, 'rank')} x {cluster.capacity_tokens} tokens"
    raise PlanError(
        f"sequence {unheld[0]}" if len(unheld) == 1 else f"{len(unheld)} sequences",
        expected=f"at most {cluster.longest_tokens} tokens ({held})",
        got=", ".join(named) + more,
        remedy=f"Use {-(-longest // cluster.capacity_tokens)} ranks, raise {{capacity_tokens}} to "
        f"{-(-longest // cluster.ranks)}, or {{clip|leave such sequences out}}.",
    )
