"""The lengths of a step, checked once: whole numbers of tokens that the cluster can hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.errors import PlanError
from lengthwise.core.names import counted
from lengthwise.core.shape import Cluster
from lengthwise.core.sizes import MOST, whole_number

NAMED = 5  # sequences or ranks named in one message; the others are counted
ROUNDING = 1e-12  # relative difference of sums in another order
NEARLY = 1e-9  # relative difference of many such sums; times closer than this count as equal


def read_tokens(tokens: Sequence[int]) -> tuple[int, ...]:
    """Return whole numbers, NumPy's included, as ints; PlanError: no lengths, or one below 1."""
    if len(tokens) and set(map(type, tokens)) == {int} and min(tokens) >= 1 and max(tokens) <= 2**53:
        return tuple(tokens)  # the usual case, ten times faster
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
        raise PlanError(
            "tokens", expected="at least one sequence", got="none", remedy="Plan only steps with sequences."
        )
    return tuple(int(value) for value in tokens)


def least_degrees_held(lengths: NDArray[np.int64], capacity_tokens: int) -> NDArray[np.int64]:
    """Return the ranks that memory needs for each sequence."""
    return -(-lengths // capacity_tokens)


def refuse_unheld(tokens: Sequence[int], cluster: Cluster) -> None:
    """Raise PlanError for sequences that no degree can hold, with the settings that would hold them."""
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
