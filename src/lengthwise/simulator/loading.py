"""Loading: how long the processors of a node read and tokenize for one step, and how long ranks wait for it.

    none     data is loaded already
    local    the process of each device reads for itself: on a fixed mesh the sequences of its group, else the batch.
             Processes of a node share its processors (ByteScale, arXiv 2502.21231, section 7)
    remote   servers beside the ranks read every sequence once, a share on each node

The next batch is read while the present step computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.errors import ConfigError
from lengthwise.core.names import unknown_name
from lengthwise.core.plan import Plan
from lengthwise.cost import Cost

LOADERS = ("none", "local", "remote")


def loading_seconds(
    plan: Plan,
    loader: str,
    cost: Cost,
    *,
    tokens_per_second: float,
    devices: int = 1,
    fixed_mesh: bool = False,
) -> float:
    """Return the seconds that the busiest node reads the sequences of a plan; loader: one of `LOADERS`.

    cost: says how many ranks share a node, and how many stages a rank has, on nodes of their own. tokens_per_second: of
    one node. devices: of a rank, each with a reading process. fixed_mesh: whether it is known before the plan which
    rank takes which sequence.

    Raises:
        ConfigError: an unknown loader.
    """
    if loader not in LOADERS:
        raise unknown_name("loader", loader, LOADERS)
    if loader == "none":
        return 0.0
    if not tokens_per_second > 0:
        got = repr(tokens_per_second)
        raise ConfigError("loader: tokens_per_second", expected="above 0", got=got, remedy="Give a loader's speed.")
    nodes, stages = -(-plan.ranks // cost.ranks_per_node), max(1, cost.stages)  # nodes of each stage
    if loader == "remote":
        # What servers send is not counted: 4 bytes a token, while a ring sends tens of thousands.
        return sum(plan.tokens) / (nodes * stages) / tokens_per_second
    # If plans differ from step to step, a process may get any sequence.
    read = _group_tokens(plan) if fixed_mesh else np.full(plan.ranks, float(sum(plan.tokens)))
    of_nodes = np.bincount(np.arange(plan.ranks) // cost.ranks_per_node, weights=read, minlength=nodes)
    return float(of_nodes.max()) * (devices // stages) / tokens_per_second


def waits_seconds(loads: Sequence[float], works: Sequence[float]) -> list[float]:
    """Return how long step i waits for data: its load beyond the work of step i - 1; step 0 follows the last."""
    return [max(0.0, load - works[number - 1]) for number, load in enumerate(loads)]


def _group_tokens(plan: Plan) -> NDArray[np.float64]:
    read = np.zeros(plan.ranks)
    for microbatch in plan.microbatches:
        for piece in microbatch.pieces:
            read[list(piece.ranks)] += sum(plan.tokens[i] for i in piece.sequences)
    return read
