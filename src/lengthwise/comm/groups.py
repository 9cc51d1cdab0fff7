"""The groups of torch.distributed, and what NCCL is asked for beyond its defaults.

They are over all ranks, those of collectives also over the ranks of a node, or of one place in all nodes.

A ring transfer runs beside attention, whose grid fills the device: its kernel would come to run when attention is over.
So the transfers' group works on streams of high priority, and with few thread blocks (CTAs), which leave the device to
attention; 8 move more than a ring needs. Collectives have 16: kernels of both groups may wait for other ranks at once,
and must fit the device together. Where NCCL_MAX_CTAS or NCCL_MIN_CTAS is set in the environment, that counts.

Of NCCL's own variables two are set where they are not (`set_defaults`). A peer gets as few channels as the rank with
most peers can give, one of 8 CTAs from some 16 ranks on: 4 are asked for. And kernels of the two groups start in the
order in which the host posts them, as sharded parameters need. None of this was measured.

NCCL's own watchdog counts from when a call is posted, and a host may be a whole step ahead: it would end a run that is
well. `Watch`, which counts from when a call could begin, is the judge; NCCL's time-out comes a day after ours.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lengthwise.core.errors import PlanError

TRANSFER_CTAS, COLLECTIVE_CTAS = 8, 16
MOST_OPERATIONS = 64  # of one grouped call: NCCL cuts larger ones, and not at the same place on every rank
DEFAULTS = {"NCCL_NCHANNELS_PER_NET_PEER": "4", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
WATCHDOG_GRACE = timedelta(days=1)


def gloo_group(timeout: timedelta, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """Make a group of `ranks` for host memory, by default of all; they alone call it."""
    some = None if ranks is None else list(ranks)
    return _made(dist.new_group(some, timeout=timeout, backend="gloo", use_local_synchronization=some is not None))


def nccl_group(
    timeout: timedelta, device: torch.device, *, for_transfers: bool, ranks: Sequence[int] | None = None
) -> dist.ProcessGroup:
    """Make and connect a group of `ranks` for GPUs, by default of all; `timeout` is that of `Watch`."""
    set_defaults(os.environ)
    longer = timeout + WATCHDOG_GRACE
    options = nccl_options(longer, dist.ProcessGroupNCCL.Options, os.environ, for_transfers=for_transfers)
    made = dist.new_group(
        None if ranks is None else list(ranks),
        timeout=longer,
        backend="nccl",
        pg_options=options,
        use_local_synchronization=ranks is not None,
        device_id=device,
    )
    return _made(made)


def set_defaults(environment: MutableMapping[str, str]) -> None:
    """Set what NCCL reads when the process makes its first communicator, where nothing is set."""
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)


def nccl_options(timeout: timedelta, make_options: Any, environment: Mapping[str, str], *, for_transfers: bool) -> Any:
    """Return NCCL's options of a group, made by torch's class of them."""
    options = make_options(is_high_priority_stream=for_transfers)
    options._timeout = timeout  # torch sets it to the group's anyhow, and warns where it differs
    if not (environment.get("NCCL_MAX_CTAS") or environment.get("NCCL_MIN_CTAS")):
        options.config.max_ctas = TRANSFER_CTAS if for_transfers else COLLECTIVE_CTAS
    return options


def refuse_large(operations: int, *, where: str) -> None:
    """Refuse a grouped call that NCCL would cut.

    Raises:
        PlanError: only a plan that splits heads over many ranks has one.
    """
    if operations > MOST_OPERATIONS:
        expected = f"at most {MOST_OPERATIONS} messages in one grouped call of NCCL"
        raise PlanError(
            where, expected=expected, got=str(operations), remedy="Plan with heads off, or with fewer heads."
        )


def _made(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup), f"this rank is a member of the group, got {group}"
    return group
