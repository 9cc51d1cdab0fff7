"""Activations as plain copies in host memory, made at once: to measure what offload takes away, not to gain by it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class CopyStore:
    """An `ActivationStore` whose copies are no tensors: what counts tensors does not count them."""

    waited_seconds = 0.0

    def __init__(self) -> None:
        self.leaving_bytes = 0

    def put(self, values: Tensor) -> _Copy:
        """Copy `values` (see `ActivationStore.put`)."""
        return _Copy(values)

    def reset(self) -> None:
        """Nothing is kept here."""

    def close(self) -> None:
        """Nothing is kept here."""


class _Copy:
    """Bytes of a `CopyStore`."""

    def __init__(self, values: Tensor) -> None:
        self._bytes, self._device = values.cpu().numpy().tobytes(), values.device
        self._fetched: Tensor | None = None

    def fetch(self) -> None:
        """Make the tensor."""
        if self._fetched is None:
            fetched = torch.empty(len(self._bytes), dtype=torch.uint8)
            fetched.numpy()[:] = np.frombuffer(self._bytes, dtype=np.uint8)
            self._fetched = fetched.to(self._device)

    def take(self) -> Tensor:
        """Return it, and forget it."""
        self.fetch()
        fetched, self._fetched = self._fetched, None
        assert fetched is not None, "it was fetched"
        return fetched
