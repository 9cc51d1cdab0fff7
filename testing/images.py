"""Tiny models that see images, and rows with images of many sizes, as processors give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from testing.families import enliven
from testing.small import VOCAB
from testing.towers import tiny_tower_config

IMAGE = 60  # id of the tokens of images; text has lower ids
TEXTS = {
    **{
        name: f"{name}_text"
        for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
    },
    "mistral3": "mistral",
    "internvl": "qwen3",
}
"""The text part of each family whose rows with images train."""
SPECS: list[list[int | tuple[int, int]]] = [  # tokens of text, and images of patches
    [5, (4, 4), 7, (2, 6), 9],
    [3],
    [2, (4, 6), 30],
    [(4, 2), (4, 4), 6],
    [41],
    [1, (8, 8), 3],
]


def image_model(family: str, dtype: torch.dtype = torch.float64) -> Any:
    """Return a tiny model of a family, with a frozen tower; the same values each time."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = tiny_tower_config(family, TEXTS[family], {"vocab_size": VOCAB}, image_token_id=IMAGE)
        vision = config.vision_config
        if family == "qwen2_vl":
            vision.hidden_size = config.text_config.hidden_size
        if family.startswith("qwen3_vl"):
            vision.depth, vision.deepstack_visual_indexes = 3, [0, 1]
        how = {"attn_implementation": "sdpa", "experts_implementation": "eager", "dtype": dtype}
        made: Any = AutoModelForImageTextToText.from_config(config, **how)
    model: Any = enliven(made.train())
    language = {id(each) for part in (model.get_decoder(), model.get_output_embeddings()) for each in part.parameters()}
    for each in model.parameters():
        each.requires_grad_(id(each) in language)
    return model


def image_rows(model: Any, specs: list[list[int | tuple[int, int]]] = SPECS, seed: int = 0) -> list[dict[str, Tensor]]:
    """Return a row for each of `specs`; labels are the tokens of text."""
    generator, rows = torch.Generator().manual_seed(seed), list[dict[str, Tensor]]()
    for spec in specs:
        pixels, tokens = _images(model.config, [each for each in spec if isinstance(each, tuple)], generator)
        left, parts = iter(tokens), list[Tensor]()
        for each in spec:
            if isinstance(each, tuple):
                parts.append(torch.full((next(left),), IMAGE))
            parts.append(torch.randint(1, 50, (1 if isinstance(each, tuple) else each,), generator=generator))
        ids = torch.cat(parts)
        kinds = {"mm_token_type_ids": (ids == IMAGE).int()} if "image_grid_thw" in pixels else {}
        rows.append({"input_ids": ids, "labels": torch.where(ids == IMAGE, -100, ids), **pixels, **kinds})
    return rows


def _images(
    config: Any, sizes: list[tuple[int, int]], generator: torch.Generator
) -> tuple[dict[str, Tensor], list[int]]:
    """Return what a processor gives of images of some patches, and the tokens of each."""
    vision = config.vision_config

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if not sizes:
        return {}, []
    if config.model_type.startswith("qwen"):
        grids = torch.tensor([[1, *size] for size in sizes])
        entries = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        pixels = draw(int(grids.prod(-1).sum()), entries)
        return {"pixel_values": pixels, "image_grid_thw": grids}, [
            h * w // vision.spatial_merge_size**2 for h, w in sizes
        ]
    if config.model_type == "mistral3":
        in_pixels = torch.tensor(sizes) * vision.patch_size
        pixels = draw(len(sizes), 3, *in_pixels.amax(0).tolist())
        tokens = [h * w // config.spatial_merge_size**2 for h, w in sizes]
        return {"pixel_values": pixels, "image_sizes": in_pixels}, tokens
    side, patch = vision.image_size[0], vision.patch_size[0]
    tokens = int((side // patch) ** 2 * config.downsample_ratio**2)
    return {"pixel_values": draw(len(sizes), 3, side, side)}, [tokens] * len(sizes)


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template as Qwen's."""
_WORDS = ["<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"]


def write_image_model(folder: Path, family: str = "qwen3_vl") -> Path:
    """Write a tiny model with its tokenizer of characters, and its image processor."""
    image_model(family, torch.float32).save_pretrained(folder)
    return write_image_processor(folder)


def write_image_processor(folder: Path) -> Path:
    """Write the tokenizer and the image processor."""
    image_tokenizer().save_pretrained(folder)
    image_processor().save_pretrained(folder)
    return folder


def image_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of characters, in which the token of images is `IMAGE`."""
    letters = "?abcdefghijklmnopqrstuvwxyz .,!\n0123456789"
    words = {**{letter: number for number, letter in enumerate(letters)}}
    words |= {word: IMAGE - 2 + number for number, word in enumerate(_WORDS)}
    tokens = Tokenizer(models.WordLevel(vocab=words, unk_token="?"))
    tokens.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    found = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=_WORDS[1], unk_token="?")
    found.add_special_tokens({"additional_special_tokens": _WORDS})
    found.chat_template = TEMPLATE
    return found


def image_processor() -> Qwen2VLImageProcessorPil:
    """Return a processor that makes a token of 8 x 8 pixels of an image."""
    return Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=256, max_pixels=4096)
