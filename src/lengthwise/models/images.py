"""Rows with images: the inputs of a family's images, their tokens and positions, in a row and in a microbatch.

A row keeps its image inputs whole. A rank gets the images whose tokens it holds in a microbatch. Positions of several
axes (M-RoPE) are those of the whole row, computed once by the family's own function, and cut with it.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lengthwise.core.errors import DataError
from lengthwise.core.names import counted
from lengthwise.models.image_kinds import KINDS, NO_PATCH, PATCHES, PIXELS
from lengthwise.models.image_work import tower_work
from lengthwise.models.text_part import has_towers, left_alone, whole_model

MODALITIES = ("mm_token_type_ids", "token_type_ids")  # columns of processors that say again which tokens are images

FEATURES = "mm_encoder_outputs"  # argument of Hugging Face's models that takes features in place of pixels
_REMEDY = "Pass what the model's processor returns for one row, with its images."
_OTHER = "Train with the tokenizer and the image processor of the model itself."
_CUT = f"{_REMEDY[:-1]}, all of it: truncation, such as TRL's max_length, cuts images."


@dataclass(frozen=True, slots=True, kw_only=True)
class RowImages:
    """The images of a row.

    inputs: function that returns the tower's inputs of an image. places: tokens of the row that stand for images,
    (image tokens,). ends: image tokens up to the end of each image, (images,). positions: (axes, length), or None if
    positions count tokens. digests: a digest an image, uint64 (images,).
    mutual: spans (start, stop) of tokens that see each other in both directions; a prefix has all of one or nothing.
    """

    inputs: Callable[[int], Mapping[str, Tensor]]
    places: np.ndarray
    ends: np.ndarray
    positions: Tensor | None
    digests: np.ndarray
    mutual: tuple[tuple[int, int], ...] = ()

    def within(self, start: int, stop: int) -> range:
        """Return the numbers of the images with tokens in [start, stop)."""
        features = _held(self, start, stop)
        return range(_image_of(self, features[0]), _image_of(self, features[-1]) + 1) if features else features

    def by_token(self, tokens: int) -> np.ndarray:
        """Return the digest of the image of each of the first `tokens` tokens, uint64 (tokens,), 0 for text."""
        found = np.zeros(tokens, dtype=np.uint64)
        places = self.places[: np.searchsorted(self.places, tokens)]
        found[places] = self.digests[np.searchsorted(self.ends, np.arange(len(places)), side="right")]
        return found

    def whole_until(self, tokens: int) -> int:
        """Return how many of the first `tokens` tokens are a prefix that parts no mutual span."""
        return next((start for start, stop in self.mutual if start < tokens < stop), tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchImages:
    """The images of which a rank holds tokens in a microbatch.

    inputs: the tower's inputs of these images. features: features of the rank's image tokens among all of these
    images', (image tokens,). positions: (axes, tokens), or None.
    """

    inputs: Mapping[str, Tensor]
    features: Tensor
    positions: Tensor | None

    def to(self, move: Callable[[Tensor], Tensor]) -> MicrobatchImages:
        """Return the same on another device."""
        inputs = {name: move(each) for name, each in self.inputs.items()}
        positions = None if self.positions is None else move(self.positions)
        return MicrobatchImages(inputs=inputs, features=move(self.features), positions=positions)


class ImageReader:
    """Reads the images of a model's rows. token: id of the tokens that stand for an image."""

    def __init__(self, model: Any) -> None:
        whole = whole_model(model)
        config = whole.config
        self._model, self._config, self._kind = whole.model, config, KINDS[config.model_type]
        self._tower = tower_work(model, self._kind.patches(config))
        self.token: int = config.image_token_id
        self.mutual = self._kind.mutual(config)
        self.columns = (PIXELS, self._kind.beside) if self._kind.beside is not None else (PIXELS,)

    def read(self, ids: np.ndarray, given: Mapping[str, Tensor], where: str) -> RowImages | None:
        """Return the images of a row with these ids, (length,), and columns; None for a row of text.

        Raises:
            DataError: columns are missing or not as the family's processor gives them, or images and tokens do not fit.
        """
        with self._naming(where):
            return self._read(ids, given, where)

    @contextmanager
    def _naming(self, where: str, remedy: str = _REMEDY) -> Iterator[None]:
        """Translate errors of torch and of the family's own functions to a DataError of a row."""
        try:
            yield
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            got = " ".join(str(error).split())[:200]
            expected = f"{' and '.join(self.columns)} as the model's processor gives them"
            raise DataError(where, expected=expected, got=got, remedy=remedy) from None

    def _check_forms(self, given: Mapping[str, Tensor]) -> None:
        """Raise ValueError for columns of other dtypes and dimensions than the tower takes."""
        empty = self._kind.empty(self._config, self.least_tokens)
        for name in self.columns:
            found, usual = given[name], empty[name]
            alike = (found.dim(), found.is_floating_point()) == (usual.dim(), usual.is_floating_point())
            if not alike or (found.shape[-1] != usual.shape[-1] and not self._kind.varies):
                raise ValueError(f"{name} of {found.dtype} {tuple(found.shape)}")

    def _read(self, ids: np.ndarray, given: Mapping[str, Tensor], where: str) -> RowImages | None:
        places = np.flatnonzero(ids == self.token)
        if not given and not places.size:
            return None
        missing = [name for name in self.columns if name not in given]
        if missing or not places.size:
            expected = f"{', '.join(self.columns)} beside {counted(len(places), 'token')} of images"
            got = f"no {', '.join(missing)}" if missing else f"no token {self.token}, which stands for an image"
            raise DataError(where, expected=expected, got=got, remedy=_REMEDY)
        given = dict(given)
        self._check_forms(given)
        pixels = self._kind.pixels(given)
        if int(pixels.sum()) != len(given[PIXELS]):
            expected = f"{len(given[PIXELS])} entries of {PIXELS} for {counted(len(pixels), 'image')}"
            got = f"{int(pixels.sum())} entries by {self.columns[-1]}"
            raise DataError(where, expected=expected, got=got, remedy=_REMEDY)
        ends = np.cumsum(pixels.numpy())
        digests = [self._digest(given, ends, image) for image in range(len(ends))]
        tokens = self._kind.tokens(self._config, given, len(places))
        return self._row(ids, tokens, given, partial(_of_image, given, ends), digests, where)

    def read_files(
        self,
        ids: np.ndarray,
        files: Sequence[tuple[tuple[int, int], int]],
        decode: Callable[[int], Mapping[str, Tensor]],
        where: str,
    ) -> RowImages:
        """Return the images of a row of a run file. files: patches, (rows, columns), and tokens of each.

        decode: function that returns the columns of an image, by its number.

        Raises:
            DataError: the row has another number of tokens of images, or the model makes another number of an image.
        """

        def inputs(image: int) -> dict[str, Tensor]:
            found, tokens = decode(image), files[image][1]
            with self._naming(where, _OTHER):
                self._check_forms(found)
                made = int(self._kind.tokens(self._config, found, tokens).sum())
            if made != tokens:
                expected, got = f"{made} tokens of an image, as the model makes", f"{tokens} by its image processor"
                raise DataError(where, expected=expected, got=got, remedy=_OTHER)
            return {name: found[name] for name in self.columns}

        tokens = torch.tensor([tokens for _, tokens in files])
        if (places := int((ids == self.token).sum())) != int(tokens.sum()):
            expected = f"{int(tokens.sum())} tokens {self.token} for {counted(len(files), 'image')}, by their sizes"
            raise DataError(where, expected=expected, got=f"{places}", remedy=_OTHER)
        grids = {"image_grid_thw": torch.tensor([[1, *grid] for grid, _ in files])}
        return self._row(ids, tokens, grids, inputs, [0] * len(files), where)

    def work(self, row: RowImages) -> tuple[tuple[int, float], ...]:
        """Return the first token of each image of a row, and the work on it, as plans take them (`Images`)."""
        tokens = np.diff(row.ends, prepend=0)
        firsts = row.places[row.ends - tokens]
        return tuple((int(first), self._work_of(int(of))) for first, of in zip(firsts, tokens, strict=True))

    def _work_of(self, tokens: int) -> float:
        least = self.least_tokens
        return max(1, tokens // least) * self._tower.of(least) if least > 1 else self._tower.of(tokens)

    @property
    def least_tokens(self) -> int:
        """The number of which `empty` takes multiples."""
        return self._kind.least(self._config)

    def empty(self, tokens: int) -> MicrobatchImages:
        """Return images without content, of so many tokens together, for passes outside of training."""
        ids, given = np.full(tokens, self.token, dtype=np.int32), self._kind.empty(self._config, tokens)
        positions = self._positions(ids, given) if self._kind.has_axes else None
        return MicrobatchImages(inputs=given, features=torch.arange(tokens), positions=positions)

    def empty_work(self, tokens: int) -> float:
        """Return the work on the images of `empty`, as plans count it."""
        images = self._kind.tokens(self._config, self._kind.empty(self._config, tokens), tokens)
        return sum(self._work_of(int(each)) for each in images)

    def _row(
        self,
        ids: np.ndarray,
        tokens: Tensor,
        given: Mapping[str, Tensor],
        inputs: Callable[[int], Mapping[str, Tensor]],
        digests: Sequence[int],
        where: str,
    ) -> RowImages:
        places = np.flatnonzero(ids == self.token)
        if int(tokens.sum()) != len(places):
            expected = f"{len(places)} tokens for {counted(len(tokens), 'image')}"
            got = f"{int(tokens.sum())} tokens by {self.columns[-1]}"
            raise DataError(where, expected=expected, got=got, remedy=_CUT)
        ends, mutual = np.cumsum(tokens.numpy()), _runs(places) if self.mutual != "none" else ()
        return RowImages(
            inputs=inputs,
            places=places,
            ends=ends,
            positions=self._positions(ids, given) if self._kind.has_axes else None,
            digests=_of_runs(np.array(digests, dtype=np.uint64), places[ends - 1], mutual),
            mutual=mutual,
        )

    def _positions(self, ids: np.ndarray, given: Mapping[str, Tensor]) -> Tensor:
        tokens = torch.from_numpy(ids.astype(np.int64))[None]
        grids = given["image_grid_thw"]
        found, _ = self._model.get_rope_index(tokens, (tokens == self.token).int(), image_grid_thw=grids)
        return found[:, 0]

    def _digest(self, given: Mapping[str, Tensor], ends: np.ndarray, image: int) -> int:
        found = hashlib.sha256()
        for each in _of_image(given, ends, image).values():
            found.update(each.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return int.from_bytes(found.digest()[:8], "little") | 1

    def microbatch(
        self, rows: Mapping[int, RowImages], places: Sequence[tuple[int, int, int]]
    ) -> MicrobatchImages | None:
        """Return the images of a rank's segments (row, start, stop), in local order; None if no row has images.

        rows: images by row.
        """
        if not any(row in rows for row, _, _ in places):
            return None
        held = [_held(rows[row], start, stop) if row in rows else range(0) for row, start, stop in places]
        needed = sorted(
            {(row, image) for row, start, stop in places if row in rows for image in rows[row].within(start, stop)}
        )
        parts, first, firsts = list[Mapping[str, Tensor]](), 0, dict[tuple[int, int], int]()
        for row, image in needed:
            parts.append(rows[row].inputs(image))
            firsts[row, image] = first - _start(rows[row].ends, image)
            first += int(rows[row].ends[image]) - _start(rows[row].ends, image)
        features = [
            feature + firsts[row, _image_of(rows[row], feature)]
            for (row, _, _), each in zip(places, held, strict=True)
            for feature in each
        ]
        return MicrobatchImages(
            inputs={name: joined_images([each[name] for each in parts], name) for name in self.columns if parts},
            features=torch.tensor(features, dtype=torch.long),
            positions=self._of_segments(rows, places) if self._kind.has_axes else None,
        )

    @staticmethod
    def _of_segments(rows: Mapping[int, RowImages], places: Sequence[tuple[int, int, int]]) -> Tensor:
        axes = next(len(row.positions) for row in rows.values() if row.positions is not None)
        found = list[Tensor]()
        for row, start, stop in places:
            positions = rows[row].positions if row in rows else None
            plain = torch.arange(start, stop).expand(axes, -1)
            found.append(plain if positions is None else positions[:, start:stop])
        return torch.cat(found, dim=-1)


def _runs(places: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Return the spans (start, stop) of neighbours among ascending places."""
    borders = np.flatnonzero(np.diff(places) > 1) + 1
    return tuple((int(each[0]), int(each[-1]) + 1) for each in np.split(places, borders))


def _of_runs(digests: np.ndarray, lasts: np.ndarray, mutual: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return a digest an image, of all images in its mutual span. lasts: last token of each image."""
    found = digests.copy()
    for start, stop in mutual:
        those = (start <= lasts) & (lasts < stop)
        if those.sum() > 1:
            joined = hashlib.sha256(digests[those].tobytes()).digest()
            found[those] = int.from_bytes(joined[:8], "little") | 1
    return found


def _held(row: RowImages, start: int, stop: int) -> range:
    """Return which of the row's image tokens lie between two tokens."""
    first, last = np.searchsorted(row.places, (start, stop))
    return range(int(first), int(last))


def _image_of(row: RowImages, feature: int) -> int:
    return int(np.searchsorted(row.ends, feature, side="right"))


def _start(ends: np.ndarray, image: int) -> int:
    return int(ends[image - 1]) if image else 0


def _of_image(inputs: Mapping[str, Tensor], pixels: np.ndarray, image: int) -> dict[str, Tensor]:
    """Return the inputs of one image. pixels: entries of `pixel_values` up to the end of each."""
    own = slice(_start(pixels, image), int(pixels[image]))
    return {name: each[own] if name == PIXELS else each[image : image + 1] for name, each in inputs.items()}


def joined_images(parts: Sequence[Tensor], name: str) -> Tensor:
    """Join a column of images; those of different rows are padded to the largest."""
    filled = NO_PATCH if name == PATCHES else 0
    sizes = [max(each) for each in zip(*(part.shape[1:] for part in parts), strict=True)]
    if any(list(part.shape[1:]) != sizes for part in parts):
        beyond = [[(0, most - size) for size, most in zip(part.shape[1:], sizes, strict=True)] for part in parts]
        parts = [
            F.pad(part, [number for pair in reversed(each) for number in pair], value=filled)
            for part, each in zip(parts, beyond, strict=True)
        ]
    return torch.cat(list(parts))


def trains_on_images(config: Any) -> bool:
    """Return whether rows with images train with models of this config."""
    return getattr(config, "model_type", "") in KINDS


def refuse_image_files(config: Any, where: str) -> None:
    """Refuse a row of a run file with images, unless rows with images train with the model of this config.

    Raises:
        DataError: they do not.
    """
    if not trains_on_images(config):
        known, remedy = ", ".join(KINDS), "Train on rows of text."
        got = f"one with images, for {getattr(config, 'model_type', 'this model')}"
        raise DataError(where, expected=f"a row of text, or a model of {known}", got=got, remedy=remedy)


def image_reader(model: Any) -> ImageReader | None:
    """Return the reader of a model's images, None if its rows with images do not train."""
    whole = whole_model(model)
    is_here = not any(each.is_meta for each in left_alone(model).values())  # of a stored model rank 0 has the tower
    return ImageReader(model) if sees_images(whole) and is_here else None


def sees_images(whole: Any) -> bool:
    """Return whether rows with images train, with a model whose tower is here."""
    config: Any = getattr(whole, "config", None)
    # Earlier versions of Transformers would take the features for an argument that nothing reads.
    return (
        has_towers(config)
        and config.model_type in KINDS
        and FEATURES in inspect.signature(whole.model.forward).parameters
    )
