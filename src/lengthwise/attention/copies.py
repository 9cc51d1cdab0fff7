"""Copies of small tensors from host memory to where a rank computes, which nobody waits for."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of host memory to `device`; the same tensor where that is the host.

    To a GPU through pinned memory: from memory that can be paged the host waits for all that the stream has to do.
    """
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
