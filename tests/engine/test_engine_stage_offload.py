"""Offload beside stages: no bit changed with several microbatches in the store, one process, and less memory."""

import pytest
import torch
from testing import DelayedStore, build_pair, make_batch, make_plan
from testing.pipelines import as_pipeline, run_pipeline
from testing.stores import CopyStore
from testing.tiny import tiny_family_config

from engine.test_engine_offloading import LAYERS, offloaded, planned_model
from lengthwise.core.plan import RECOMPUTE_KINDS, Piece
from lengthwise.core.shape import LayerCut
from lengthwise.cost import Choice, StepMemory, shape_from_config
from tiers import some

LENGTHS = (40, 9, 25, 3, 17, 31, 22)
ROWS = [
    Piece(ranks=(0, 1), sequences=(0, 3)),
    [Piece(ranks=(0,), sequences=(1,)), Piece(ranks=(1,), sequences=(2,))],
    Piece(ranks=(1,), sequences=(4, 5)),
    Piece(ranks=(0,), sequences=(6,)),
]


def run(model, plan, *, precision="fp32"):
    stores = {}

    def make_store(rank):
        stores[rank] = DelayedStore()
        return stores[rank]

    batch = make_batch(LENGTHS, vocab=48, seed=1, masked=0.2)
    return run_pipeline(model, plan, batch, precision=precision, make_store=make_store), stores


def put_since(store):
    """Count what was put between what is taken first, the last of its microbatch, and its take."""
    (place, number) = next((place, number) for place, (what, number) in enumerate(store.events) if what == "take")
    return sum(what == "put" for what, _ in store.events[:place]) - number - 1


@pytest.mark.parametrize(("cut", "kinds"), some([((2, 1), RECOMPUTE_KINDS), ((2, 2), ("none",))]))
def test_offload_in_stages_changes_no_bit_and_waits_for_no_copy(cut, kinds):
    model, plan = planned_model("llama"), as_pipeline(make_plan(2, LENGTHS, ROWS, layers=LAYERS), *cut)
    kept, _ = run(model, offloaded(plan, 0.0, kinds=kinds))
    got, stores = run(model, offloaded(plan, 1.0, 0.3, 0.7, kinds=kinds))
    assert [each.done.loss_sum for each in got] == [each.done.loss_sum for each in kept]
    for name, gradient in kept[0].gradients.items():
        assert torch.equal(got[0].gradients[name], gradient), name
    stages = cut[0]
    assert all(each.done.offloaded_bytes > 0 for rank, each in enumerate(got) if rank % stages < stages - 1)
    assert put_since(stores[0]) > 0  # of another microbatch
    for store in stores.values():
        assert store.late == []
        assert store.held == 0


def test_a_stage_that_offloads_holds_less_of_every_microbatch():
    """The first stage keeps p microbatches; of what they saved a window of two layers comes back at once."""
    lengths, stages = (200,) * 3, 2
    config = tiny_family_config("llama", {"num_hidden_layers": 6})
    plan = make_plan(1, lengths, [Piece(ranks=(0,), sequences=(i,)) for i in range(3)], layers=6)
    peaks, away = {}, {}
    for ratio in (0.0, 0.5):
        first, *_ = run_pipeline(
            build_pair("llama", config)["planned"],
            offloaded(as_pipeline(plan, stages), ratio),
            make_batch(lengths, vocab=48),
            precision="fp32",
            make_store=lambda _: CopyStore(),
            watches=True,
        )
        peaks[ratio], away[ratio] = first.peak_bytes, first.done.offloaded_bytes / len(lengths)
    shape, messages = shape_from_config(config.to_dict()), 6 * lengths[0] * config.hidden_size * 4
    layers = LayerCut(stages=stages, virtual=1)
    memory = StepMemory(shape=shape, dtype_bytes=4, ranks=1, cut=layers, logits_at_once=None)
    for ratio, peak in peaks.items():
        estimate = float(memory.microbatch_bytes(lengths[0], Choice(offload=ratio)))
        assert estimate * 0.95 < peak < estimate * 1.1 + messages  # sent and to arrive: estimates leave them out
    assert peaks[0.0] - peaks[0.5] > (stages - 1) * away[0.5] > 0
