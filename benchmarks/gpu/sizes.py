"""How large the tables are: on a GPU, and so tiny that a test runs them all on the CPU in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from gpu.batches import BatchKind

_K = 1024
_STEPS = {
    "llama-1b": (
        BatchKind(name="uniform", tokens=64 * _K, longest_tokens=16 * _K),
        BatchKind(name="github", tokens=64 * _K, longest_tokens=64 * _K, recompute="layer"),
        BatchKind(name="prolong", tokens=64 * _K, longest_tokens=64 * _K, recompute="layer"),
        BatchKind(name="one long", tokens=80 * _K, longest_tokens=64 * _K, recompute="layer"),
    ),
    "llama-3b": (BatchKind(name="uniform", tokens=32 * _K, longest_tokens=16 * _K, recompute="layer"),),
    "llama-8b, 8 layers": (BatchKind(name="uniform", tokens=32 * _K, longest_tokens=16 * _K),),
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
    replay_tokens_a_rank: int = 24 * _K
    replay_profile_seconds: float = 20.0
    step_models: Mapping[str, tuple[BatchKind, ...]] = field(default_factory=lambda: _STEPS)
    step_repeats: int = 2
    pack_tokens: int = 16 * _K

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
    pack_tokens=64,
)


def sizes_of(device: str, *, tiny: bool) -> Sizes:
    """Return the sizes for a device."""
    return replace(TINY if tiny else FULL, device=device)
