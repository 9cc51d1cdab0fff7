"""What of a microbatch's activations leaves the device, in which order it comes back, and that no bit changes."""

import contextlib
import gc
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testing import CountingStore, LiveBytes

from lengthwise.offload import ActivationSaver, DiskStore, parameter_storages

LAYERS, WIDTH, ROWS = 6, 64, 50


def make_model(layers=LAYERS):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        *(
            torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.SiLU(),
                                torch.nn.Linear(3 * WIDTH, WIDTH))
            for _ in range(layers)
        )
    )  # fmt: skip


def inputs(rows=ROWS):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


def gradients(model, x, saver=None):
    model.zero_grad(set_to_none=True)
    with contextlib.nullcontext() if saver is None else saver.saving():
        loss = model(x).square().sum()
    loss.backward()
    return [loss.detach(), *(each.grad for each in model.parameters())]


def same(got, want):
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def counted(model, x):
    saver = ActivationSaver(None, stays=parameter_storages(model))
    gradients(model, x, saver)
    return saver.totals.saved_bytes


def offloading(model, x, store, share, layers=LAYERS):
    everything = counted(model, x)
    return ActivationSaver(
        store,
        stays=parameter_storages(model),
        offload_bytes=round(share * everything),
        layer_bytes=everything // layers,
        window_bytes=2 * everything // layers,
    )


@given(share=st.floats(0, 1), rows=st.integers(1, 200), layers=st.integers(1, 7))
def test_any_share_goes_to_the_byte_and_changes_no_bit(share, rows, layers):
    model, x, store = make_model(layers), inputs(rows), CountingStore()
    saver = offloading(model, x, store, share, layers)
    assert same(gradients(model, x, saver), gradients(model, x))
    everything, all_that_goes = counted(model, x), CountingStore()
    gradients(model, x, offloading(model, x, all_that_goes, 1.0, layers))
    assert saver.totals.offloaded_bytes == store.put_bytes
    asked = min(round(share * everything), all_that_goes.put_bytes)
    assert 0 <= asked - store.put_bytes < 1024  # less than a tensor that is worth a copy is left
    norms = layers * 2 * rows * 4  # their means and deviations; from 4 rows on all else is of 1 KB or more, and may go
    assert rows < 4 or everything - all_that_goes.put_bytes == norms


def test_backward_never_has_more_on_the_device_than_its_window():
    model, x, store = make_model(), inputs(), CountingStore()
    saver = offloading(model, x, store, 1.0)
    everything = counted(model, x)
    held, most, sizes = 0, 0, {}
    put, begun = store.put, store.events

    def put_and_note(values):
        sizes[len(sizes)] = values.numel()
        return put(values)

    store.put = put_and_note
    gradients(model, x, saver)
    for what, number in begun:
        if what == "fetch":
            held += sizes[number]
            most = max(most, held)
        elif what == "take":
            held -= sizes[number]
    assert 0 < most <= 2 * everything // LAYERS


@pytest.mark.exhaustive
def test_memory_falls_by_what_is_away_and_is_free_after_backward(tmp_path):
    model, x = make_model(), inputs(2000)
    left = {}
    for share in (0.0, 0.5, 1.0):
        store = DiskStore(tmp_path, where="test")
        saver = offloading(model, x, store, share)
        with LiveBytes(x, *model.parameters()) as live:
            with saver.saving():
                loss = model(x).square().sum()
            store.flush()
            time.sleep(0.2)  # the thread that writes lets go of a tensor a moment after it is written
            gc.collect()
            left[share] = live.now_bytes
            loss.backward()
            del loss
            gc.collect()
            gradient_bytes = sum(each.grad.nbytes for each in model.parameters())
            assert live.now_bytes <= gradient_bytes + 1024
        model.zero_grad(set_to_none=True)
        store.close()
    everything = counted(model, x)
    for share in (0.5, 1.0):
        freed = share * everything - x.nbytes  # the input, saved first, is still ours
        assert left[0.0] - left[share] == pytest.approx(freed, rel=0.02)


def test_parameters_small_tensors_and_what_all_layers_share_stay():
    weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
    table = torch.randn(ROWS, WIDTH)  # as rotary embeddings: every layer saves it

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            shared = table * 1.0
            for _ in range(LAYERS):
                x = torch.tanh(x @ self.weight) * shared
            return x

    model, x = Model(), inputs().requires_grad_()
    store = CountingStore()
    saver = offloading(model, x, store, 1.0)
    assert same(gradients(model, x, saver), gradients(model, x))
    taken_back = table.nbytes
    assert saver.totals.offloaded_bytes == store.put_bytes - taken_back
    takes = [number for what, number in store.events if what == "take"]
    assert len(takes) == len(set(takes)) == sum(what == "put" for what, _ in store.events) - 1


def test_a_graph_that_is_dropped_takes_its_entries_with_it():
    model, x, store = make_model(), inputs(), CountingStore()
    saver = offloading(model, x, store, 1.0)
    with saver.saving():
        loss = model(x).square().sum()
    del loss
    gc.collect()
    assert not saver._entries
    assert not any(what == "fetch" for what, _ in store.events)
