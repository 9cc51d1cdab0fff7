"""What a microbatch holds on this rank, measured, and the saver that offloads the share of it that a plan asks for.

Bytes are measured, not computed from a shape: two small forward and backward passes of the model itself give the bytes
of a row and those of a microbatch of none; every family, dtype, kernel and kind of recomputation has its own. What
autograd saves grows exactly with rows. What a layer needs beside it while backward is there grows no faster than from
the larger pass, so it is scaled from that: an upper bound, which is close where the pass was long. The loss is counted
by `cost.loss_bytes`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.attention import ActivationPolicy, BlockKernel, PlannedAttention
from lengthwise.comm import SoloTransport
from lengthwise.config import OffloadConfig
from lengthwise.core.held import kept_ratio
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.engine.live_bytes import LiveBytes
from lengthwise.models import apply_policy, position_limit, run_layers
from lengthwise.offload import ActivationSaver, ActivationStore, DiskStore, PinnedStore, parameter_storages
from lengthwise.program import lower_microbatch

_DOCUMENT_TOKENS = 64
_FEWEST_ROWS, _MOST_ROWS = 128, 1024  # of the larger pass
_FLOPS = 3e10  # that the larger pass may take on a CPU: about a second on one core
_WINDOW_LAYERS = 2  # what backward may have on the device beyond the layer it is at, as plans count it


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchBytes:
    """Bytes of a microbatch of so many rows, padding included; states and the loss are left out.

    fixed, a_row: what autograd saves. transient_a_row: of what is there beside it at the peak of backward. least: what
    any microbatch needs, which is mostly the gradient of the embedding, at the end of backward.
    """

    layers: int
    fixed: float
    a_row: float
    transient_a_row: float
    least: int

    def saved(self, rows: int) -> int:
        """Return what autograd saves."""
        return round(self.fixed + self.a_row * rows)

    def peak(self, rows: int) -> int:
        """Return the most that is on the device, nothing offloaded."""
        return max(self.least, round(self.saved(rows) + self.transient_a_row * rows))


class Offloading:
    """Makes the savers of a rank's microbatches; the model's parameters must already lie where they will."""

    def __init__(self, model: nn.Module, kernel: BlockKernel, store: ActivationStore) -> None:
        self.store = store
        self._model, self._kernel, self._stays = model, kernel, parameter_storages(model)
        self._bytes: dict[str, MicrobatchBytes] = {}

    def saver(self, microbatch: Microbatch, rows: int) -> ActivationSaver | None:
        """Return the saver of a microbatch that has `rows` rows here; None where nothing is to be offloaded."""
        if not microbatch.offload:
            return None
        kind = microbatch.recompute
        if kind not in self._bytes:
            self._bytes[kind] = measure_saved(self._model, self._kernel, kind)
        found = self._bytes[kind]
        saved = found.saved(rows)
        return ActivationSaver(
            self.store,
            stays=self._stays,
            offload_bytes=round((1 - kept_ratio(microbatch.offload, found.layers)) * saved),
            layer_bytes=saved // found.layers,
            window_bytes=_WINDOW_LAYERS * saved // found.layers,
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


def measure_saved(model: nn.Module, kernel: BlockKernel, recompute: str) -> MicrobatchBytes:
    """Measure what autograd saves of the layers of a model under one kind of recomputation; forward only."""
    rows = _FEWEST_ROWS * kernel.token_multiple
    passes = [_Pass(model, kernel, recompute, each) for each in (rows // 2, rows)]
    for each in passes:
        each.forward()
    return _fitted(passes, model)


def measure_microbatch(model: nn.Module, kernel: BlockKernel, recompute: str) -> MicrobatchBytes:
    """Measure that and what backward needs; gradients are added to those that there are."""
    fewest = rows = _FEWEST_ROWS * kernel.token_multiple
    if next(model.parameters()).device.type == "cpu":
        affordable = _FLOPS / (8.0 * sum(each.numel() for each in model.parameters()))
        rows = int(min(max(rows, affordable), _MOST_ROWS))
    else:
        rows = max(rows, _MOST_ROWS)
    passes = [_Pass(model, kernel, recompute, each) for each in (fewest // 2, rows)]
    for each in passes:
        each.forward_backward()
    return _fitted(passes, model)


class _Pass:
    """One small pass over short documents of any tokens, and what it held."""

    def __init__(self, model: nn.Module, kernel: BlockKernel, recompute: str, rows: int) -> None:
        config: Any = model.config
        length = min(_DOCUMENT_TOKENS, position_limit(config) or _DOCUMENT_TOKENS)
        documents = max(1, rows // length)
        piece = Piece(ranks=(0,), sequences=tuple(range(documents)))
        plan = Plan(
            ranks=1,
            layers=config.num_hidden_layers,
            capacity=length * documents,
            tokens=(length,) * documents,
            microbatches=(Microbatch(pieces=(piece,), recompute=recompute),),
        )
        self._model, self._recompute = model, recompute
        self._planned = _Watched(lower_microbatch(plan, 0), SoloTransport(), kernel)
        self._saver = ActivationSaver(None, stays=parameter_storages(model))
        device = next(model.parameters()).device
        self._ids = torch.arange(length * documents, device=device) % config.vocab_size
        self._positions = torch.arange(length, device=device).repeat(documents)
        self.rows, self.saved_bytes, self.peak_bytes, self.whole_peak_bytes = self._planned.num_rows, 0, 0, 0

    def forward(self) -> Tensor:
        """Run forward; return the hidden states."""
        policy = ActivationPolicy(recompute=self._recompute, saver=self._saver)
        with torch.enable_grad(), apply_policy(self._model, self._planned, policy):
            hidden = run_layers(self._model, self._planned, self._ids, self._positions)
        self.saved_bytes = self._saver.totals.saved_bytes
        return hidden

    def forward_backward(self) -> None:
        """Run both; note the peak until backward has left the second of its layers, and that of all."""

        def note(peak: Callable[[], int]) -> Callable[[], None]:
            def reached() -> None:
                self.peak_bytes = peak() if self._planned.left <= 2 else self.peak_bytes

            return reached

        if self._ids.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self._planned.reached = note(lambda: torch.cuda.max_memory_allocated() - before)
            hidden = self.forward()
            hidden.backward(torch.ones_like(hidden))
            self.whole_peak_bytes = torch.cuda.max_memory_allocated() - before
            return
        gradients = (each.grad for each in self._model.parameters() if each.grad is not None)
        with LiveBytes(*self._model.parameters(), *self._model.buffers(), *gradients) as live:
            self._planned.reached = note(lambda: live.peak_bytes)
            hidden = self.forward()
            hidden.backward(torch.ones_like(hidden))
            self.whole_peak_bytes = live.peak_bytes


class _Watched(PlannedAttention):
    """Tells when backward has left the attention of a layer."""

    left = 0

    @staticmethod
    def reached() -> None:
        """Replaced by who wants to hear of it."""

    def backward(self, *arguments: Any, **options: Any) -> Any:
        """Do what the attention does, and tell."""
        gradients = super().backward(*arguments, **options)
        self.left += 1
        self.reached()
        return gradients


def _fitted(passes: list[_Pass], model: nn.Module) -> MicrobatchBytes:
    smaller, larger = passes
    a_row = (larger.saved_bytes - smaller.saved_bytes) / (larger.rows - smaller.rows)
    config: Any = model.config
    return MicrobatchBytes(
        layers=max(config.num_hidden_layers, 2),
        fixed=larger.saved_bytes - a_row * larger.rows,
        a_row=a_row,
        transient_a_row=max(0, larger.peak_bytes - larger.saved_bytes) / larger.rows,
        least=smaller.whole_peak_bytes if smaller.whole_peak_bytes > smaller.peak_bytes else 0,
    )
