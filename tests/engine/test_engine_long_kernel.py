"""`capacity_tokens: auto` leaves room for what the attention kernel of long sequences takes inside."""

import pytest
import torch
from testing import tiny_model
from testing.varlen import ReferenceVarlenOps

from lengthwise.attention.cudnn import ByLengthKernel
from lengthwise.attention.varlen import VarlenKernel
from lengthwise.comm import SoloTransport
from lengthwise.models import Computing
from lengthwise.session import capacity as room
from lengthwise.session.capacity import Measuring
from lengthwise.session.engine import Engine

CPU, LEAST, A_ROW, FREE = torch.device("cpu"), 256, 20_000, 2e7


class WithWorkspace(VarlenKernel):
    """A kernel that needs room beside its operands and results while it computes gradients: a constant, and by row."""

    def __init__(self, a_row, fixed):
        super().__init__(ReferenceVarlenOps(), token_multiple=1)
        self._a_row, self._fixed = a_row, fixed

    def backward(self, grad_out, block, saved):
        workspace = torch.empty(self._fixed + self._a_row * len(block.q), dtype=torch.uint8)
        found = super().backward(grad_out, block, saved)
        del workspace
        return found


def held(monkeypatch, *, a_row=0, fixed=0, most_tokens=10**6):
    """Return what a rank holds, and the tokens of it, where the kernel of long sequences has such a workspace."""
    engine = Engine(
        model=tiny_model("llama"), transport=SoloTransport(), planner=None, num_heads=4, timeout_seconds=60.0,
        computing=Computing(), device=CPU, dtype=torch.float32, logits_at_once=2**16,
    )  # fmt: skip
    rest = VarlenKernel(ReferenceVarlenOps(), token_multiple=1)
    kernel = ByLengthKernel(WithWorkspace(a_row, fixed), rest, diagonal_tokens=LEAST)
    monkeypatch.setattr(Engine, "kernel", lambda *_: kernel)
    monkeypatch.setattr(room, "free_bytes", lambda *_: FREE)
    how = {"kinds": ("none",), "heads": "off", "most_tokens": most_tokens, "logits_at_once": engine.logits_at_once}
    found = Measuring(engine=engine, **how).held()
    return found.memory, found.plain["none"]


def test_room_for_the_workspace_of_the_long_kernel_is_left(monkeypatch):
    without, most = held(monkeypatch)
    memory, tokens = held(monkeypatch, a_row=A_ROW, fixed=10**6)
    for rows in (LEAST, 1000):
        more = memory.peak_bytes("none", rows) - without.peak_bytes("none", rows)
        assert more == pytest.approx(10**6 + A_ROW * rows, abs=64)  # borders are kept
    assert memory.peak_bytes("none", LEAST - 1) == without.peak_bytes("none", LEAST - 1)
    taken = [without.peak_bytes("none", rows) + 10**6 + A_ROW * rows for rows in (tokens, tokens + 128)]
    assert taken[0] <= 0.9 * FREE < taken[1]
    assert LEAST < tokens < most


def test_batches_of_short_sequences_do_not_run_it(monkeypatch):
    few = {"most_tokens": LEAST - 1}
    assert held(monkeypatch, a_row=A_ROW, **few)[1] == held(monkeypatch, **few)[1]
