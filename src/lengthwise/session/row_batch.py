"""The rows of a step in a loop: mappings with `input_ids`, or ids alone, of any lengths.

A column `weights`, aligned as labels are, weighs the next token's loss. Columns of images are those of the model's
processor (`models.images`). Every other column has one value per token; a loss gets it cut and packed as the tokens
are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lengthwise.core.errors import DataError, LengthwiseError, raise_problems
from lengthwise.core.prefixes import SharedPrefixes, shared_prefixes
from lengthwise.data import NO_LOSS
from lengthwise.data.dataset import DatasetBuilder
from lengthwise.data.rows import LEAST_WEIGHT, MOST_WEIGHT
from lengthwise.engine.batch import NO_PLACEHOLDERS, StepBatch, refuse_placeholders
from lengthwise.models.image_kinds import IMAGE_COLUMNS
from lengthwise.models.images import MODALITIES, ImageReader, RowImages
from lengthwise.program import Segment
from lengthwise.session.misuse import shown
from lengthwise.session.source import PlannedStep

Row: TypeAlias = Mapping[str, Any] | Sequence[int] | np.ndarray | Tensor
"""One sequence: `input_ids` [length] and per-token columns, or the ids alone."""

_IDS, _LABELS, _MASK, _POSITIONS = "input_ids", "labels", "attention_mask", "position_ids"
_WEIGHTS = "weights"
_VIDEOS = ("pixel_values_videos", "video_grid_thw", "input_features", "input_features_mask")
_SHOWN = 10  # problems of one step
_KEPT_AS = {  # dtypes for which torch has few functions
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
}


class RowBatch(StepBatch):
    """A global batch made of a loop's rows, whose ids are below `num_words`, the model's vocabulary.

    columns: columns beside ids and labels, by name: a tensor (length, ...) per row. is_weighed: True with loss weights.
    is_plain: True without other columns and weights. reader: reads the rows' images; None refuses them.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        num_words: int = 1 << 31,
        placeholders: Mapping[int, str] = NO_PLACEHOLDERS,
        reader: ImageReader | None = None,
    ) -> None:
        if isinstance(rows, Mapping):
            got = f"a mapping of {', '.join(map(str, rows))}: a collated batch"
            remedy = "Leave rows as they are: DataLoader(..., collate_fn=list)."
            raise DataError("sequences", expected="a list of rows, one per sequence", got=got, remedy=remedy)
        rows = _listed(rows)
        problems: list[LengthwiseError] = []
        builder, columns, is_weighed = DatasetBuilder(), list[dict[str, Tensor]](), False
        self._images = dict[int, RowImages]()
        builder.start_source("sequences", "sequence", None)
        for number, row in enumerate(rows):
            try:
                ids, labels, others, images = _read(row, f"sequence {number}")
                for name, each in ((_IDS, ids), (_LABELS, labels)):
                    if each is not None and int(each.max()) >= num_words:
                        where = f"sequence {number}, {name}"
                        raise _wrong(where, f"ids below the model's {num_words}", f"{each.max()}")
                refuse_placeholders(ids, placeholders, f"sequence {number}, {_IDS}")
                self._read_images(number, ids, images, reader)
            except DataError as error:
                problems.append(error)
                continue
            is_weighed |= _WEIGHTS in others
            builder.add(*_weighed(ids, labels, others.pop(_WEIGHTS, None), f"sequence {number}, {_WEIGHTS}"))
            columns.append(others)
        if not rows:
            remedy = "Give every step at least one sequence."
            problems.append(DataError("sequences", expected="at least one", got="none", remedy=remedy))
        raise_problems(problems[:_SHOWN])
        super().__init__(builder.finish(), range(len(rows)))
        self._reader = reader
        self.columns = _by_name(columns)
        self.is_weighed, self.is_plain = is_weighed, not self.columns and not is_weighed
        _refuse_unequal(self.columns)

    def _read_images(
        self, number: int, ids: np.ndarray, given: Mapping[str, Tensor], reader: ImageReader | None
    ) -> None:
        where = f"sequence {number}, images"
        if reader is not None:
            if (found := reader.read(ids, given, where)) is not None:
                self._images[number] = found
        elif given:
            remedy = "Remove such rows, or train them with plain TRL or Transformers."
            got = f"one with {', '.join(given)}"
            raise DataError(where, expected="a row of text, for this model and layout", got=got, remedy=remedy)

    def _images_of(self, index: int) -> RowImages | None:
        return self._images.get(index)

    @property
    def identity(self) -> object:
        """A digest of all rows."""
        found = hashlib.sha256(self.dataset.digest())
        for number, images in self._images.items():
            found.update(number.to_bytes(8, "little") + images.digests.tobytes())
        for name in sorted(self.columns):
            found.update(name.encode())
            for each in self.columns[name]:
                found.update(each.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()

    def shared_prefixes(self) -> SharedPrefixes | None:
        """Return the shared prefixes of rows, of tokens that predict no label, or None without any.

        Their tokens are alike in all columns, which may be inputs of the model.
        """
        starts = list[np.ndarray]()
        for number, length in enumerate(self.lengths):
            ids, labels = self.dataset.read(number, 0, length)
            labelled = np.flatnonzero(labels[1:] != NO_LOSS)
            tokens = int(labelled[0]) if len(labelled) else length - 1
            if number in self._images:
                tokens = self._images[number].whole_until(tokens)
            columns = (self.columns[name][number][:tokens] for name in sorted(self.columns))
            images = [self._images[number].by_token(tokens)] if number in self._images else []
            images = images or [np.zeros(tokens, dtype=np.uint64)] * bool(self._images)
            parts = [ids[:tokens], *images, *(each.contiguous().view(-1).view(torch.uint8).numpy() for each in columns)]
            as_bytes = [each.view(np.uint8).reshape(max(1, tokens), -1) for each in parts]
            starts.append(np.concatenate(as_bytes, axis=1)[:tokens])
        return shared_prefixes(starts, self.lengths)

    def column(self, name: str, segments: Sequence[Segment]) -> Tensor:
        """Return a column of a rank's segments, (tokens, ...), in local order."""
        values = self.columns[name]
        none = values[0][:0]  # in waves a rank may have no segment
        return torch.cat([none, *(values[index][start:stop] for index, start, stop in self.places(segments))])


def rows_of(planned: PlannedStep) -> RowBatch:
    """Return the rows of a step that a session planned."""
    assert isinstance(planned.batch, RowBatch), f"a step of {type(planned.batch).__name__}"
    return planned.batch


def _listed(rows: Any) -> Sequence[Row]:
    remedy = "Give a list: [ids, ids, ...] or [{'input_ids': ids}, ...]."
    if isinstance(rows, str | bytes | set | frozenset) or not hasattr(rows, "__len__"):
        raise DataError("sequences", expected="a list of rows, one per sequence", got=shown(rows), remedy=remedy)
    if isinstance(rows, Tensor) and not rows.dim():
        raise DataError("sequences", expected="a list of rows, one per sequence", got="one number", remedy=remedy)
    return list(rows)


def _refuse_unequal(columns: Mapping[str, Sequence[Tensor]]) -> None:
    problems = [
        _wrong(
            f"sequence {number}, {name}", f"{tuple(first.shape[1:])} a token, as sequence 0", f"{tuple(each.shape[1:])}"
        )
        for name, (first, *others) in columns.items()
        for number, each in enumerate(others, 1)
        if each.shape[1:] != first.shape[1:]
    ]
    raise_problems(problems[:_SHOWN])


def _read(row: Row, where: str) -> tuple[np.ndarray, np.ndarray | None, dict[str, Tensor], dict[str, Tensor]]:
    """Return a row's ids, its labels or None, its other columns, all without masked padding, and those of images."""
    columns = dict(row) if isinstance(row, Mapping) else {_IDS: row}
    if not all(isinstance(name, str) for name in columns):
        raise _wrong(where, "names of columns that are text", ", ".join(map(repr, columns)))
    if columns.get(_IDS) is None:
        raise _wrong(where, f"a column {_IDS}", ", ".join(map(str, columns)) or "no column")
    tensors = {name: _tensor(values, f"{where}, {name}") for name, values in columns.items() if values is not None}
    images = {name: tensors.pop(name) for name in IMAGE_COLUMNS if name in tensors}
    for name in MODALITIES:
        tensors.pop(name, None)
    if tensors[_IDS].dim() == 2 and len(tensors[_IDS]) == 1:  # what a tokenizer or processor returns for one text
        tensors = {name: values[0] if len(values) == 1 else values for name, values in tensors.items()}
    if not tensors[_IDS].numel():
        raise _wrong(where, "at least one token", "none")
    ids = _whole(tensors.pop(_IDS), f"{where}, {_IDS}")
    for name, values in tensors.items():
        if name in _VIDEOS:
            raise _wrong(f"{where}, {name}", "text or images", "videos or sounds", "Take such rows out.")
        if len(values) != len(ids):
            raise _wrong(f"{where}, {name}", f"one value per token, {len(ids)}", f"{len(values)}")
    kept = _kept(tensors.pop(_MASK, None), len(ids), where)
    positions = tensors.pop(_POSITIONS, None)
    if positions is not None and not torch.equal(positions[kept].long(), torch.arange(kept.stop - kept.start)):
        remedy = "Give every sequence a row of its own."
        raise _wrong(f"{where}, {_POSITIONS}", "0, 1, 2, ...: one sequence per row", "others", remedy)
    labels = tensors.pop(_LABELS, None)
    given = None if labels is None else _whole(labels, f"{where}, {_LABELS}", least=NO_LOSS)[kept]
    return ids[kept], given, {name: values[kept] for name, values in tensors.items()}, images


def _tensor(values: Any, where: str) -> Tensor:
    try:
        if isinstance(values, np.ndarray) and not (values.flags.writeable and all(s >= 0 for s in values.strides)):
            values = values.copy()
        tensor = torch.as_tensor(values).detach()
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
            raise TypeError("a sparse, nested or quantized tensor")
        tensor = tensor.cpu()
        tensor = tensor.to(_KEPT_AS.get(tensor.dtype, tensor.dtype))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        got = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise _wrong(where, "one number per token", got) from None
    if tensor.dim() == 0:
        raise _wrong(where, "one value per token", "a single number")
    return tensor


def _whole(values: Tensor, where: str, least: int = 0) -> np.ndarray:
    if values.dim() != 1 or values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        got = f"{str(values.dtype).removeprefix('torch.')} of {tuple(values.shape)}"
        raise _wrong(where, "whole numbers (length,), one sequence per row", got)
    low, high = int(values.min()), int(values.max())
    if (low < 0 and low != least) or low < least or high >= 1 << 31:
        raise _wrong(where, f"numbers from 0{f', or {least}' * (least < 0)}", f"{low if low < 0 else high}")
    return values.numpy().astype(np.int32)


def _weighed(
    ids: np.ndarray, labels: np.ndarray | None, weights: Tensor | None, where: str
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Return ids, labels without a loss where the weight is 0, and float32 weights, or None if all are 0 or 1."""
    if weights is None:
        return ids, labels, None
    found = weights.to(torch.float32).numpy()
    if found.ndim != 1 or not ((found == 0) | (found >= LEAST_WEIGHT) & (found <= MOST_WEIGHT)).all():
        raise _wrong(where, f"weights of 0 (no loss), or from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}", "others")
    given = np.where(found > 0, ids if labels is None else labels, np.int32(NO_LOSS))
    found = np.where(given != NO_LOSS, found, np.float32(0))
    return ids, given, None if np.isin(found, (0, 1)).all() else found


def _kept(mask: Tensor | None, length: int, where: str) -> slice:
    """Return the consecutive tokens that a row's attention mask keeps."""
    if mask is None:
        return slice(0, length)
    kept = torch.nonzero(mask.reshape(-1)).flatten()
    if not len(kept) or int(kept[-1]) - int(kept[0]) + 1 != len(kept):
        got = f"{len(kept)} of {length} tokens, apart"
        raise _wrong(f"{where}, {_MASK}", "one run of tokens without padding inside", got)
    return slice(int(kept[0]), int(kept[-1]) + 1)


def _by_name(columns: Sequence[Mapping[str, Tensor]]) -> dict[str, list[Tensor]]:
    names = {name for each in columns for name in each}
    problems = [
        _wrong(f"sequence {number}", f"the columns of the others, {', '.join(sorted(names))}", f"no {name}")
        for number, each in enumerate(columns)
        for name in sorted(names - each.keys())
    ]
    raise_problems(problems[:_SHOWN])
    kinds = {name: reduce(torch.promote_types, (each[name].dtype for each in columns)) for name in names}
    return {name: [each[name].to(kind) for each in columns] for name, kind in kinds.items()}


def _wrong(where: str, expected: str, got: str, remedy: str = "Correct the rows that the loop passes.") -> DataError:
    return DataError(where, expected=expected, got=got, remedy=remedy)
