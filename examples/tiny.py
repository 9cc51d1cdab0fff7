"""What the examples train: a model, a tokenizer and data that any machine has, of very different lengths."""

import random
from typing import Any

import datasets
import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SPECIAL = ["<pad>", "<eos>", "<user>", "<assistant>"]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<user>{{ m['content'] }}"
    "{% else %}<assistant>{% generation %}{{ m['content'] }}<eos>{% endgeneration %}{% endif %}{% endfor %}"
)
IMAGE_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes, with a chat template that marks what the assistant says."""
    words = {word: number for number, word in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokens = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>")
    found.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    found.chat_template = TEMPLATE
    return found


def model() -> PreTrainedModel:
    """Return a Llama of 0.1 million parameters, the same at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        eos_token_id=1,
    )
    return AutoModelForCausalLM.from_config(config)


IMAGE_WORDS = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]


class ImageProcessor(Qwen3VLProcessor):
    """Qwen's processor without videos, which need torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:  # noqa: ARG002
        """Accept no processor of videos."""
        return type(argument)


def image_processor() -> Qwen3VLProcessor:
    """Return a processor that makes a token of 8 x 8 pixels of an image."""
    words = tokenizer()
    words.add_special_tokens({"additional_special_tokens": [*SPECIAL[2:], *IMAGE_WORDS]})
    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=256, max_pixels=4096)
    return ImageProcessor(images, words, None, chat_template=IMAGE_TEMPLATE)


def image_model() -> PreTrainedModel:
    """Return a Qwen3-VL of 0.2 million parameters, the same at every call."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    tower = {"depth": 2, "num_heads": 4, "patch_size": 4, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}
    config = Qwen3VLConfig(
        text_config={**sizes, **text, "vocab_size": 264, "rope_parameters": rope},
        vision_config={**sizes, **tower},
        image_token_id=260,
        video_token_id=261,
        vision_start_token_id=262,
        vision_end_token_id=263,
    )
    return Qwen3VLForConditionalGeneration(config)


def pictures() -> datasets.Dataset:
    """Return conversations about no, one or six drawn images: `messages` and `images`."""
    draw = random.Random(4)

    def image() -> Image.Image:
        found = Image.new("RGB", (draw.choice([16, 32, 64]), draw.choice([16, 64])), draw.choice(["white", "black"]))
        ImageDraw.Draw(found).ellipse((2, 2, 12, 12), fill=draw.choice(["red", "green", "blue"]))
        return found

    talks = [[{"role": role, "content": _text(draw)} for role in ("user", "assistant")] for _ in range(16)]
    features = {
        "messages": datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")}),
        "images": datasets.List(datasets.Image()),
    }
    rows = [{"messages": talk, "images": [image() for _ in range(draw.choice([0, 1, 1, 6]))]} for talk in talks]
    return datasets.Dataset.from_list(rows, features=datasets.Features(features))


def rows() -> datasets.Dataset:
    """Return sequences of tokens."""
    draw = random.Random(0)
    lengths = [900, 300, *[40] * 22]
    return datasets.Dataset.from_list([{"input_ids": [draw.randrange(4, 260) for _ in range(n)]} for n in lengths])


def chats() -> datasets.Dataset:
    """Return conversations: `messages`."""
    draw = random.Random(1)
    turns = [{"role": role, "content": ""} for role in ("user", "assistant")]
    talks = [turns * draw.choice([1, 1, 1, 2, 6]) for _ in range(24)]
    return datasets.Dataset.from_list(
        [{"messages": [{**turn, "content": _text(draw)} for turn in talk]} for talk in talks]
    )


def pairs() -> datasets.Dataset:
    """Return preferences: `prompt`, `chosen`, `rejected`."""
    draw = random.Random(2)
    names = ("prompt", "chosen", "rejected")
    return datasets.Dataset.from_list([{name: _text(draw) for name in names} for _ in range(16)])


def prompts() -> datasets.Dataset:
    """Return what is to be completed: `prompt`."""
    draw = random.Random(3)
    return datasets.Dataset.from_list([{"prompt": _text(draw)} for _ in range(16)])


def rollouts(texts: list[str], trainer: Any) -> dict[str, Any]:
    """Return completions, few of them long: drawn by prompt and place, so that any number of ranks has the same."""
    prompt_ids = [tokenizer()(text)["input_ids"] for text in texts]
    completion_ids = []
    for number, ids in enumerate(prompt_ids):
        draw = random.Random(f"{ids} {number % trainer.num_generations} {trainer.state.global_step}")
        length = draw.choice([3, 5, 8, 12, 20, 250])
        completion_ids.append([*(draw.randrange(4, 260) for _ in range(length)), 1])
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}


def reward(completion_ids: list[list[int]], **_given: Any) -> list[float | None]:
    """Return, of each completion, the share of its tokens that are in the first half of the words."""
    return [sum(token < 130 for token in ids) / len(ids) for ids in completion_ids]


def _text(draw: random.Random) -> str:
    return " ".join("".join(draw.choices("abcdefgh", k=4)) for _ in range(draw.choice([1, 2, 5, 60])))
