"""The saver that offloads the share of a microbatch's activations that its plan asks for.

The bytes that autograd saves are measured by small passes (`engine.measuring`), apart for each kind of recomputation,
number of ranks that split heads, and chunk of layers.
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext

from torch import nn

from lengthwise.attention import BlockKernel
from lengthwise.config import OffloadConfig
from lengthwise.core.errors import ConfigError
from lengthwise.core.plan import Microbatch
from lengthwise.cost import MicrobatchBytes
from lengthwise.engine.measuring import Casting, Layout, SmallPasses
from lengthwise.models import WHOLE, Chunk
from lengthwise.offload import ActivationSaver, ActivationStore, DiskStore, PinnedStore, parameter_storages


class Offloading:
    """Makes the savers of a rank's microbatches. The model's parameters must already be where they stay."""

    def __init__(
        self, model: nn.Module, kernel: BlockKernel, store: ActivationStore, casting: Casting = nullcontext
    ) -> None:
        self.store, self._leaving_bytes, self._casting = store, store.leaving_bytes, casting
        self._model, self._kernel, self._stays = model, kernel, parameter_storages(model)
        self._bytes: dict[tuple[str, int, int], MicrobatchBytes] = {}
        self._savers: list[ActivationSaver] = []  # of this step

    def begin_step(self) -> None:
        """Free what an earlier step that raised has left in the store."""
        while self._savers:
            self._savers.pop().end()

    def saver(self, microbatch: Microbatch, rows: int, chunk: Chunk = WHOLE) -> ActivationSaver | None:
        """Return the saver of a microbatch of `rows` rows in a chunk, None if it offloads nothing."""
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
            self._bytes[key] = passes.measure_saved()
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
    """Open the store of the settings; return None for settings without offload.

    where: the rank's name in errors. casting: autocast of forwards.

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
    """Check that offload has enough layers, and a store that is not the memory in use and can be written.

    Raises:
        ConfigError: it has not.
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
