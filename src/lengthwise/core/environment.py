"""Environment variables that torch reads when it is imported."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

_ALLOCATOR_KEYS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def prepare_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that GPUs need before the import of torch; keep the user's values.

    Expandable segments: fixed segments would fragment as microbatches change size (torch reads the old name first).
    NVML: the other check initializes the driver in this process, which then could not fork ranks.
    """
    if not any(key in environment for key in _ALLOCATOR_KEYS):
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
