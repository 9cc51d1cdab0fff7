"""The store on a disk: bytes come back as they went, a full disk is told in bytes, and no end leaves a file behind."""

import contextlib
import itertools
import os
import resource
import signal
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.errors import MemoryShortage
from lengthwise.offload import DiskStore
from lengthwise.offload import disk as disk_module
from lengthwise.offload.store import StoreRoom


def random_bytes(size, seed=0):
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@given(
    rounds=st.lists(st.lists(st.integers(1, 20_000), min_size=1, max_size=8), min_size=1, max_size=4),
    fetches=st.randoms(use_true_random=False),
)
def test_bytes_come_back_as_they_went_in_any_order(tmp_path_factory, rounds, fetches):
    with contextlib.closing(DiskStore(tmp_path_factory.mktemp("disk"), where="test")) as store:
        for sizes in rounds:
            values = [random_bytes(size, seed) for seed, size in enumerate(sizes)]
            stored = [store.put(each) for each in values]
            order = list(range(len(sizes)))
            fetches.shuffle(order)
            for number in order[::2]:
                stored[number].fetch()
            for number in reversed(order):
                assert torch.equal(stored[number].take(), values[number])
            store.free(stored)


def test_a_wait_for_the_disk_is_counted(tmp_path, monkeypatch):
    write = disk_module._write

    def slow(*arguments):
        time.sleep(0.05)
        write(*arguments)

    monkeypatch.setattr(disk_module, "_write", slow)
    store = DiskStore(tmp_path, where="test")
    store.leaving_bytes = 100
    for _ in range(3):
        store.put(random_bytes(80))
    assert store.waited_seconds > 0.04  # the third waits for the first
    store.close()


def test_a_killed_process_gives_the_room_back(tmp_path):
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        store = DiskStore(tmp_path, where="test")
        store.put(random_bytes(100_000)).take()
        os.write(go, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(ready, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_with_the_bytes(tmp_path):
    store = DiskStore(tmp_path, where="rank 3")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))  # as a disk of a megabyte would
    try:
        kept = store.put(random_bytes(600_000))
        with pytest.raises(MemoryShortage) as caught:
            store.put(random_bytes(600_000, 1))
        assert torch.equal(kept.take(), random_bytes(600_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "rank 3, offload: expected room for 600000 bytes" in str(caught.value)
    assert "beside 602112 of this rank" in str(caught.value)
    assert "bytes free" in str(caught.value)
    store.close()


def test_a_folder_that_is_none_and_a_write_that_fails_later_are_told(tmp_path, monkeypatch):
    (tmp_path / "a file").write_text("")
    for folder in ("missing", "a file"):
        with pytest.raises(MemoryShortage, match="rank 0, offload: expected room"):
            DiskStore(tmp_path / folder, where="rank 0")

    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(disk_module, "_write", broken)
    store = DiskStore(tmp_path, where="rank 0")
    with pytest.raises(MemoryShortage, match="Input/output error"):
        store.put(random_bytes(5000)).take()
    store.close()


@given(steps=st.lists(st.tuples(st.integers(1, 10_000), st.integers(0, 5)), min_size=1, max_size=30))
def test_places_never_overlap_and_are_used_again(steps):
    """As microbatches of a pipeline stage, which end in another order than they began."""
    places, taken = StoreRoom(512), []
    for size, number in steps:
        taken.append((places.take(size), size))
        if number < len(taken):
            places.give(*taken.pop(number))
        spans = sorted((start, start + size) for start, size in taken)
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
        assert places.end >= max((stop for _, stop in spans), default=0)
    for each in taken:
        places.give(*each)
    assert places.end == 0
