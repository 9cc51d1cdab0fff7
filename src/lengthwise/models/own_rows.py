"""Entries of a model's weights, read from its safetensors on demand: no rank reads more than its part.

If transformers splits, joins or renames a folder's tensors (mixtures of experts), rank 0 reads all of them instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from lengthwise.models.model_source import ModelSource, weights_folder
from lengthwise.models.modules import replace_parameters
from lengthwise.models.text_part import left_alone, whole_model
from lengthwise.models.weights import check_finite, tensor_files


class OwnRows:
    """The tensors of a folder. num_bytes: number of bytes read so far."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, tensor_files(folder)
        self._opened: dict[str, Any] = {}
        self.num_bytes = 0

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors."""
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor, or None if there is no such tensor."""
        return tuple(self._slice(name).get_shape()) if name in self._files else None

    def read(self, name: str, first: int, stop: int) -> Tensor:
        """Return entries [first, stop) of a tensor, (entries,), in the dtype of the file.

        Raises:
            ConfigError: an entry is NaN or infinite.
        """
        tensor = self._slice(name)
        found = [tensor[box].reshape(-1) for box in _boxes(tensor.get_shape(), first, stop)]
        entries = torch.cat(found) if found else torch.empty(0)
        check_finite(f"model {self._folder}", [(name, entries)])
        self.num_bytes += entries.nbytes
        return entries

    def read_towers(self, model: nn.Module) -> None:
        """Read the values of a model's towers, which are on the meta device."""
        towers = left_alone(model)
        put_parameters(whole_model(model), towers, {n: self.read(n, 0, each.numel()) for n, each in towers.items()})

    def digest(self) -> bytes:
        """Return a digest of the tensors' names, shapes and dtypes, and of the files' names and sizes."""
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


def _boxes(shape: Sequence[int], first: int, stop: int) -> Iterator[tuple[slice, ...]]:
    """Yield the boxes of a tensor that together are its entries [first, stop), in order."""
    if first >= stop:
        return
    if len(shape) < 2:
        yield (slice(first, stop),) * len(shape)
        return
    width = prod(shape[1:])
    begin, end = -(-first // width), stop // width  # whole rows
    if begin > end:
        begin = end  # all in the middle of row `end`
    elif first < begin * width:
        rest = _boxes(shape[1:], first - (begin - 1) * width, width)
        yield from ((slice(begin - 1, begin), *each) for each in rest)
    if begin < end:
        yield (slice(begin, end),)
    rest = _boxes(shape[1:], max(0, first - end * width), stop - end * width)
    yield from ((slice(end, end + 1), *each) for each in rest)


def put_parameters(model: nn.Module, before: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    """Replace named parameters of a model by new ones with these values, (entries,) or of the same shape."""
    made = {
        id(each): nn.Parameter(values[name].view(each.shape), requires_grad=each.requires_grad)
        for name, each in before.items()
    }
    replace_parameters(model, made)


def forget_towers(model: nn.Module) -> None:
    """Free the values of a model's towers, on ranks that neither run nor save them."""
    towers = left_alone(model)
    put_parameters(whole_model(model), towers, {name: each.detach().to("meta") for name, each in towers.items()})


def own_rows(source: ModelSource, model: nn.Module) -> OwnRows | None:
    """Return the source of every rank's rows, or None if the files do not have the parameters one by one."""
    model = whole_model(model)
    if not source.weights or _is_converted(model):
        return None
    found = OwnRows(weights_folder(source.name))
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    kept = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if set(model.state_dict()) != kept or not found.names <= kept:  # there are other tensors, such as buffers
        return None
    return found if all(found.shape(name) == shape for name, shape in shapes.items()) else None


def _is_converted(model: nn.Module) -> bool:
    """Return whether transformers converts the stored tensors, or may do so."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return True
    mine: Any = model
    return bool(get_model_conversion_mapping(mine, add_legacy=False))
