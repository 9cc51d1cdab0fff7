"""Chats and preference pairs for TRL's trainers, and a tokenizer of bytes."""

import copy
import random
from functools import cache

import datasets
import numpy as np
import torch
from peft import LoraConfig
from PIL import Image
from testing import enliven, tiny_family_config, tiny_tower_config
from testing.small import small_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers import trainers as tokenizer_trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    Gemma3Processor,
    PreTrainedTokenizerFast,
    Qwen3VLProcessor,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<user>{{ m['content'] }}"
    "{% else %}<assistant>{% generation %}{{ m['content'] }}<eos>{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@cache
def tokenizer():
    """Return a tokenizer of bytes with a chat template."""
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    special = ["<pad>", "<eos>", "<user>", "<assistant>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizer_trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokens.train_from_iterator(["the quick brown fox"], trainer)
    found = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>")
    found.chat_template = TEMPLATE
    return found


def model(dtype=torch.float32, **changes):
    """Return a small model of the tokenizer's vocabulary."""
    return small_model(dtype, vocab_size=len(tokenizer()), pad_token_id=0, eos_token_id=1, bos_token_id=None, **changes)


def lora():
    """Return new settings of adapters."""
    return LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])


def quantized_model(folder):
    """Return the model of a folder, its linear layers in 4 bits."""
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    found = AutoModelForCausalLM.from_pretrained(folder, quantization_config=how, dtype=torch.float32)
    for each in found.modules():  # on some CPUs forwards without gradients change the scales to bf16, in place
        each.support_avx512bf16_for_cpu = False
    return found


def family_model(family, dtype=torch.float32, changes=None):
    """Return a small model of a family, of the tokenizer's vocabulary."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        words = {"vocab_size": len(tokenizer()), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
        config = tiny_family_config(family, {**words, **(changes or {})})
        made = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    return enliven(made.train())


IMAGE_WORDS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
IMAGE_TEMPLATE = TEMPLATE.replace(
    "<user>{{ m['content'] }}",
    "<user>{% for part in m['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}",
).replace("{{ m['content'] }}<eos>", "{{ m['content'][0]['text'] }}<eos>")


class ImageProcessor(Qwen3VLProcessor):
    """Hugging Face's own processor, without videos, which need torchvision."""

    def check_argument_for_proper_class(self, _name, arg):
        """Accept no processor of videos."""
        return type(arg)


def image_processor():
    """Return it for images of 64 to 1,024 pixels, in tokens of 8 x 8."""
    words = copy.deepcopy(tokenizer())
    words.padding_side = "left"  # as Qwen's
    words.add_special_tokens({"additional_special_tokens": list(IMAGE_WORDS)})
    pixels = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 64, "max_pixels": 1024}
    of_images = Qwen2VLImageProcessorPil(**pixels)
    return ImageProcessor(
        image_processor=of_images, tokenizer=words, video_processor=None, chat_template=IMAGE_TEMPLATE
    )


def image_model(dtype=torch.float32):
    """Return a small Qwen3-VL."""
    ids = image_processor().tokenizer.convert_tokens_to_ids(list(IMAGE_WORDS))
    keys = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    others, vision = dict(zip(keys, ids, strict=True)), {"depth": 2, "deepstack_visual_indexes": [0]}
    return _image_model("qwen3_vl", "qwen3_vl_text", image_processor(), others, vision, dtype)


def _image_model(family, text, made, others, vision, dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        sizes = {"vocab_size": len(made.tokenizer), "pad_token_id": 0, "eos_token_id": 1}
        config = tiny_tower_config(family, text, sizes, **others)
        for name, value in vision.items():
            setattr(config.vision_config, name, value)
        found = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa", dtype=dtype)
    return enliven(found.train())


GEMMA_WORDS = {"boi_token": "<boi>", "image_token": "<soft>", "eoi_token": "<eoi>"}
GEMMA_TOKENS = 4  # of an image


def gemma_processor(*, pan_and_scan=False):
    """Return Gemma 3's own processor, for images of 16 x 16 pixels. pan_and_scan: wide ones have crops, too."""
    words = copy.deepcopy(tokenizer())
    words.padding_side = "left"
    words.add_special_tokens({"additional_special_tokens": list(GEMMA_WORDS.values())})
    for name, word in GEMMA_WORDS.items():
        setattr(words, name, word)
        setattr(words, f"{name}_id", words.convert_tokens_to_ids(word))
    crops = {
        "pan_and_scan_min_crop_size": 8,
        "pan_and_scan_max_num_crops": 2,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    of_images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16}, do_pan_and_scan=pan_and_scan, **crops)
    template = IMAGE_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", GEMMA_WORDS["boi_token"])
    made = Gemma3Processor(of_images, words, chat_template=template, image_seq_length=GEMMA_TOKENS)
    # A call's, over those above.
    made.images_kwargs = {"do_convert_rgb": True, "do_pan_and_scan": pan_and_scan, **crops}
    return made


def gemma_model(dtype=torch.float32):
    """Return a small Gemma 3 with a tower."""
    made = gemma_processor()
    others = {"image_token_id": made.tokenizer.image_token_id, "mm_tokens_per_image": GEMMA_TOKENS}
    found = _image_model("gemma3", "gemma3_text", made, others, {}, dtype)
    torch.nn.init.normal_(found.model.multi_modal_projector.mm_input_projection_weight, generator=torch.Generator())
    return found


def pictures(count=12, *, preferred=False):
    """Return conversations about no, one or several images, or what was chosen and what was rejected about them."""
    draw, turn = random.Random(4), {"role": datasets.Value("string"), "content": datasets.Value("string")}
    sides = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}

    def row(number):
        values = np.random.default_rng(number)
        sizes = [(draw.choice([8, 16, 40]), draw.choice([8, 24])) for _ in range(draw.choice([0, 1, 1, 3]))]
        images = [Image.fromarray(values.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]
        said = {side: [{"role": role, "content": _words(draw, draw.randint(1, 12))}] for side, role in sides.items()}
        return {**(said if preferred else {"messages": said["prompt"] + said["chosen"]}), "images": images}

    names = tuple(sides) if preferred else ("messages",)
    features = {**{name: datasets.List(turn) for name in names}, "images": datasets.List(datasets.Image())}
    rows = [row(number) for number in range(count)]
    return datasets.Dataset.from_list(rows, features=datasets.Features(features))


def _words(draw, count):
    return " ".join("".join(draw.choice("abcdefgh") for _ in range(draw.randint(1, 6))) for _ in range(count))


def chats(count=16):
    """Return conversations of 4 to about 350 tokens."""
    draw = random.Random(0)

    def chat(turns, words):
        roles = ["user", "assistant"] * turns
        return [{"role": role, "content": _words(draw, draw.randint(1, words))} for role in roles]

    rows = [{"messages": chat(draw.choice([1, 1, 2, 6]), draw.choice([1, 3, 12]))} for _ in range(count)]
    return datasets.Dataset.from_list(rows)


def completions(count=16):
    """Return prompts with their completions."""
    draw = random.Random(1)
    rows = [{"prompt": _words(draw, draw.choice([1, 5, 30])), "completion": _words(draw, 3)} for _ in range(count)]
    return datasets.Dataset.from_list(rows)


def pairs(count=12):
    """Return prompts with what was chosen and what was rejected."""
    draw = random.Random(2)
    sides = [[1, 5, 30], [1, 8, 40], [1, 8, 40]]
    rows = [[_words(draw, draw.choice(each)) for each in sides] for _ in range(count)]
    names = ("prompt", "chosen", "rejected")
    return datasets.Dataset.from_list([dict(zip(names, row, strict=True)) for row in rows])
