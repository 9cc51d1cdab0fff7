"""What the tables run: batches of random tokens, models of random weights, and how large all is.

Sizes are those of a GPU, or so tiny that a test runs them all on the CPU in seconds. Models have the shapes of Llama.
MFU = (6 x (parameters - input embedding) x tokens + 6 x layers x heads x head_dim x sum of squared lengths) / seconds /
peak. Recomputation is not counted. 6 of attention: two products forward, four backward, of half the square each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn
from transformers import LlamaConfig

from gpu.rows import device_name
from lengthwise.core.plan import Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, hardware_of_gpu, named_hardware
from lengthwise.data.recipes import draw_lengths
from lengthwise.models import ModelSource, build_model
from lengthwise.models.adapter import ATTENTION_NAME
from lengthwise.planner import PlanOptions, plan_step

SHORT_SHARE = 16  # of the long document's tokens the short ones beside it have at most


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchKind:
    """What a batch is drawn from: a recipe's name, `uniform` or `one long`; no document is over `longest_tokens`.

    recompute: how its microbatches run, as in a plan.
    """

    name: str
    tokens: int
    longest_tokens: int
    recompute: str = "none"

    def lengths(self, seed: int = 0) -> list[int]:
        """Return the lengths of a batch, always the same ones for a seed."""
        if self.name == "uniform":
            return [self.longest_tokens] * max(1, self.tokens // self.longest_tokens)
        if self.name == "one long":
            most, left = max(1, self.longest_tokens // SHORT_SHARE), max(1, self.tokens - self.longest_tokens)
            return [self.longest_tokens, *draw_lengths("github", left, seed, longest_tokens=most)]
        return draw_lengths(self.name, self.tokens, seed, longest_tokens=self.longest_tokens)


def packs_of(lengths: Sequence[int], pack_tokens: int) -> list[tuple[int, ...]]:
    """Pack documents, longest first, where they fit first; one over `pack_tokens` is alone."""
    packs, left = list[list[int]](), list[int]()
    for index in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        place = next((number for number, room in enumerate(left) if room >= lengths[index]), len(packs))
        if place == len(packs):
            packs.append([])
            left.append(max(pack_tokens, lengths[index]))
        packs[place].append(index)
        left[place] -= lengths[index]
    return [tuple(pack) for pack in packs]


def plan_for(
    lengths: Sequence[int],
    cost: Cost,
    cluster: Cluster,
    *,
    planner: str = "lengthwise",
    layers: int,
    recompute: str = "none",
) -> Plan:
    """Plan a batch; `static` gets a mesh for its longest sequence."""
    context = max(lengths) if planner == "static" else None
    options = PlanOptions(planner=planner, layers=layers, context_tokens=context, recompute=recompute)
    return plan_step(lengths, cluster, cost, options)


_K = 1024
_STEP_PARTS = {
    "steps": {
        "llama-1b": (
            BatchKind(name="uniform", tokens=32 * _K, longest_tokens=16 * _K),
            BatchKind(name="github", tokens=32 * _K, longest_tokens=32 * _K, recompute="layer"),
            BatchKind(name="prolong", tokens=32 * _K, longest_tokens=32 * _K, recompute="layer"),
        )
    },
    "steps_64k": {"llama-1b": (BatchKind(name="one long", tokens=72 * _K, longest_tokens=64 * _K, recompute="layer"),)},
    "steps_8b": {
        "llama-8b, 8 layers": (
            BatchKind(name="uniform", tokens=16 * _K, longest_tokens=16 * _K),
            BatchKind(name="github", tokens=32 * _K, longest_tokens=32 * _K),
        )
    },
    "steps_large": {
        "llama-8b, 8 layers": (BatchKind(name="uniform", tokens=16 * _K, longest_tokens=16 * _K),),
        "llama-3b": (BatchKind(name="uniform", tokens=16 * _K, longest_tokens=16 * _K, recompute="layer"),),
    },
}
_TINY_STEP_PARTS = {
    "steps": {"tiny": (BatchKind(name="uniform", tokens=64, longest_tokens=32),)},
    "steps_64k": {"tiny": (BatchKind(name="one long", tokens=100, longest_tokens=64, recompute="layer"),)},
    "steps_8b": {"tiny, wide": (BatchKind(name="uniform", tokens=64, longest_tokens=32),)},
    "steps_large": {"tiny, wide": (BatchKind(name="uniform", tokens=64, longest_tokens=32, recompute="layer"),)},
}
PLANNERS = ("static", "single-degree", "bytescale", "lengthwise")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of all tables; `device` is cuda or cpu, `precision` as in a run file; of all repeats the median counts."""

    device: str = "cuda"
    precision: Literal["bf16", "fp32"] = "bf16"
    repeats: int = 5
    copy_bytes: int = 1 << 31
    product_sizes: tuple[int, ...] = (4096, 8192, 16384)
    attention_tokens: tuple[int, ...] = (1024, 4096, 16384, 65536)
    attention_heads: int = 16
    block_tokens: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    block_heads: tuple[tuple[int, int, int], ...] = ((32, 8, 128), (32, 8, 64))
    uneven_blocks: tuple[tuple[int, int], ...] = ((8192, 4096), (16384, 8192))
    replay_model: str = "llama-1b"
    replay_plans: Mapping[int, tuple[str, ...]] = field(
        default_factory=lambda: {8: PLANNERS, 16: PLANNERS, 32: ("static", "lengthwise")}
    )
    replay_capacity_tokens: int = 16 * _K
    replay_tokens_a_rank: int = 20 * _K
    replay_profile_seconds: float = 20.0
    waves_model: str = "llama-8b, 8 layers"
    waves_ranks: int = 8
    waves_repeats: int = 3
    waves_batches: tuple[BatchKind, ...] = (
        BatchKind(name="github", tokens=128 * _K, longest_tokens=96 * _K),
        BatchKind(name="prolong", tokens=128 * _K, longest_tokens=16 * _K),
    )
    traced: tuple[str, BatchKind] = (
        "llama-8b, 8 layers",
        BatchKind(name="uniform", tokens=16 * _K, longest_tokens=16 * _K),
    )
    step_parts: Mapping[str, Mapping[str, tuple[BatchKind, ...]]] = field(default_factory=lambda: _STEP_PARTS)
    step_repeats: int = 2
    step_compiled: bool = True
    pack_tokens: int = 16 * _K
    profile_models: tuple[str, ...] = ("llama-1b", "llama-8b, 8 layers")
    profile_seconds: float = 20.0
    profile_tokens: int = 16 * _K
    many_model: str = "many"
    many_capacity_tokens: int = 1024
    ring_heads: tuple[int, int, int] = (8, 2, 128)
    ring_degree: int = 3
    ring_tokens: int = 32 * _K
    logits_model: str = "wide words"
    logits_tokens: int = 17 * _K
    logits_at_once: int = 1 << 25

    @property
    def where(self) -> torch.device:
        """The device itself; some calls of torch want the number of a GPU."""
        return torch.device("cuda", 0) if self.device == "cuda" else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[self.precision]

    def replay_batch(self, ranks: int) -> BatchKind:
        """Return the batch that so many ranks replay: its longest document takes four fifths of all they hold."""
        longest = self.replay_capacity_tokens * ranks * 4 // 5
        return BatchKind(name="github", tokens=ranks * self.replay_tokens_a_rank, longest_tokens=longest)


FULL = Sizes()
TINY = replace(
    FULL, precision="fp32", repeats=1, copy_bytes=1 << 16, product_sizes=(64,), attention_tokens=(32,),
    attention_heads=2, block_tokens=(32, 64), block_heads=((4, 2, 8),), uneven_blocks=((64, 32),),
    replay_model="tiny", replay_plans={2: PLANNERS, 4: ("static", "lengthwise")},
    replay_capacity_tokens=64, replay_tokens_a_rank=96, replay_profile_seconds=1.0, waves_model="tiny", waves_ranks=2,
    waves_batches=(BatchKind(name="github", tokens=200, longest_tokens=100),),
    traced=("tiny", BatchKind(name="uniform", tokens=64, longest_tokens=32)), step_parts=_TINY_STEP_PARTS,
    step_repeats=2, step_compiled=False, pack_tokens=64, profile_models=("tiny", "tiny, wide"), profile_seconds=0.5,
    profile_tokens=64,
    many_model="many, tiny", many_capacity_tokens=64, ring_heads=(4, 2, 8), ring_tokens=50,
    logits_model="wide words, tiny", logits_tokens=40, logits_at_once=4 * 512,
)  # fmt: skip


def sizes_of(device: str, *, tiny: bool) -> Sizes:
    """Return the sizes for a device."""
    return replace(TINY if tiny else FULL, device=device)


_SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size"),
)
_SHAPES = {
    "llama-1b": (16, 2048, 8192, 32, 8, 64, 128_256),
    "llama-3b": (28, 3072, 8192, 24, 8, 128, 128_256),
    "llama-8b, 8 layers": (8, 4096, 14_336, 32, 8, 128, 128_256),
    "tiny": (2, 32, 64, 4, 2, 8, 256),
    "tiny, wide": (2, 64, 128, 4, 2, 16, 256),
    "many": (4, 256, 512, 4, 2, 64, 512),
    "many, tiny": (4, 32, 64, 4, 2, 8, 64),
    "wide words": (1, 256, 256, 4, 4, 64, 128_256),
    "wide words, tiny": (1, 32, 64, 4, 2, 8, 512),
}


def model_config(name: str) -> Any:
    """Return the Hugging Face config of a shape; input and output embedding are apart, so that MFU is unambiguous."""
    sizes: dict[str, Any] = dict(zip(_SIZES, _SHAPES[name], strict=True))
    more: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False}
    return LlamaConfig(**sizes, **more, max_position_embeddings=1 << 20)


def model_source(name: str) -> ModelSource:
    """Return the shape as a model without weights."""
    return ModelSource(name=name, config=model_config(name), weights=False)


def draw_model(name: str, device: torch.device, *, attention: str = ATTENTION_NAME) -> nn.Module:
    """Build the model on the device itself, where drawing weights takes no time."""
    with torch.device(device):
        return build_model(model_source(name), seed=0, attention=attention).to(device)


def step_flops(config: Any, parameters: int, lengths: Sequence[int]) -> float:
    """Count the FLOPs of a step as MFU counts them (see above)."""
    squares = float(sum(length**2 for length in lengths))
    attention = 6.0 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * squares
    return linear_flops(config, parameters, lengths) + attention


def linear_flops(config: Any, parameters: int, lengths: Sequence[int]) -> float:
    """Count those of them that are not of attention."""
    return 6.0 * (parameters - config.vocab_size * config.hidden_size) * sum(lengths)


def hardware_here(device: torch.device) -> str:
    """Return the named hardware of a device."""
    return hardware_of_gpu(device_name(device))[0] if device.type == "cuda" else "cpu"


def peak_flops_per_second(device: torch.device) -> float:
    """Return the data sheet's rate in bf16 of the hardware that the device's name says."""
    return named_hardware(hardware_here(device)).peak_flops_per_second
