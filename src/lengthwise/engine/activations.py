"""What a microbatch holds on this rank, measured, and the saver that offloads the share of it that a plan asks for.

Bytes are measured, not computed from a shape: small passes of the model itself (`engine.small_pass`) give those of any
number of rows; every family, dtype, kernel and kind of recomputation has its own. Microbatches of a rank alone, of
rings and of rings that split heads are measured apart.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace

from torch import nn

from lengthwise.attention import BlockKernel
from lengthwise.config import OffloadConfig
from lengthwise.core.errors import ConfigError
from lengthwise.core.plan import Microbatch
from lengthwise.core.shape import LayerCut
from lengthwise.cost import MicrobatchBytes, StepBytes, shape_from_config
from lengthwise.engine.small_pass import Casting, Layout, SmallPasses
from lengthwise.engine.stage_passes import passes_of
from lengthwise.models import WHOLE, Chunk, position_limit
from lengthwise.offload import ActivationSaver, ActivationStore, DiskStore, PinnedStore, parameter_storages

_ROWS = 64  # of the larger pass: enough for lines that are exact
_MOST_ROWS = 512  # where routing decides which operations run, and lines are not
_FLOPS = 3e10  # that the larger pass may then take on a CPU: about a second on one core

WHOLE_MODEL: Mapping[int, Chunk] = {WHOLE.number: WHOLE}


class Offloading:
    """Makes the savers of a rank's microbatches; the model's parameters must already lie where they will."""

    def __init__(
        self, model: nn.Module, kernel: BlockKernel, store: ActivationStore, casting: Casting = nullcontext
    ) -> None:
        self.store, self._leaving_bytes, self._casting = store, store.leaving_bytes, casting
        self._model, self._kernel, self._stays = model, kernel, parameter_storages(model)
        self._bytes: dict[tuple[str, int, int], MicrobatchBytes] = {}
        self._savers: list[ActivationSaver] = []  # of this step

    def begin_step(self) -> None:
        """Give back the room of what a step before, which raised, has left in the store."""
        while self._savers:
            self._savers.pop().end()

    def saver(self, microbatch: Microbatch, rows: int, chunk: Chunk = WHOLE) -> ActivationSaver | None:
        """Return the saver of a microbatch that has `rows` rows in a chunk; None where nothing is to be offloaded."""
        if not microbatch.offload:
            return None
        kind, heads = microbatch.recompute, max(piece.heads for piece in microbatch.pieces)
        key = (kind, heads, chunk.number)
        if key not in self._bytes:
            passes = SmallPasses(
                model=self._model,
                kernel=self._kernel,
                recompute=kind,
                layout=Layout(degree=heads, heads=heads),
                casting=self._casting,
                chunk=chunk,
            )
            self._bytes[key] = measure_saved(passes)
        found = self._bytes[key]
        saved = found.saved(rows)
        self.store.leaving_bytes = found.leaving(rows, self._leaving_bytes)
        made = ActivationSaver(
            self.store,
            stays=self._stays,
            offload_bytes=round(found.away(rows, microbatch.offload)),
            layer_bytes=saved // found.layers,
            window_bytes=int(found.window(rows)),
        )
        self._savers.append(made)
        return made


def start_offloading(
    config: OffloadConfig | None, model: nn.Module, kernel: BlockKernel, *, where: str, casting: Casting = nullcontext
) -> Offloading | None:
    """Open the store that a run file asks for; None where it asks for none. `where` is the rank, for errors.

    casting: the autocast of forwards.

    Raises:
        MemoryShortage: the store cannot be opened.
    """
    if config is None or config.ratio == "off":
        return None
    if config.store == "host":
        return Offloading(model, kernel, PinnedStore(next(model.parameters()).device, where=where), casting)
    assert config.path is not None, "a disk has a path: `OffloadConfig.broken_rules`"
    return Offloading(model, kernel, DiskStore(config.path, where=where), casting)


def check_offload(offload: OffloadConfig | None, layers: int, *, on_gpus: bool) -> None:
    """Refuse offload to the memory in use, or to where nothing can be written, and of too few layers.

    Raises:
        ConfigError: one of these.
    """
    if offload is None or offload.ratio == "off":
        return
    if layers <= 2:
        expected = "a model of more than 2 layers, two of which always stay on the device"
        raise ConfigError("offload.ratio", expected=expected, got=f"{layers}", remedy="Take offload out.")
    if offload.store == "host" and not on_gpus:
        expected = "disk on a machine without GPUs, where activations are in the host's memory already"
        raise ConfigError("offload.store", expected=expected, got="host", remedy="Set store: disk and path.")
    if offload.path is not None:
        try:
            with tempfile.TemporaryFile(dir=offload.path):
                pass
        except OSError as error:
            expected, got = "a folder that can be written", f"{offload.path}: {error.strerror or error}"
            raise ConfigError("offload.path", expected=expected, got=got, remedy="Correct the path.") from None


def measure_saved(passes: SmallPasses) -> MicrobatchBytes:
    """Measure what autograd saves of the layers of a model, or a chunk of them, with one kind of recomputation."""
    return passes.saved(_rows(passes))


def measure_microbatch(
    passes: SmallPasses,
    *,
    logits_at_once: int | None = None,
    most_rows: int | None = None,
    offloads: bool = False,
    chunks: Mapping[int, Chunk] = WHOLE_MODEL,
    stage: int = 0,
    stages: int = 1,
) -> StepBytes:
    """Measure all that microbatches of up to `most_rows` rows hold; gradients are added to those that there are.

    passes: of whatever chunk; those of `chunks`, which a stage has, are measured. logits_at_once: that the loss makes;
    None: all. offloads: whether ratios of offload will be asked for.
    """
    found = {
        number: _measured_chunk(
            replace(passes, chunk=chunk),
            logits_at_once=logits_at_once if chunk.is_last else None,
            most_rows=most_rows,
            offloads=offloads,
        )
        for number, chunk in chunks.items()
    }
    return StepBytes(
        layers=passes.config.num_hidden_layers,
        chunks=found,
        passes=passes_of(LayerCut(stages=stages, virtual=len(chunks)), stage),
        hidden_a_row=next(iter(chunks.values())).width * next(passes.model.parameters()).element_size(),
    )


def _measured_chunk(
    passes: SmallPasses, *, logits_at_once: int | None, most_rows: int | None, offloads: bool
) -> MicrobatchBytes:
    rows, config = _rows(passes), passes.config
    if logits_at_once is None:
        return passes.measure(rows, chunk_tokens=None, offloads=offloads)
    chunk_tokens = max(1, logits_at_once // config.vocab_size)
    if most_rows is not None and most_rows <= chunk_tokens:
        return passes.measure(rows, chunk_tokens=None, offloads=offloads)
    beyond = passes.measure(rows, chunk_tokens=chunk_tokens, offloads=offloads)
    if chunk_tokens < rows:  # what is not in chunks then is as small
        return beyond
    return replace(passes.measure(rows, chunk_tokens=None, offloads=offloads), most_rows=chunk_tokens, beyond=beyond)


def _rows(passes: SmallPasses) -> int:
    """Return the rows of the larger pass."""
    config, multiple, rows = passes.config, passes.kernel.token_multiple, _ROWS
    if shape_from_config(config.to_dict()).experts > 1:
        affordable = _FLOPS / (8.0 * sum(parameter.numel() for parameter in passes.model.parameters()))
        rows = int(min(max(rows, affordable), _MOST_ROWS))
    limit = position_limit(config)
    if limit is not None:
        rows = max(2, min(rows, limit // passes.layout.degree))
    multiple *= 4  # a half of it has two chunks, of rings and of the loss
    return max(rows // multiple, 1) * multiple
