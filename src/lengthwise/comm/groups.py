"""The groups of torch.distributed, each over all ranks, and what NCCL is asked for beyond its defaults.

A ring transfer runs beside attention, whose grid fills the device: its kernel would come to run when attention is over.
So the transfers' group works on streams of high priority, and with few thread blocks (CTAs), which leave the device to
attention; 8 move more than a ring needs (estimated, not measured). Where NCCL_MAX_CTAS or NCCL_MIN_CTAS is set in the
environment, that counts.

NCCL's own watchdog counts from when a call is posted, and a host may be a whole step ahead: it would end a run that is
well. `Watch`, which counts from when a call could begin, is the judge; NCCL's time-out comes a day after ours.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TRANSFER_CTAS = 8
WATCHDOG_GRACE = timedelta(days=1)


def gloo_group(timeout: timedelta) -> dist.ProcessGroup:
    """Make a group for host memory."""
    return _made(dist.new_group(timeout=timeout, backend="gloo"))


def nccl_group(timeout: timedelta, device: torch.device, *, for_transfers: bool) -> dist.ProcessGroup:
    """Make and connect a group for GPUs; `timeout` is that of `Watch`."""
    longer = timeout + WATCHDOG_GRACE
    options = transfer_options(longer, dist.ProcessGroupNCCL.Options, os.environ) if for_transfers else None
    return _made(dist.new_group(timeout=longer, backend="nccl", pg_options=options, device_id=device))


def transfer_options(timeout: timedelta, make_options: Any, environment: Mapping[str, str]) -> Any:
    """Return NCCL's options of a group for transfers, made by torch's class of them."""
    options = make_options(is_high_priority_stream=True)
    options._timeout = timeout  # torch sets it to the group's anyhow, and warns where it differs
    if not (environment.get("NCCL_MAX_CTAS") or environment.get("NCCL_MIN_CTAS")):
        options.config.max_ctas = TRANSFER_CTAS
    return options


def _made(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup), f"every rank is a member of a group of all ranks, got {group}"
    return group
