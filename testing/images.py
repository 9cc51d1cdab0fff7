"""Tiny models that see images, and rows with images of many sizes, as processors give them."""

from __future__ import annotations

import inspect
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import SkipTest

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.pixtral import image_processing_pil_pixtral
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
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
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


def image_model(family: str, dtype: torch.dtype = torch.float64, *, vocab: int = VOCAB, image: int = IMAGE) -> Any:
    """Return a tiny model of a family, the same values each time; its text part alone requires gradients.

    image: id of the tokens of images.
    """
    with torch.random.fork_rng():
        torch.manual_seed(3)
        text: dict[str, Any] = {"vocab_size": vocab}
        others: dict[str, Any] = {"image_token_id": image}
        if family == "mistral3":  # as released ones; else no answer of a run would see its images
            text["sliding_window"] = None
        if family == "gemma4":  # with a tower for images alone
            text |= {"vocab_size_per_layer_input": vocab, "use_bidirectional_attention": "vision"}
            text |= {"num_kv_shared_layers": 0}  # else no loss sees what images see in full layers
            others |= {"audio_config": None}
        config = tiny_tower_config(family, TEXTS[family], text, **others)
        vision = config.vision_config
        if family == "qwen2_vl":
            vision.hidden_size = config.text_config.hidden_size
        if family == "gemma3":
            config.mm_tokens_per_image = 4  # two images that touch are more than a window
            vision.vision_use_head = False  # as in released ones
        if family == "gemma4":
            vision.pooling_kernel_size, vision.position_embedding_size = 2, 64
        if family.startswith("qwen3_vl"):
            vision.depth, vision.deepstack_visual_indexes = 3, [0, 1]
        how = {"attn_implementation": "sdpa", "experts_implementation": "eager", "dtype": dtype}
        made: Any = AutoModelForImageTextToText.from_config(config, **how)
    model: Any = enliven(made.train())
    if family == "gemma3":  # whose projection begins as zeros
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, generator=torch.Generator())
    if family == "gemma4":  # whose own pooling makes fp32 of whole numbers
        model.model.vision_tower.pooler._avg_pool_by_positions = _pooled
    language = {id(each) for part in (model.get_decoder(), model.get_output_embeddings()) for each in part.parameters()}
    for each in model.parameters():
        each.requires_grad_(id(each) in language)
    return model


def _pooled(hidden: Tensor, places: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the means of squares of 2 x 2 patches, (images, length, size), and which of them are none of padding."""
    places = places.clamp(min=0)
    width = places[..., 0].amax(-1, keepdim=True) // 2 + 1
    squares = places[..., 0] // 2 + width * (places[..., 1] // 2)
    found = hidden.new_zeros(len(hidden), length, hidden.shape[-1])
    found.scatter_add_(1, squares[..., None].expand_as(hidden), hidden / 4)
    return found, torch.arange(length) <= squares.amax(-1, keepdim=True)


def image_rows(model: Any, specs: list[list[int | tuple[int, int]]] = SPECS, seed: int = 0) -> list[dict[str, Tensor]]:
    """Return a row for each of `specs`; labels are the tokens of text.

    A token of text follows each image, but not in Gemma, where those that touch see each other.
    """
    generator, rows = torch.Generator().manual_seed(seed), list[dict[str, Tensor]]()
    for spec in specs:
        pixels, tokens = _images(model.config, [each for each in spec if isinstance(each, tuple)], generator)
        left, parts = iter(tokens), list[Tensor]()
        for each in spec:
            if isinstance(each, tuple):
                parts.append(torch.full((next(left),), IMAGE))
                if model.config.model_type.startswith("gemma"):
                    continue
            parts.append(torch.randint(1, 50, (1 if isinstance(each, tuple) else each,), generator=generator))
        ids = torch.cat(parts)
        kind = {"gemma3": "token_type_ids"}.get(model.config.model_type, "mm_token_type_ids")
        has_kinds = kind == "token_type_ids" or "image_grid_thw" in pixels or "image_position_ids" in pixels
        kinds = {kind: (ids == IMAGE).int()} if has_kinds else {}
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
    if config.model_type == "gemma3":
        pixels = draw(len(sizes), 3, vision.image_size, vision.image_size)
        return {"pixel_values": pixels}, [config.mm_tokens_per_image] * len(sizes)
    if config.model_type == "gemma4":
        most = max(h * w for h, w in sizes)
        places = torch.full((len(sizes), most, 2), -1)
        for place, (h, w) in zip(places, sizes, strict=True):
            place[: h * w] = torch.cartesian_prod(torch.arange(h), torch.arange(w)).flip(-1)
        pixels = draw(len(sizes), most, 3 * vision.patch_size**2)
        tokens = [h * w // vision.pooling_kernel_size**2 for h, w in sizes]
        return {"pixel_values": pixels, "image_position_ids": places}, tokens
    side, patch = vision.image_size[0], vision.patch_size[0]
    tokens = int((side // patch) ** 2 * config.downsample_ratio**2)
    return {"pixel_values": draw(len(sizes), 3, side, side)}, [tokens] * len(sizes)


_TURN = (
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>"
)
_MARKED = (
    f"{{% if m['role'] == 'assistant' %}}{{% generation %}}{_TURN}{{% endgeneration %}}{{% else %}}{_TURN}{{% endif %}}"
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\nTURN\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template as Qwen's; each family's writes another text for an image, Gemma 3's marks answers."""
_WRITTEN = {"mistral3": "[IMG]", "internvl": "<IMG>\n", "gemma3": "<|boi|>", "gemma4": "<IMG>"}
_WORDS = ["<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"]
_BESIDE = {  # the token of images, and further words
    "mistral3": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
    "internvl": ["<IMG>", "<|start|>", "<|end|>"],
    "gemma3": ["<IMG>", "<|boi|>", "<|eoi|>"],
    "gemma4": ["<IMG>", "<|boi|>", "<|eoi|>"],
}
_NAMES = {
    "internvl": ["context_image_token", "start_image_token", "end_image_token"],
    "gemma3": ["image_token", "boi_token", "eoi_token"],
    "gemma4": ["image_token", "boi_token", "eoi_token"],
}


def write_image_model(folder: Path, family: str = "qwen3_vl") -> Path:
    """Write a tiny model with its tokenizer of characters, and its image processor."""
    model = image_model(family, torch.float32)
    model.save_pretrained(folder)
    return write_image_processor(folder, family, model.config)


def write_image_processor(folder: Path, family: str = "qwen3_vl", config: Any = None) -> Path:
    """Write the tokenizer and the image processor. config: of the model, of families but Qwen's."""
    image_tokenizer(family).save_pretrained(folder)
    processor, settings = image_processor(family, config)
    if settings:  # as saved by the whole processor, which needs torchvision
        told = {"image_processor": {**processor.to_dict(), "image_processor_type": type(processor).__name__[:-3]}}
        (folder / "processor_config.json").write_text(json.dumps({**told, **settings}))
    else:
        processor.save_pretrained(folder)
    return folder


def image_tokenizer(family: str = "qwen3_vl") -> PreTrainedTokenizerFast:
    """Return a tokenizer of characters, in which the token of images is `IMAGE`."""
    letters = "?abcdefghijklmnopqrstuvwxyz .,!\n0123456789"
    words = {**{letter: number for number, letter in enumerate(letters)}}
    beside = _BESIDE.get(family, _WORDS[2:])
    words |= {word: IMAGE - 2 + number for number, word in enumerate([*_WORDS[:2], *beside])}
    tokens = Tokenizer(models.WordLevel(vocab=words, unk_token="?"))
    tokens.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    names = dict(zip(_NAMES.get(family, ()), beside, strict=False))
    found = PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token=_WORDS[1], unk_token="?", extra_special_tokens=names
    )
    found.add_special_tokens({"additional_special_tokens": [*_WORDS[:2], *beside]})
    template = TEMPLATE.replace("TURN", _MARKED if family == "gemma3" else _TURN)
    found.chat_template = template.replace("IMAGE", _WRITTEN.get(family, "<|vision_start|><|image_pad|><|vision_end|>"))
    return found


def add_images(tokenizer: Any, family: str) -> int:
    """Add a family's words of images to a tokenizer whose template is in `TEMPLATE`'s terms; return the image's id."""
    beside = _BESIDE.get(family, _WORDS[2:])
    tokenizer.add_special_tokens({"additional_special_tokens": beside})
    for name, word in zip(_NAMES.get(family, ()), beside, strict=False):
        setattr(tokenizer, name, word)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(word))
    written = _WRITTEN.get(family, "<|vision_start|><|image_pad|><|vision_end|>")
    tokenizer.chat_template = tokenizer.chat_template.replace("IMAGE", written)
    return tokenizer.convert_tokens_to_ids(beside[0])


def image_processor(family: str = "qwen3_vl", config: Any = None) -> tuple[Any, dict[str, Any]]:
    """Return an image processor, and the settings of its whole processor.

    Qwen's makes a token of 8 x 8 pixels of an image; those of others fit the model's config.
    """
    if family.startswith("qwen"):
        return Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=256, max_pixels=4096), {}
    vision = config.vision_config
    if family == "mistral3":
        merge = {"patch_size": vision.patch_size, "spatial_merge_size": config.spatial_merge_size}
        return image_processing_pil_pixtral.PixtralImageProcessorPil(size={"longest_edge": vision.image_size}), merge
    if family == "gemma4":
        made = Gemma4ImageProcessorPil(patch_size=vision.patch_size, pooling_kernel_size=vision.pooling_kernel_size)
        made.max_soft_tokens = 70
        return made, {"image_seq_length": 70}
    if family == "gemma3":
        size = {"height": vision.image_size, "width": vision.image_size}
        return Gemma3ImageProcessorPil(size=size), {"image_seq_length": config.mm_tokens_per_image}
    (height, width), patch = vision.image_size, vision.patch_size[0]
    tokens = int(height * width / patch**2 * config.downsample_ratio**2)
    made = GotOcr2ImageProcessorPil(size={"height": height, "width": width}, max_patches=4)
    return made, {"image_seq_length": tokens}


PROCESSORS = {
    "qwen3_vl": "qwen3_vl.Qwen3VLProcessor",
    "mistral3": "pixtral.PixtralProcessor",
    "internvl": "internvl.InternVLProcessor",
    "gemma3": "gemma3.Gemma3Processor",
    "gemma4": "gemma4.Gemma4Processor",
}
"""Module and class of each family's whole processor."""


def whole_processor(family: str, config: Any, tokenizer: Any = None) -> Any:
    """Return the whole processor of a model of a config, without videos and sounds, which need torchvision.

    tokenizer: with the family's words of images (default: `image_tokenizer`'s).

    Skips the test where this version of transformers makes the family's with torchvision alone.
    """
    made, settings = image_processor(family, config)
    module, name = PROCESSORS[family].split(".")
    sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", image_processing_pil_pixtral)
    try:
        plain: Any = getattr(import_module(f"transformers.models.{module}.processing_{module}"), name)
    except ImportError as error:
        raise SkipTest(str(error)) from None
    tokenizer = tokenizer or image_tokenizer(family)
    tokenizer.video_token, tokenizer.pad_token = "<video>", tokenizer.pad_token or tokenizer.eos_token  # never written
    given = {"image_processor": made, "tokenizer": tokenizer, "video_processor": None, "feature_extractor": None}
    given |= {**settings, "chat_template": tokenizer.chat_template}
    names = inspect.signature(plain.__init__).parameters
    whole = type(name, (plain,), {"check_argument_for_proper_class": lambda _self, _name, argument: type(argument)})
    found: Any = whole(**{key: value for key, value in given.items() if key in names})
    for key in ("audio_token", "boa_token", "eoa_token"):
        setattr(found, key, "<audio>")
    if family == "qwen3_vl":
        found.video_token = None
    return found
