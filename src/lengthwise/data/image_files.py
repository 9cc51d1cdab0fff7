"""Images of rows, as files: measured when rows are read, decoded by the rank that needs their pixels.

A row keeps the path of an image, a digest of the file and its patches, never its pixels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lengthwise.core.errors import ConfigError, DataError
from lengthwise.core.hub_access import only_cached
from lengthwise.core.names import counted
from lengthwise.data.dataset import NO_LOSS
from lengthwise.data.files import content_of
from lengthwise.data.image_cuts import image_cut
from lengthwise.data.image_store import is_kept

_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # of EXIF: width and height are exchanged
_AHEAD_BYTES, _THREADS = 256 << 20, 2  # of images decoded ahead by a rank
_OF_PROCESSOR = ("preprocessor_config.json", "processor_config.json")


class ImageFile(NamedTuple):
    """An image of a row. content: digest of size and both ends of the file. grid: patches, as in `ImageCut`."""

    path: str
    content: str
    grid: tuple[int, int]

    @property
    def identity(self) -> bytes:
        """What the digest of a row has of it: not its path."""
        return json.dumps([self.content, self.grid]).encode()


class ImageProcessor:
    """The image processor of a model, from a folder or the hub. tokenizer: its tokenizer of transformers."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        """Load it. ValueError: there is none, or it is of a family whose rows do not train from files.

        Raises:
            ConfigError: Pillow is not installed, which is no fault of a row.
        """
        if find_spec("PIL") is None:
            expected, remedy = "the package pillow, to read images", "Install it: pip install pillow."
            raise ConfigError("data with images", expected=expected, got="none", remedy=remedy)
        from transformers import AutoImageProcessor

        is_local: Any = only_cached(name)
        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(
                name, local_files_only=is_local, trust_remote_code=False
            )
            texts = processor_files(name)
            settings: dict[str, Any] = {key: value for text in texts for key, value in json.loads(text).items()}
        except Exception as error:  # noqa: BLE001 - of files from outside
            got = " ".join(str(error).split())[:200]
            raise ValueError(f"no image processor at {name}: {type(error).__name__}: {got}") from None
        try:
            self.cut = image_cut(self._processor, settings, tokenizer)
        except (TypeError, KeyError, AttributeError, ArithmeticError) as error:  # of files from outside
            raise ValueError(f"settings of images at {name}: {type(error).__name__}: {error}") from None
        words = [self.cut.token, *(self.cut.ends or ())]
        self.token, *self._ends = ids = tokenizer.convert_tokens_to_ids(words)
        if tokenizer.convert_ids_to_tokens(ids) != words:
            raise ValueError(f"a tokenizer that has not all of {', '.join(words)}")

    def find(self, path: str, where: str) -> ImageFile:
        """Return the image at a path, by the begin of its file. DataError, of row `where`: there is none."""
        try:
            content = json.dumps(content_of(Path(path)))
            with _opened(path) as image:
                width, height = image.size
                # A PNG without it in its head would be decoded; one that has it at its end is found when it is
                is_known = image.format != "PNG" or any("exif" in str(name) for name in image.info)
                if is_known and image.getexif().get(_ORIENTATION) in _TURNED:
                    width, height = height, width
            rows, columns = self.cut.grid(height, width)
            if min(self.cut.lines((rows, columns))) < 1:
                raise ValueError(f"{width} x {height} pixels, of which the model's processor keeps none")
            return ImageFile(path, content, (int(rows), int(columns)))
        except Exception as error:  # noqa: BLE001 - of files of many formats
            remedy = "Correct the path or the file, or {skip_bad|set `bad_rows: skip`} to leave such rows out."
            raise _unreadable(path, where, error, remedy) from None

    def expanded(
        self, ids: np.ndarray, labels: np.ndarray, images: Sequence[ImageFile]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Repeat the token of each image by its number of tokens, without a loss, as the model's processor does.

        ids, labels: int32 [tokens]. ValueError: the template, or a text, has written another number of places.
        """
        places = np.flatnonzero(ids == self.token)
        if len(places) != len(images):
            wrote = counted(len(places), "place")
            raise ValueError(f"{wrote} of images by template and texts, and {counted(len(images), 'image')}")
        labels = labels.copy()
        labels[places] = NO_LOSS
        tokens = [self._tokens(each) for each in images]
        losses = [np.full(len(each), NO_LOSS, dtype=np.int32) for each in tokens]
        return _replaced(ids, places, tokens), _replaced(labels, places, losses)

    def _tokens(self, image: ImageFile) -> np.ndarray:
        """Return the ids of an image, int32: lines of its token, with what ends a line."""
        lines, width = self.cut.lines(image.grid)
        ids = np.full((lines, width + bool(self._ends)), self.token, dtype=np.int32)
        if self._ends:
            ids[:, -1] = self._ends[0]
            ids[-1, -1] = self._ends[1]
        return ids.reshape(-1)

    def num_tokens(self, image: ImageFile) -> int:
        """Return the number of tokens of an image that the tower fills."""
        lines, width = self.cut.lines(image.grid)
        return lines * width

    def num_bytes(self, image: ImageFile) -> int:
        """Return the bytes of an image's pixels, in fp32."""
        return int(4 * 3 * self.cut.pixels * image.grid[0] * image.grid[1])

    def columns(self, image: ImageFile, where: str) -> Mapping[str, Any]:
        """Decode an image of row `where`; return the columns of it, as the image processor gives them.

        Raises:
            DataError: the file is broken, or is not the one that the rows were made with.
        """
        from transformers.image_utils import load_image

        try:
            if json.dumps(content_of(Path(image.path))) != image.content:
                raise ValueError("another file than the one that this row was tokenized with")
            with _opened(image.path) as opened:
                found = self._processor(images=[load_image(opened)], return_tensors="pt", **self.cut.options)
            if tuple(self.cut.made(found)) != image.grid:
                raise ValueError(f"patches {self.cut.made(found)}, and {image.grid} when it was tokenized")
        except Exception as error:  # noqa: BLE001 - of files of many formats
            raise _unreadable(image.path, where, error, "Put the file back, or take the row out.") from None
        return found


def _replaced(values: np.ndarray, places: np.ndarray, by: Sequence[np.ndarray]) -> np.ndarray:
    """Return values, int32 [tokens], with an array in place of each of some entries."""
    firsts = [0, *(places + 1).tolist()]
    kept = [values[first:last] for first, last in zip(firsts, [*places.tolist(), len(values)], strict=True)]
    return np.concatenate([kept[0], *(each for pair in zip(by, kept[1:], strict=True) for each in pair)])


class PixelsAhead:
    """Decodes images in threads before they are asked for, as long as they have fewer than some bytes together."""

    def __init__(self, processor: ImageProcessor) -> None:
        self.processor, self._pool = processor, ThreadPoolExecutor(_THREADS, thread_name_prefix="images")
        self._made = dict[ImageFile, Future[Any]]()
        self._bytes = 0

    def begin(self, images: Sequence[ImageFile], where: str) -> None:
        """Begin to decode images of row `where`, and return at once."""
        for each in images:
            num_bytes = self.processor.num_bytes(each)
            if each not in self._made and self._bytes + num_bytes <= _AHEAD_BYTES:
                self._bytes += num_bytes
                self._made[each] = self._pool.submit(self.processor.columns, each, where)

    def take(self, image: ImageFile, where: str) -> Mapping[str, Any]:
        """Return the columns of an image, and forget them; see `ImageProcessor.columns`."""
        made = self._made.pop(image, None)
        if made is None:
            return self.processor.columns(image, where)
        self._bytes -= self.processor.num_bytes(image)
        return made.result()


def _opened(path: str) -> Any:
    """Open an image of any format but EPS, for which Pillow would run Ghostscript."""
    from PIL import Image

    Image.init()
    return Image.open(path, formats=[each for each in Image.OPEN if each != "EPS"])


def processor_files(name: str, files: Sequence[str] = _OF_PROCESSOR) -> list[str]:
    """Return the texts of a model's files, by default those for its image processor; [] without any."""
    from transformers.utils import cached_file

    options: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False, "local_files_only": only_cached(name)}
    found = [cached_file(name, each, **options) for each in files]
    return [Path(each).read_text(encoding="utf-8") for each in found if each is not None]


def _unreadable(path: str, where: str, error: Exception, remedy: str) -> DataError:
    said = error.got if isinstance(error, DataError) else " ".join(str(error).split())[:200]
    expected, path = (
        "an image that can be read, the same in the whole run",
        "one inside of it" if is_kept(path) else path,
    )
    return DataError(where, expected=expected, got=f"{path}: {said or type(error).__name__}", remedy=remedy)
