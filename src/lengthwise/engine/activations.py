"""What the activations of a microbatch weigh on this rank, and the saver that offloads the share a plan asks for.

Bytes are measured, not computed from a shape: two small forwards of the model itself, through the same hooks, give the
bytes of a row and those of a microbatch of none; every family, dtype and kernel keeps its own. Done once for each kind
of recomputation, at its first microbatch that offloads. What the loss keeps is left out: it stays on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lengthwise.attention import ActivationPolicy, BlockKernel, PlannedAttention
from lengthwise.comm import SoloTransport
from lengthwise.config import OffloadConfig
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.models import apply_policy, position_limit, run_layers
from lengthwise.offload import ActivationSaver, ActivationStore, DiskStore, PinnedStore, parameter_storages
from lengthwise.program import lower_microbatch

_DOCUMENT_TOKENS = 16
_DOCUMENTS = (4, 8)  # of the two forwards, of `BlockKernel.token_multiple` times as many where that is more than 1
_WINDOW_LAYERS = 2  # what backward may have on the device beyond the layer it is at, as plans count it


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationBytes:
    """Bytes that autograd saves of a microbatch: `fixed` and so many `a_row`."""

    fixed: float
    a_row: float

    def of(self, rows: int) -> int:
        """Return the bytes of a microbatch of so many rows, padding included."""
        return round(self.fixed + self.a_row * rows)


class Offloading:
    """Makes the savers of a rank's microbatches; the model's parameters must already lie where they will."""

    def __init__(self, model: nn.Module, kernel: BlockKernel, store: ActivationStore) -> None:
        self.store = store
        self._model, self._kernel, self._stays = model, kernel, parameter_storages(model)
        self._layers: int = max(model.config.num_hidden_layers, 2)  # type: ignore[union-attr, assignment, type-var]
        self._bytes: dict[str, ActivationBytes] = {}

    def saver(self, microbatch: Microbatch, rows: int) -> ActivationSaver | None:
        """Return the saver of a microbatch that has `rows` rows here; None where nothing is to be offloaded."""
        if not microbatch.offload:
            return None
        kind = microbatch.recompute
        if kind not in self._bytes:
            self._bytes[kind] = measure_activations(self._model, self._kernel, kind)
        everything = self._bytes[kind].of(rows)
        # As the plan file counts them: of all but two layers, a share (`core.held.kept_ratio`).
        offloaded = microbatch.offload * (self._layers - _WINDOW_LAYERS) / self._layers * everything
        return ActivationSaver(
            self.store,
            stays=self._stays,
            offload_bytes=round(offloaded),
            layer_bytes=everything // self._layers,
            window_bytes=_WINDOW_LAYERS * everything // self._layers,
        )


def start_offloading(
    config: OffloadConfig | None, model: nn.Module, kernel: BlockKernel, *, where: str
) -> Offloading | None:
    """Open the store that a run file asks for; None where it asks for none. `where` is the rank, for errors.

    Raises:
        MemoryShortage: the store cannot be opened.
    """
    if config is None or config.ratio == "off":
        return None
    if config.store == "host":
        return Offloading(model, kernel, PinnedStore(next(model.parameters()).device, where=where))
    assert config.path is not None, "a disk has a path: `OffloadConfig.broken_rules`"
    return Offloading(model, kernel, DiskStore(config.path, where=where))


def measure_activations(model: nn.Module, kernel: BlockKernel, recompute: str) -> ActivationBytes:
    """Measure what the layers of a model save for backward under one kind of recomputation."""
    stays = parameter_storages(model)
    rows, saved = zip(*(_saved(model, kernel, recompute, stays, documents) for documents in _DOCUMENTS), strict=True)
    a_row = (saved[1] - saved[0]) / (rows[1] - rows[0])
    return ActivationBytes(fixed=saved[0] - a_row * rows[0], a_row=a_row)


def _saved(
    model: nn.Module, kernel: BlockKernel, recompute: str, stays: frozenset[int], documents: int
) -> tuple[int, int]:
    """Run forward once; return (rows, bytes saved)."""
    config: Any = model.config
    length = min(_DOCUMENT_TOKENS, position_limit(config) or _DOCUMENT_TOKENS)
    documents = -(-documents * kernel.token_multiple // length) if kernel.token_multiple > 1 else documents
    piece = Piece(ranks=(0,), sequences=tuple(range(documents)))
    plan = Plan(
        ranks=1,
        layers=config.num_hidden_layers,
        capacity=length * documents,
        tokens=(length,) * documents,
        microbatches=(Microbatch(pieces=(piece,), recompute=recompute),),
    )
    planned = PlannedAttention(lower_microbatch(plan, 0), SoloTransport(), kernel)
    saver = ActivationSaver(None, stays=stays)
    device = next(model.parameters()).device
    ids = torch.zeros(length * documents, dtype=torch.long, device=device)
    positions = torch.arange(length, device=device).repeat(documents)
    with torch.enable_grad(), apply_policy(model, planned, ActivationPolicy(recompute=recompute, saver=saver)):
        run_layers(model, planned, ids, positions)
    return planned.num_rows, saver.totals.saved_bytes
