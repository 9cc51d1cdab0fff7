"""Pinned host memory as the store: bytes come back as they went, and no bit of a gradient changes.

On the CPU its streams and events do nothing and its slabs are plain memory; all else is the store's own.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lengthwise.offload import ActivationSaver, PinnedStore, parameter_storages
from lengthwise.offload import pinned as pinned_module


def store_on_cpu(monkeypatch):
    stream = lambda *_: SimpleNamespace(wait_stream=lambda _: None, wait_event=lambda _: None)  # noqa: E731
    event = SimpleNamespace(record=lambda *_: None, query=lambda: True, synchronize=lambda: None)
    event.elapsed_time = lambda _later: 0.0
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda **_options: event)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _values, _stream: None)
    monkeypatch.setattr(PinnedStore, "_new_slab", lambda *_: torch.empty(pinned_module.SLAB_BYTES, dtype=torch.uint8))
    store = PinnedStore(torch.device("cuda", 0), where="test")
    store.device = torch.device("cpu")
    return store


@pytest.fixture
def store(monkeypatch, device):
    monkeypatch.setattr(pinned_module, "SLAB_BYTES", 1 << 20)
    if device.type == "cpu":
        store = store_on_cpu(monkeypatch)
    else:
        store = PinnedStore(torch.device("cuda", torch.cuda.current_device()), where="test")
    yield store
    store.close()


def test_bytes_come_back_over_slabs(store, device):
    for round_ in range(3):
        sizes = (700, 3_000_000, 1 << 20)
        values = [torch.randint(0, 256, (size,), dtype=torch.uint8, device=device) for size in sizes]
        kept = [each.clone() for each in values]
        stored = [store.put(each) for each in values]
        del values
        stored[1].fetch()
        for one, other in zip(reversed(stored), reversed(kept), strict=True):
            assert torch.equal(one.take(), other), round_
        store.free(stored)
    assert len(store._slabs) == 4  # those of the first round: 4,049,276 bytes, in places of 512
    assert store.waited_seconds >= 0


def test_memory_is_kept_while_a_copy_may_use_it_and_closing_waits_for_nothing(store, device, monkeypatch):
    """What is fetched and never taken, after an error, is let go of while the copy into it may be under way.

    Nor does the end wait: after an error in a ring the device waits for ranks that do not come.
    """
    used, record = [], torch.Tensor.record_stream
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda each, on: used.append(on) or record(each, on))
    stored = store.put(torch.arange(100, dtype=torch.uint8, device=device))
    stored.fetch()
    assert used == [store.out_stream, store.in_stream]
    assert stored._values.tolist() == list(range(100))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("waited for the device"))
    store.close()
    assert not store._slabs


def test_gradients_keep_their_bits(store, device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).to(device)
    x = torch.randn(512, 512, device=device)
    found = []
    for offload in (0, 1_000_000, 1 << 40):
        model.zero_grad(set_to_none=True)
        saver = ActivationSaver(
            store, stays=parameter_storages(model), offload_bytes=offload, layer_bytes=1 << 22, window_bytes=1 << 23
        )
        with saver.saving():
            loss = model(x).square().sum()
        loss.backward()
        saver.end()
        found.append([each.grad for each in model.parameters()])
    for got in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(got, found[0], strict=True))
