"""How rows of each family carry images: columns, tokens, patches, and which tokens see each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PIXELS = "pixel_values"
PATCHES, NO_PATCH = "image_position_ids", -1  # places of patches, and of none, in Gemma 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageKind:
    """How rows of a family carry images.

    beside: column with one entry an image, None if `pixel_values` has one. pixels: entries of `pixel_values` an image.
    tokens: tokens of each image. patches: patches a token. empty: columns of images without content, of so many tokens
    together, which are a multiple of `least`. varies: True if images have any size in pixels. is_masked: True if the
    tower masks the pairs of patches of all images of a call, so that each image gets a call. has_axes: True if
    positions have several axes. mutual: layers in which the tokens of images that nothing parts see each other in both
    directions: "all", "windows" or "none".
    """

    beside: str | None
    pixels: Callable[[Mapping[str, Tensor]], Tensor]
    tokens: Callable[[Any, Mapping[str, Tensor], int], Tensor]
    patches: Callable[[Any], float]
    empty: Callable[[Any, int], dict[str, Tensor]]
    least: Callable[[Any], int] = lambda _config: 1
    varies: bool = False
    is_masked: bool = False
    has_axes: bool = False
    mutual: Callable[[Any], str] = lambda _config: "none"


def _ones(inputs: Mapping[str, Tensor]) -> Tensor:
    return torch.ones(len(inputs[PIXELS]), dtype=torch.long)


def _sides(tokens: int) -> tuple[int, int]:
    """Return two sides of so many tokens, as near to a square as their product allows."""
    height = next(each for each in range(math.isqrt(tokens), 0, -1) if tokens % each == 0)
    return height, tokens // height


# Qwen: patches of all images in one list, and a grid an image.


def _of_grid(config: Any, inputs: Mapping[str, Tensor], _tokens: int) -> Tensor:
    return inputs["image_grid_thw"].prod(-1) // config.vision_config.spatial_merge_size**2


def _empty_grid(config: Any, tokens: int) -> dict[str, Tensor]:
    vision = config.vision_config
    merge, (height, width) = vision.spatial_merge_size, _sides(tokens)
    entries = getattr(vision, "in_channels", 3) * vision.temporal_patch_size * vision.patch_size**2
    grid = torch.tensor([[1, merge * height, merge * width]])
    return {PIXELS: torch.zeros(int(grid.prod()), entries), "image_grid_thw": grid}


# Mistral 3: padded images, and the sizes of each.


def _of_sizes(config: Any, inputs: Mapping[str, Tensor], _tokens: int) -> Tensor:
    return (inputs["image_sizes"] // (config.vision_config.patch_size * config.spatial_merge_size)).prod(-1)


def _empty_size(config: Any, tokens: int) -> dict[str, Tensor]:
    size = torch.tensor([_sides(tokens)]) * config.vision_config.patch_size * config.spatial_merge_size
    return {PIXELS: torch.zeros(1, 3, *size[0].tolist()), "image_sizes": size}


# InternVL: tiles of one size. Gemma 3: images of one size.


def _of_tiles(config: Any, inputs: Mapping[str, Tensor], _tokens: int) -> Tensor:
    return torch.full((len(inputs[PIXELS]),), _of_tile(config, inputs[PIXELS].shape[-2:]))


def _of_tile(config: Any, size: Sequence[int] | None = None) -> int:
    """Return the tokens of a tile, by default of the size that the tower was made for."""
    (height, width), patch = size or config.vision_config.image_size, config.vision_config.patch_size
    return int(height // patch[0] * (width // patch[1]) * config.downsample_ratio**2)


def _empty_tiles(config: Any, tokens: int) -> dict[str, Tensor]:
    return {PIXELS: torch.zeros(tokens // _of_tile(config), 3, *config.vision_config.image_size)}


def _of_config(config: Any, inputs: Mapping[str, Tensor], _tokens: int) -> Tensor:
    return torch.full((len(inputs[PIXELS]),), config.mm_tokens_per_image)


def _of_side(config: Any) -> float:
    return (config.vision_config.image_size / config.vision_config.patch_size) ** 2 / config.mm_tokens_per_image


def _empty_squares(config: Any, tokens: int) -> dict[str, Tensor]:
    side = config.vision_config.image_size
    return {PIXELS: torch.zeros(tokens // config.mm_tokens_per_image, 3, side, side)}


# Gemma 4: padded lists of patches, and the places of each.


def _of_patches(config: Any, inputs: Mapping[str, Tensor], _tokens: int) -> Tensor:
    patches = (inputs[PATCHES] != NO_PATCH).all(-1).sum(-1)
    return patches // config.vision_config.pooling_kernel_size**2


def _empty_patches(config: Any, tokens: int) -> dict[str, Tensor]:
    vision, of_image = config.vision_config, math.gcd(tokens, 16)
    height, width = (torch.arange(vision.pooling_kernel_size * each) for each in _sides(of_image))
    places = torch.cartesian_prod(height, width).flip(-1).repeat(tokens // of_image, 1, 1)
    return {PIXELS: torch.zeros(*places.shape[:2], 3 * vision.patch_size**2), PATCHES: places}


def _in_windows(config: Any) -> str:
    return "windows" if config.text_config.use_bidirectional_attention == "vision" else "none"


GRIDS = ImageKind(
    beside="image_grid_thw",
    pixels=lambda inputs: inputs["image_grid_thw"].prod(-1),
    tokens=_of_grid,
    patches=lambda config: config.vision_config.spatial_merge_size**2,
    empty=_empty_grid,
    has_axes=True,
)
KINDS = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), GRIDS),
    "mistral3": ImageKind(
        beside="image_sizes",
        pixels=_ones,
        tokens=_of_sizes,
        patches=lambda config: config.spatial_merge_size**2,
        empty=_empty_size,
        varies=True,
        is_masked=True,
    ),
    "internvl": ImageKind(
        beside=None,
        pixels=_ones,
        tokens=_of_tiles,
        patches=lambda config: config.downsample_ratio**-2,
        empty=_empty_tiles,
        least=_of_tile,
        varies=True,
    ),
    "gemma3": ImageKind(
        beside=None,
        pixels=_ones,
        tokens=_of_config,
        patches=_of_side,
        empty=_empty_squares,
        least=lambda config: config.mm_tokens_per_image,
        mutual=lambda _config: "all",
    ),
    "gemma4": ImageKind(
        beside=PATCHES,
        pixels=_ones,
        tokens=_of_patches,
        patches=lambda config: config.vision_config.pooling_kernel_size**2,
        empty=_empty_patches,
        mutual=_in_windows,
    ),
}
IMAGE_FAMILIES = tuple(KINDS)
"""Families whose rows with images train, by `model_type`."""
IMAGE_COLUMNS = (PIXELS, *sorted({kind.beside for kind in KINDS.values() if kind.beside is not None}))
"""Columns of a row that hold images, not one value per token."""
