"""Rows of a model's weights, read from its safetensors when asked: no rank reads more than its part.

For folders whose tensors are the model's parameters one by one, under the same names. Of others (transformers splits,
joins or renames what it loads, mixtures of experts for example) rank 0 reads all.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from lengthwise.models.load import ModelSource, weights_folder
from lengthwise.models.weights import tensor_files


class OwnRows:
    """The tensors of a folder; `num_bytes`: read so far."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, tensor_files(folder)
        self._opened: dict[str, Any] = {}
        self.num_bytes = 0

    @property
    def names(self) -> frozenset[str]:
        """The names of the tensors."""
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor; None: there is none of this name."""
        return tuple(self._slice(name).get_shape()) if name in self._files else None

    def read(self, name: str, first: int, stop: int) -> Tensor:
        """Return rows [first, stop) of a tensor, in the dtype of the file."""
        rows: Tensor = self._slice(name)[first:stop]
        self.num_bytes += rows.numel() * rows.element_size()
        return rows

    def digest(self) -> bytes:
        """Return what tells these files from others, as far as names, shapes, dtypes and sizes do."""
        found = hashlib.sha256()
        for name in sorted(self._files):
            each, file = self._slice(name), self._folder / self._files[name]
            found.update(f"{name} {each.get_dtype()} {each.get_shape()} {file.name} {file.stat().st_size}\n".encode())
        return found.digest()

    def _slice(self, name: str) -> Any:
        file = self._files[name]
        if file not in self._opened:
            self._opened[file] = safe_open(self._folder / file, framework="pt")
        return self._opened[file].get_slice(name)


def own_rows(source: ModelSource, model: nn.Module) -> OwnRows | None:
    """Return what each rank can read its rows of all parameters from; None: they are not in the files one by one."""
    if not source.weights or _is_converted(model):
        return None
    found = OwnRows(weights_folder(source.name))
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    kept = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if set(model.state_dict()) != kept or not found.names <= kept:  # buffers that are weights, or what else there is
        return None
    return found if all(found.shape(name) == shape for name, shape in shapes.items()) else None


def _is_converted(model: nn.Module) -> bool:
    """Whether transformers loads something else than the tensors as they are, or cannot be asked."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return True
    mine: Any = model
    return bool(get_model_conversion_mapping(mine, add_legacy=False))
