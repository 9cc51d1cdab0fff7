"""Calls on clocks, of queues and CTAs: what never ends is found; how long others take the clocks of stages prove."""

import pytest
from testing.fake_nccl import Call, FakeNccl
from testing.order import Operation

from lengthwise.core.errors import TransferError


def swap(*peers, on="transfers", ctas=8):
    """Exchange a message each way with these ranks, for a second."""
    both = [Operation(kind=kind, peer=peer, payload=1.0) for kind in ("send", "receive") for peer in peers]
    return Call(communicator=on, operations=both, label=f"a swap with {peers}", ctas=ctas)


def _collective(name):
    return [Call(communicator="a", operations=[Operation(kind="collective", size=name, payload=1.0)])]


@pytest.mark.parametrize(
    ("items", "said"),
    [
        # Kernels of two communicators that do not fit together, in two orders.
        (
            [[swap(1, on="a"), swap(1, on="b")], [swap(0, on="b"), swap(0, on="a")]],
            "a deadlock: rank 0 in .* on a; rank 0 in .* on b; rank 1",
        ),
        # Each waits for a call that the other has posted behind its own.
        ([[swap(1), swap(2)], [swap(2), swap(0)], [swap(0), swap(1)]], r"a deadlock: rank 0 in a swap with \(1,\)"),
        ([[swap(1)], []], "a deadlock: rank 0 in a swap with .*"),
        ([_collective("x"), _collective("y")], "expected .; got . of rank"),
    ],
)
def test_calls_that_would_never_end_are_refused(items, said):
    with pytest.raises(TransferError, match=said):
        FakeNccl(items, ctas=15)
