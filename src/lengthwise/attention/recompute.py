"""What becomes of a microbatch's activations until its backward; attention in a layer that backward runs again.

A checkpointed layer saves nothing but its input, and runs once more in backward. Its attention then either attends
again, ring and all (`layer`), or takes (out, lse) as the first run left them and sends nothing (`all_but_attention`).
Kept: heads x head_dim values in the model's dtype and heads in the accumulation dtype, a token and layer.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lengthwise.program import HeadRange

Attention = tuple[Tensor, Mapping[HeadRange, Tensor]]
"""(out, lse of each range of heads) of one layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationPolicy:
    """What of a microbatch's activations is kept for backward, as its plan says.

    recompute: `none`, or what is computed again: `layer`, `all_but_attention`. offload: the share of the bytes that
    leaves the device meanwhile; 0, since `program.refuse_unsupported` refuses plans with more.
    """

    recompute: str = "none"
    offload: float = 0.0

    def __post_init__(self) -> None:
        assert not self.offload, f"activations stay on the device, got offload {self.offload}"


class Recomputed(Protocol):
    """Whose attention is run again: a microbatch's `PlannedAttention`."""

    recomputation: Recomputation | None


class Recomputation:
    """One checkpointed call of one layer, over its two runs. `num_attended`: attentions in the first."""

    def __init__(self, *, keeps_attention: bool) -> None:
        self._keeps_attention, self._kept = keeps_attention, deque[tuple[Attention, int]]()
        self._is_second_run, self.num_attended = False, 0

    @contextlib.contextmanager
    def running(self, planned: Recomputed, *, second: bool) -> Iterator[None]:
        """Let the attention of `planned` inside the block know which run it is in."""
        assert planned.recomputation is None, "one checkpointed layer inside another"
        planned.recomputation, self._is_second_run = self, second
        try:
            yield
        finally:
            planned.recomputation = None

    def attend(self, run: Callable[[], Attention]) -> Attention:
        """Return (out, lse) of `run`, or those that the first run kept."""
        self.num_attended += not self._is_second_run
        if not self._keeps_attention:
            return run()
        if not self._is_second_run:
            out, lse = run()
            self._kept.append(((out.detach(), lse), out._version))
            return out, lse
        (out, lse), version = self._kept.popleft()
        assert out._version == version, "the model wrote over the output of its attention"
        return out, lse
