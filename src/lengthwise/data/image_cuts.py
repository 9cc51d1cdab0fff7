"""How the processor of each family cuts an image into patches, and what it writes for it, from the size of the image.

Whole processors of transformers need torchvision; their image processors and settings, which are read here, do not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCut:
    """What a processor makes of images.

    grid: function of height and width in pixels that returns (rows, columns) of patches, or, of families with tiles of
    one size, (tiles, tokens of each). made: function of an image processor's columns that returns the grid of their
    image. side: patches along the side of a token. pixels: pixels of a patch. token: word of an image's tokens.
    rewrite: word that a chat template writes for an image, and what stands in its place before `token` is repeated.
    ends: words after each line of an image's tokens, and after the last one. options: arguments of each call of the
    image processor.
    """

    grid: Callable[[int, int], tuple[int, int]]
    made: Callable[[Mapping[str, Any]], Sequence[int]]
    side: int = 1
    pixels: float
    token: str
    rewrite: tuple[str, str] = ("", "")
    ends: tuple[str, str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def lines(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Return lines of an image's tokens, and tokens a line."""
        return grid[0] // self.side, grid[1] // self.side


def image_cut(processor: Any, settings: Mapping[str, Any], tokenizer: Any) -> ImageCut:
    """Return how a model's image processor cuts images.

    settings: of its whole processor, as in `processor_config.json`. ValueError: rows of its family do not train from
    files, or the tokenizer has no word for images.
    """
    name = type(processor).__name__
    family = name.removesuffix("Pil").removesuffix("Fast")
    if family not in _FAMILIES:
        raise ValueError(f"{name}: in run files images train with {', '.join(sorted(_FAMILIES))}")
    return _FAMILIES[family](processor, settings, tokenizer)


def _of_module(processor: Any, name: str) -> Any:
    return getattr(sys.modules[type(processor).__module__], name)


def _word(tokenizer: Any, name: str, usual: str | None = None) -> str:
    found = getattr(tokenizer, name, None) or usual
    if found is None:
        raise ValueError(f"a tokenizer without {name}")
    return found


def _qwen(processor: Any, _settings: Mapping[str, Any], tokenizer: Any) -> ImageCut:
    patch, merge = processor.patch_size, processor.merge_size
    limits = {"min_pixels": processor.size["shortest_edge"], "max_pixels": processor.size["longest_edge"]}
    resized, token = _of_module(processor, "smart_resize"), _word(tokenizer, "image_token", "<|image_pad|>")

    def grid(height: int, width: int) -> tuple[int, int]:
        rows, columns = resized(height, width, factor=patch * merge, **limits)
        return rows // patch, columns // patch

    pixels = processor.temporal_patch_size * patch**2
    return ImageCut(
        grid=grid,
        made=lambda found: found["image_grid_thw"][0, 1:].tolist(),
        side=merge,
        pixels=pixels,
        token=token,
    )


def _mistral(processor: Any, settings: Mapping[str, Any], _tokenizer: Any) -> ImageCut:
    merge, patch = settings.get("spatial_merge_size", 1), settings.get("patch_size", 16)
    patch = patch["height"] if isinstance(patch, Mapping) else patch
    size, token = processor.size, settings.get("image_token", "[IMG]")
    most = (size["longest_edge"],) * 2 if size.get("longest_edge") else (size["height"], size["width"])
    resized, step = _of_module(processor, "get_resize_output_image_size"), (merge * patch, merge * patch)

    def grid(height: int, width: int) -> tuple[int, int]:
        import numpy as np

        shape = np.broadcast_to(np.zeros((), dtype=np.uint8), (3, height, width))  # takes no memory
        rows, columns = resized(shape, size=most, patch_size=step, input_data_format="channels_first")
        return rows // patch, columns // patch

    ends = settings.get("image_break_token", "[IMG_BREAK]"), settings.get("image_end_token", "[IMG_END]")
    return ImageCut(
        grid=grid,
        made=lambda found: (found["image_sizes"][0] // patch).tolist(),
        side=merge,
        pixels=patch**2,
        token=token,
        ends=ends,
        options={"patch_size": merge * patch},
    )


def _intern(processor: Any, settings: Mapping[str, Any], tokenizer: Any) -> ImageCut:
    tokens, token = settings.get("image_seq_length", 256), _word(tokenizer, "context_image_token")
    options = {"crop_to_patches": True}  # whatever its files say, as the whole processor does without being asked
    return ImageCut(
        grid=lambda height, width: (processor.get_number_of_image_patches(height, width, options), tokens),
        made=lambda found: (len(found["pixel_values"]), tokens),
        pixels=processor.size["height"] * processor.size["width"] / tokens,
        token=token,
        rewrite=(token, _word(tokenizer, "start_image_token") + token + _word(tokenizer, "end_image_token")),
        options=options,
    )


def _gemma3(processor: Any, settings: Mapping[str, Any], tokenizer: Any) -> ImageCut:
    tokens = settings.get("image_seq_length", 256)
    token, begin = _word(tokenizer, "image_token"), _word(tokenizer, "boi_token")
    return ImageCut(
        grid=lambda _height, _width: (1, tokens),
        made=lambda found: (len(found["pixel_values"]), tokens),
        pixels=processor.size["height"] * processor.size["width"] / tokens,
        token=token,
        rewrite=(begin, f"\n\n{begin}{token}{_word(tokenizer, 'eoi_token')}\n\n"),
        options={"do_pan_and_scan": False},  # whatever its files say, as the whole processor does without being asked
    )


def _gemma4(processor: Any, _settings: Mapping[str, Any], tokenizer: Any) -> ImageCut:
    patch, pool = processor.patch_size, processor.pooling_kernel_size
    resized = _of_module(processor, "get_aspect_ratio_preserving_size")

    def grid(height: int, width: int) -> tuple[int, int]:
        limits = {"max_patches": processor.max_soft_tokens * pool**2, "pooling_kernel_size": pool}
        rows, columns = resized(height, width, patch_size=patch, **limits)
        return rows // patch, columns // patch

    token = _word(tokenizer, "image_token")
    return ImageCut(
        grid=grid,
        made=lambda found: (found["image_position_ids"][0].flip(-1).amax(0) + 1).tolist(),
        side=pool,
        pixels=patch**2,
        token=token,
        rewrite=(token, _word(tokenizer, "boi_token") + token + _word(tokenizer, "eoi_token")),
    )


_FAMILIES: Mapping[str, Callable[[Any, Mapping[str, Any], Any], ImageCut]] = {
    "Qwen2VLImageProcessor": _qwen,
    "PixtralImageProcessor": _mistral,
    "GotOcr2ImageProcessor": _intern,  # InternVL's
    "Gemma3ImageProcessor": _gemma3,
    "Gemma4ImageProcessor": _gemma4,
}
