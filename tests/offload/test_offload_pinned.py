"""The store of a GPU's host, as far as it can be seen without one: streams and memory are replaced."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from lengthwise.offload import pinned


class _Stream(SimpleNamespace):
    def wait_stream(self, other):
        pass

    def wait_event(self, event):
        pass


class _Event:
    def record(self, stream=None):
        pass

    def query(self):
        return False


@pytest.fixture
def store(monkeypatch):
    """A store whose device is the host, and the streams on which values are said to be in use."""
    used, empty = [], torch.empty
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: _Stream(name=len(used)))
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: _Event())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: _Stream(name="compute"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, **_: empty(*shape, dtype=dtype))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda values, stream: used.append((values.numel(), stream)))
    return pinned.PinnedStore(torch.device("cuda", 0), where="rank 0"), used


def test_memory_is_kept_while_a_copy_may_use_it(store):
    """What is fetched and never taken, after an error say, is let go of while the copy into it may be under way."""
    there, used = store
    stored = there.put(torch.arange(100, dtype=torch.uint8))
    stored.fetch()
    assert used == [(100, there.out_stream), (100, there.in_stream)]
    assert stored._values.tolist() == list(range(100))


def test_closing_waits_for_nothing(store, monkeypatch):
    """After an error in a ring the device waits for ranks that do not come."""
    there, _ = store
    there.put(torch.arange(100, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("waited for the device"))
    there.close()
    assert not there._slabs
