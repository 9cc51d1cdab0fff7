"""How large the tables are: on a GPU, and so tiny that a test runs them all on the CPU in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from gpu.batches import BatchKind
from lengthwise.cost import LOGITS_AT_ONCE

_K = 1024
_STEPS = {
    "llama-1b": (
        BatchKind(name="uniform", tokens=32 * _K, longest_tokens=16 * _K),
        BatchKind(name="github", tokens=32 * _K, longest_tokens=32 * _K, recompute="layer"),
        BatchKind(name="prolong", tokens=32 * _K, longest_tokens=32 * _K, recompute="layer"),
        BatchKind(name="one long", tokens=72 * _K, longest_tokens=64 * _K, recompute="layer"),
    ),
    "llama-8b, 8 layers": (BatchKind(name="uniform", tokens=16 * _K, longest_tokens=16 * _K),),
    "llama-3b": (BatchKind(name="uniform", tokens=16 * _K, longest_tokens=16 * _K, recompute="layer"),),
}
_TINY_STEPS = {
    "tiny": (
        BatchKind(name="uniform", tokens=64, longest_tokens=32),
        BatchKind(name="one long", tokens=100, longest_tokens=64, recompute="layer"),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of all tables; `device` is cuda or cpu, `precision` as in a run file.

    repeats: of each figure, of which the median counts.
    """

    device: str = "cuda"
    precision: Literal["bf16", "fp32"] = "bf16"
    repeats: int = 5
    copy_bytes: int = 1 << 31
    product_sizes: tuple[int, ...] = (4096, 8192, 16384)
    attention_tokens: tuple[int, ...] = (1024, 4096, 16384, 65536)
    attention_heads: int = 16
    replay_model: str = "llama-1b"
    replay_ranks: tuple[int, ...] = (8, 16, 32)
    replay_capacity_tokens: int = 16 * _K
    replay_tokens_a_rank: int = 20 * _K
    replay_profile_seconds: float = 20.0
    step_models: Mapping[str, tuple[BatchKind, ...]] = field(default_factory=lambda: _STEPS)
    step_repeats: int = 2
    step_compiled: bool = True
    pack_tokens: int = 16 * _K
    profile_model: str = "llama-1b"
    profile_seconds: float = 30.0
    profile_tokens: int = 16 * _K
    ring_heads: tuple[int, int, int] = (8, 2, 128)
    ring_degree: int = 3
    ring_tokens: int = 32 * _K
    logits_model: str = "wide words"
    logits_tokens: int = 17 * _K
    logits_at_once: int = LOGITS_AT_ONCE

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
    FULL,
    precision="fp32",
    repeats=1,
    copy_bytes=1 << 16,
    product_sizes=(64,),
    attention_tokens=(32,),
    attention_heads=2,
    replay_model="tiny",
    replay_ranks=(2, 4),
    replay_capacity_tokens=64,
    replay_tokens_a_rank=96,
    replay_profile_seconds=1.0,
    step_models=_TINY_STEPS,
    step_repeats=1,
    step_compiled=False,
    pack_tokens=64,
    profile_model="tiny",
    profile_seconds=0.5,
    profile_tokens=64,
    ring_heads=(4, 2, 8),
    ring_tokens=50,
    logits_model="wide words, tiny",
    logits_tokens=40,
    logits_at_once=4 * 512,
)


def sizes_of(device: str, *, tiny: bool) -> Sizes:
    """Return the sizes for a device."""
    return replace(TINY if tiny else FULL, device=device)
