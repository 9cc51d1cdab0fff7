"""Pinned host memory as the store: bytes come back as they went, and no bit of a gradient changes."""

import pytest
import torch

from lengthwise.offload import ActivationSaver, PinnedStore, parameter_storages
from lengthwise.offload import pinned as pinned_module

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU (make gpu-check)")]


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(pinned_module, "SLAB_BYTES", 1 << 20)
    store = PinnedStore(torch.device("cuda", torch.cuda.current_device()), where="test")
    yield store
    store.close()


def test_bytes_come_back_over_slabs(store):
    for round_ in range(3):
        values = [
            torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda") for size in (700, 3_000_000, 1 << 20)
        ]
        kept = [each.clone() for each in values]
        stored = [store.put(each) for each in values]
        del values
        stored[1].fetch()
        for one, other in zip(reversed(stored), reversed(kept), strict=True):
            assert torch.equal(one.take(), other), round_
        store.reset()
    assert len(store._slabs) == 5  # those of the first round
    assert store.waited_seconds >= 0


def test_gradients_keep_their_bits(store):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).cuda()
    x = torch.randn(2048, 512, device="cuda")
    found = []
    for offload in (0, 3_000_000, 1 << 40):
        model.zero_grad(set_to_none=True)
        saver = ActivationSaver(
            store, stays=parameter_storages(model), offload_bytes=offload, layer_bytes=1 << 22, window_bytes=1 << 23
        )
        with saver.saving():
            loss = model(x).square().sum()
        loss.backward()
        store.reset()
        found.append([each.grad for each in model.parameters()])
    for got in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(got, found[0], strict=True))
