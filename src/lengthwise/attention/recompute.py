"""Which activations of a microbatch are kept for backward, and attention in a layer that backward recomputes.

In the recomputation attention runs again with its ring (`layer`), or takes the first run's (out, lse) and sends nothing
(`all_but_attention`). Other layers keep the tensors that they received.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lengthwise.attention.partials import Attended
from lengthwise.offload import ActivationSaver
from lengthwise.program import HeadRange

Kept = tuple[Tensor, Mapping[HeadRange, Tensor]]
"""(out, lse by range of heads) of one layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationPolicy:
    """The activations of a microbatch that are kept for backward, by its plan.

    recompute: `none`, `layer` or `all_but_attention`. saver: saver of the plan's offloaded share, None without.
    """

    recompute: str = "none"
    saver: ActivationSaver | None = None


class Recomputed(Protocol):
    """The owner of recomputed layers: a microbatch's `PlannedAttention`."""

    recomputation: Recomputation | None


class Recomputation:
    """One checkpointed call of one layer of `planned`: a context for its first run and then for its recomputation."""

    def __init__(self, planned: Recomputed, *, keeps_attention: bool, saver: ActivationSaver | None = None) -> None:
        self._planned, self._keeps_attention, self._saver = planned, keeps_attention, saver
        self._kept = deque[Callable[[], Kept]]()
        self._received = deque[list[Tensor]]()
        self.is_second_run = False

    def __enter__(self) -> None:
        """Set this as the running recomputation of `planned`."""
        assert self._planned.recomputation is None, "one checkpointed layer inside another"
        self._planned.recomputation = self

    def __exit__(self, *_error: object) -> None:
        """End a run; later ones are recomputations."""
        self._planned.recomputation, self.is_second_run = None, True

    def receive(self, run: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return the tensors that `run` receives from other ranks, or received in the first run."""
        if not self.is_second_run:
            self._received.append([each.detach() for each in run()])
            return [each.detach() for each in self._received[-1]]
        return self._received.popleft()

    def attend(
        self,
        run: Callable[[], tuple[Tensor, Attended]],
        read_again: Callable[[Tensor, Mapping[HeadRange, Tensor]], Attended],
    ) -> tuple[Tensor, Attended]:
        """Return the result of `run`, or in the second run `read_again` of its (out, lse), if the first kept them."""
        if not self._keeps_attention:
            return run()
        if not self.is_second_run:
            out, attended = run()
            self._kept.append(self._keep(out.detach(), {heads: saved.lse for heads, (_, saved) in attended.items()}))
            return out, attended
        out, lse = self._kept.popleft()()
        return out, read_again(out, lse)

    def _keep(self, out: Tensor, lse: Mapping[HeadRange, Tensor]) -> Callable[[], Kept]:
        saver, version = self._saver, out._version

        def unwritten() -> Kept:
            assert out._version == version, "the model overwrote the output of its attention"
            return out, lse

        if saver is None:
            return unwritten
        saved, saved_lse = saver.pack(out), {heads: saver.pack(each) for heads, each in lse.items()}
        return lambda: (saver.unpack(saved), {heads: saver.unpack(each) for heads, each in saved_lse.items()})
