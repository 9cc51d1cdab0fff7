"""Chats and preference pairs for TRL's trainers, and a tokenizer of bytes."""

import copy
import random
from functools import cache

import datasets
import numpy as np
import torch
from peft import LoraConfig
from PIL import Image
from testing import enliven, tiny_family_config
from testing.images import add_images, image_model, whole_processor
from testing.small import small_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers import trainers as tokenizer_trainers
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedTokenizerFast

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


IMAGE_TEMPLATE = TEMPLATE.replace(
    "<user>{{ m['content'] }}",
    "<user>{% for part in m['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}",
).replace("{{ m['content'] }}<eos>", "{{ m['content'][0]['text'] }}<eos>")


def seeing(case, dtype=torch.float32, *, crops=False):
    """Return a small model of the family that a case names, by default Qwen3-VL, and its processor.

    Its tower trains. crops: of wide images, in Gemma 3.
    """
    family, words = case.partition("images of ")[2].partition(",")[0] or "qwen3_vl", copy.deepcopy(tokenizer())
    words.padding_side, words.chat_template = "left", IMAGE_TEMPLATE
    image = add_images(words, family)
    made = image_model(family, dtype, vocab=len(words), image=image).requires_grad_(True)
    processor = whole_processor(family, made.config, words)
    if crops and family == "gemma3":
        sizes = {"min_crop_size": 8, "max_num_crops": 2, "min_ratio_to_activate": 1.2}
        of_crops = {f"pan_and_scan_{name}": each for name, each in sizes.items()}
        processor.images_kwargs = {"do_convert_rgb": True, "do_pan_and_scan": True, **of_crops}
    return {"model": made, "processing_class": processor}


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
