"""The groups of torch.distributed, and the NCCL settings beyond its defaults. None of this was measured.

Transfers run beside attention, whose grid fills the device: their group has high-priority streams and 8 CTAs.
Collectives have 16 CTAs, because kernels of both must fit on the device together. NCCL_MAX_CTAS or NCCL_MIN_CTAS in the
environment win. `set_defaults` sets 4 channels per peer (from some 16 ranks on NCCL would use 1), and kernels in the
order posted. NCCL's watchdog counts from when a call is posted, perhaps a step early; so `TransferWatch` decides, and
NCCL's time-out comes a day later.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lengthwise.core.errors import PlanError

TRANSFER_CTAS, COLLECTIVE_CTAS = 8, 16
MOST_OPERATIONS = 64  # in one grouped call: NCCL cuts larger ones, at different places on different ranks
DEFAULTS = {"NCCL_NCHANNELS_PER_NET_PEER": "4", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
WATCHDOG_GRACE = timedelta(days=1)


def gloo_group(timeout: timedelta) -> dist.ProcessGroup:
    """Make a gloo group of all ranks, for host memory."""
    return _made(dist.new_group(None, timeout=timeout, backend="gloo"))


def gloo_groups(timeout: timedelta, groups: Sequence[Sequence[int]], *, is_owned: bool) -> dist.ProcessGroup:
    """Make gloo groups that divide the ranks, for host memory; return this rank's (see `_own_of`)."""
    return _own_of(groups, partial(dist.new_group, timeout=timeout, backend="gloo"), is_owned=is_owned)


def nccl_group(
    timeout: timedelta,
    device: torch.device,
    *,
    for_transfers: bool,
    groups: Sequence[Sequence[int]] | None = None,
    is_owned: bool = True,
) -> dist.ProcessGroup:
    """Make and connect an NCCL group of all ranks, or this rank's of `groups`; `timeout` is `TransferWatch`'s."""
    set_defaults(os.environ)
    longer = timeout + WATCHDOG_GRACE
    options = nccl_options(longer, dist.ProcessGroupNCCL.Options, os.environ, for_transfers=for_transfers)
    make = partial(dist.new_group, timeout=longer, backend="nccl", pg_options=options, device_id=device)
    return _made(make(None)) if groups is None else _own_of(groups, make, is_owned=is_owned)


def _own_of(groups: Sequence[Sequence[int]], make: Callable[..., Any], *, is_owned: bool) -> dist.ProcessGroup:
    """Make the groups that divide the ranks, and return this rank's.

    In a world that we own, only the members make a group: with thousands of groups all ranks would wait for each other
    as often. torch then names a group by its members and by the number of groups that this process knows. In a user's
    world, whose loop has made groups itself, these numbers may differ, so there all ranks make all groups, which torch
    numbers alike.
    """
    rank, own = dist.get_rank(), None
    for ranks in groups:
        if rank in ranks or not is_owned:
            made = make(list(ranks), use_local_synchronization=is_owned)
            own = made if rank in ranks else own
    return _made(own)


def set_defaults(environment: MutableMapping[str, str]) -> None:
    """Set the variables that NCCL reads when the process makes its first communicator; keep those already set."""
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)


def nccl_options(timeout: timedelta, make_options: Any, environment: Mapping[str, str], *, for_transfers: bool) -> Any:
    """Return the NCCL options of a group. make_options: torch's class of them."""
    options = make_options(is_high_priority_stream=for_transfers)
    options._timeout = timeout  # torch overwrites it with the group's, and warns if they differ
    if not (environment.get("NCCL_MAX_CTAS") or environment.get("NCCL_MIN_CTAS")):
        options.config.max_ctas = TRANSFER_CTAS if for_transfers else COLLECTIVE_CTAS
    return options


def refuse_large(operations: int, *, where: str) -> None:
    """Raise PlanError for a grouped call that NCCL would cut: a plan that splits heads over many ranks."""
    if operations > MOST_OPERATIONS:
        expected = f"at most {MOST_OPERATIONS} messages in one grouped call of NCCL"
        remedy = "Plan with heads off, or with fewer heads."
        raise PlanError(where, expected=expected, got=str(operations), remedy=remedy)


def _made(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup), f"this rank is a member of the group, got {group}"
    return group
