"""What must be in the environment before torch is imported; what the user has set stays."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

_ALLOCATOR_KEYS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def prepare_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what GPUs want.

    Expandable segments: the sizes of microbatches change all the time, and fixed segments would fragment. The old name
    of the key counts as the user's word too: torch reads it first.
    NVML for torch's own checks: the other way starts the driver in this process, and then it could not fork ranks.
    """
    if not any(key in environment for key in _ALLOCATOR_KEYS):
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
