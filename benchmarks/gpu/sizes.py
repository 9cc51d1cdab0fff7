"""How large the tables are: on a GPU, and so tiny that a test runs them all on the CPU in seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of all tables; `device` is cuda or cpu, `precision` as in a run file.

    repeats: of each figure, of which the median counts.
    """

    device: str = "cuda"
    precision: str = "bf16"
    repeats: int = 5
    copy_bytes: int = 1 << 31
    product_sizes: tuple[int, ...] = (4096, 8192, 16384)
    attention_tokens: tuple[int, ...] = (1024, 4096, 16384, 65536)
    attention_heads: int = 16

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[self.precision]


FULL = Sizes()
TINY = replace(
    FULL,
    precision="fp32",
    repeats=1,
    copy_bytes=1 << 16,
    product_sizes=(64,),
    attention_tokens=(32,),
    attention_heads=2,
)


def sizes_of(device: str, *, tiny: bool) -> Sizes:
    """Return the sizes for a device."""
    return replace(TINY if tiny else FULL, device=device)
