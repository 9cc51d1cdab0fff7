"""Which activations leave the device, in which order they come back bit by bit, and the store on a disk."""

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
from testing import CountingStore

from lengthwise.core.errors import MemoryShortage
from lengthwise.offload import ActivationSaver, DiskStore, parameter_storages
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


LAYERS, WIDTH, ROWS = 6, 64, 50


def make_model(layers=LAYERS):
    torch.manual_seed(0)
    parts = []
    for _ in range(layers):
        wide = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.SiLU(), torch.nn.Linear(3 * WIDTH, WIDTH)
        parts += [torch.nn.LayerNorm(WIDTH), *wide]
    return torch.nn.Sequential(*parts)


def inputs(rows=ROWS):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


def gradients(model, x, saver=None):
    """Return the loss and the gradients, one after the other."""
    model.zero_grad(set_to_none=True)
    with contextlib.nullcontext() if saver is None else saver.saving():
        loss = model(x).square().sum()
    loss.backward()
    return torch.cat([each.flatten() for each in (loss.detach(), *(each.grad for each in model.parameters()))])


def counted(model, x):
    saver = ActivationSaver(None, stays=parameter_storages(model))
    gradients(model, x, saver)
    return saver.totals.saved_bytes


def offloading(model, x, store, share, layers=LAYERS):
    everything = counted(model, x)
    sizes = {"layer_bytes": everything // layers, "window_bytes": 2 * everything // layers}
    stays = parameter_storages(model)
    return ActivationSaver(store, stays=stays, offload_bytes=round(share * everything), **sizes)


@given(share=st.floats(0, 1), rows=st.integers(1, 200), layers=st.integers(1, 7))
def test_any_share_goes_to_the_byte_and_changes_no_bit(share, rows, layers):
    model, x, store = make_model(layers), inputs(rows), CountingStore()
    saver = offloading(model, x, store, share, layers)
    assert torch.equal(gradients(model, x, saver), gradients(model, x))
    everything, all_that_goes = counted(model, x), CountingStore()
    gradients(model, x, offloading(model, x, all_that_goes, 1.0, layers))
    assert saver.totals.offloaded_bytes == store.put_bytes
    asked = min(round(share * everything), all_that_goes.put_bytes)
    assert 0 <= asked - store.put_bytes < 1024  # less than a tensor that is worth a copy is left
    norms = layers * 2 * rows * 4  # their means and deviations; from 4 rows on all else is of 1 KB or more, and may go
    assert rows < 4 or everything - all_that_goes.put_bytes == norms


def test_backward_never_has_more_on_the_device_than_its_window():
    model, x, store, sizes = make_model(), inputs(), CountingStore(), []
    put = store.put

    def put_and_note(values):
        sizes.append(values.numel())
        return put(values)

    store.put = put_and_note
    gradients(model, x, offloading(model, x, store, 1.0))
    change = {"put": 0, "fetch": 1, "take": -1}
    held = itertools.accumulate(change[what] * sizes[number] for what, number in store.events)
    assert 0 < max(held) <= 2 * counted(model, x) // LAYERS


def test_parameters_small_tensors_and_what_all_layers_share_stay():
    table = torch.randn(ROWS, WIDTH)  # as rotary embeddings: every layer saves it

    class Model(torch.nn.Linear):
        def forward(self, x):
            shared = table * 1.0
            for _ in range(LAYERS):
                x = torch.tanh(x @ self.weight) * shared
            return x

    model, x, store = Model(WIDTH, WIDTH, bias=False), inputs().requires_grad_(), CountingStore()
    saver = offloading(model, x, store, 1.0)
    assert torch.equal(gradients(model, x, saver), gradients(model, x))
    assert saver.totals.offloaded_bytes == store.put_bytes - table.nbytes  # which was taken back
    takes = [number for what, number in store.events if what == "take"]
    assert len(takes) == len(set(takes)) == sum(what == "put" for what, _ in store.events) - 1
