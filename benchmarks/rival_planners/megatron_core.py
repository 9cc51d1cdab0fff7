"""Megatron-Core's own `BalancedCPScheduler` of hybrid context parallelism, where it is installed.

Its samples of each rank and sub-batch become a plan, packed as `power-of-two` packs, which is faster than unpacked.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.errors import ConfigError
from lengthwise.core.plan import Microbatch
from lengthwise.planner.baselines.power_of_two import Group, write_sub_batch
from lengthwise.planner.problem.request import PlanRequest

_SCHEDULER_MODULE = "megatron.core.pipeline_parallel.hybrid_cp_schedule"


@dataclass(frozen=True, slots=True, kw_only=True)
class _FakeGroup:
    """What the scheduler needs of a process group."""

    ranks: int

    def size(self) -> int:
        return self.ranks


def plan_megatron_core(request: PlanRequest) -> list[Microbatch]:
    """Plan one step by the installed scheduler; ConfigError: Megatron-Core has none."""
    microbatches: list[Microbatch] = []
    for groups in megatron_sub_batches(request.lengths, request.cluster.ranks, request.most_held_tokens):
        microbatches += write_sub_batch(request, groups, is_first=not microbatches)
    return microbatches


def megatron_sub_batches(lengths: NDArray[np.int64], ranks: int, most_tokens: int) -> list[list[Group]]:
    """Run the scheduler with ranks that hold so many tokens; return each sub-batch's groups, in the order of ranks."""
    one = load_scheduler()(most_tokens, _FakeGroup(ranks=ranks))
    _, by_rank = one.get_groups_and_subsamples(list(enumerate(lengths.tolist())), None)
    sub_batches = list[list[Group]]()
    for samples in by_rank:
        groups: dict[int, Group] = {}
        for held in samples:
            group = groups.setdefault(held[0], Group(degree=0, sequences=list(held)))
            assert group.sequences == list(held), f"ranks share sample {held[0]} but not all: {held}, {group.sequences}"
            group.degree += 1
        sub_batches.append(list(groups.values()))
    return sub_batches


def load_scheduler() -> Any:
    """Import the scheduler's class; without Transformer Engine and Apex the package warns of their absence."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(_SCHEDULER_MODULE).BalancedCPScheduler
    except (ImportError, AttributeError) as error:
        expected, got = f"BalancedCPScheduler in {_SCHEDULER_MODULE}, as Megatron-Core 0.16 has it", str(error)
        remedy = "pip install --no-deps megatron-core==0.16.1 packaging, or compare without it."
        raise ConfigError("megatron-core", expected=expected, got=got, remedy=remedy) from error
