"""States of 8 bits: on any number of ranks, to the bit, those of bitsandbytes on whole parameters."""

import shutil
from types import SimpleNamespace
from typing import Any

import bitsandbytes
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testing.strict import StrictWorld
from torch import nn

from lengthwise.checkpoint import parameters_of, read_state, write_part
from lengthwise.config import OptimizerConfig
from lengthwise.engine.optimizer import SHORT, ShardedOptimizer, block_of
from lengthwise.engine.replicated import FlatParameters
from properties import costliest

HALF, STEPS, LR, DECAY = 2, 4, 1e-2, 0.3
RANKS = [1, 2, 3, 5]
KINDS = {"adamw_8bit": bitsandbytes.optim.AdamW8bit, "lion_8bit": bitsandbytes.optim.Lion8bit}
# around a block of 256 entries, what a rank of five has of a few blocks, and the first size that has 8 bits
SIZES = st.one_of(
    st.integers(1, 1600),
    st.integers(4000, 9000),
    st.sampled_from([255, 256, 257, 511, 513, 1279, 1281, 4095, 4096, 4097]),
)
SHAPES = st.one_of(
    SIZES.map(lambda size: (size,)),
    st.tuples(st.integers(1, 90), st.integers(1, 120)),
    SIZES.map(lambda size: (size, 1)),
)


class Bare(nn.Module):
    """Parameters of these shapes, and nothing that computes."""

    def __init__(self, shapes):
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(shape, generator=random) for shape in shapes)


def gradient(shape, step, place, spread):
    """Of eighths: sums over ranks are exact. Many are zero, whole blocks too, and they differ in size by `spread`."""
    random = torch.Generator().manual_seed(1000 * place + step)
    found = torch.randint(-8, 9, shape, generator=random) / 8 * (torch.rand(shape, generator=random) < 0.5)
    sizes = 2.0 ** torch.randint(-spread, spread + 1, shape, generator=random)
    blocks = (torch.arange(found.numel()) // 256 + step) % 3 > 0  # one in three without any
    return found * sizes * blocks.view(shape)


def plain(name, shapes, spread):
    model = Bare(shapes)
    groups = [
        {
            "params": [each for each in model.parameters() if (each.dim() >= 2) == decayed],
            "weight_decay": decayed * DECAY,
        }
        for decayed in (True, False)
    ]
    optimizer = KINDS[name](groups, lr=LR, betas=(0.8, 0.9))
    for step in range(STEPS):
        for place, each in enumerate(model.parameters()):
            each.grad = gradient(each.shape, step, place, spread)
        optimizer.step()
    return model, optimizer


def made(transport, name, shapes):
    model = Bare(shapes)
    config = OptimizerConfig(name=name, betas=(0.8, 0.9), weight_decay=DECAY, max_grad_norm=None)
    flat = FlatParameters(model, transport, dtype=torch.float32, layers=[], bucket_entries=1, block=block_of(config))
    return model, flat, ShardedOptimizer(flat, config, transport)


def train(flat, optimizer, transport, steps, spread):
    for step in steps:
        for place, each in enumerate(flat.views(flat.grads)):
            if place % transport.world_size == transport.rank:
                each.copy_(gradient(each.shape, step, place, spread))
        optimizer.update(LR, optimizer.reduce())


def before(transport, name, shapes, spread, folder):
    """Train half of the steps and write each rank's file; return where all lies."""
    _, flat, optimizer = made(transport, name, shapes)
    train(flat, optimizer, transport, range(HALF), spread)
    write_part(folder, transport.rank, {**flat.state(), **optimizer.state()})
    return SimpleNamespace(layout=flat.layout, parameters=parameters_of(flat.layout, [*flat.names], [*flat.shapes]))


def after(transport, name, shapes, spread, folder, manifest):
    """Read it and train the others; return the weights, and on rank 0 long parameters' codes by state."""
    model, flat, optimizer = made(transport, name, shapes)
    state = {**flat.state(), **optimizer.state()}
    read_state(folder, manifest, flat.layout, flat.names, transport.rank, state, short=optimizer.short, below=SHORT)
    optimizer.go_on_from(HALF)
    train(flat, optimizer, transport, range(HALF, STEPS), spread)
    codes = {key: flat.gather_to_first(each) for key, each in optimizer.state().items() if key in ("state1", "state2")}
    return [each.detach().clone() for each in model.parameters()], codes, flat.names


@costliest
@given(
    st.lists(SHAPES, min_size=1, max_size=5), st.sampled_from(RANKS), st.sampled_from(RANKS),
    st.sampled_from(sorted(KINDS)), st.sampled_from([0, 6]),
)  # fmt: skip
def test_any_ranks_that_others_go_on_from_make_what_bitsandbytes_does_to_the_bit(
    tmp_path_factory, shapes, ranks, later, name, spread
):
    model, wanted = plain(name, shapes, spread)
    folder = tmp_path_factory.mktemp("checkpoint")
    manifest = StrictWorld(ranks).run(lambda transport: before(transport, name, shapes, spread, folder))[0]

    def work(transport):
        return after(transport, name, shapes, spread, folder, manifest)

    found: list[Any] = StrictWorld(later).run(work)
    shutil.rmtree(folder)
    for weights, _, _ in found:
        for got, expected in zip(weights, model.parameters(), strict=True):
            assert torch.equal(got, expected)
    _, codes, names = found[0]
    assert codes
    for key, by_name in codes.items():
        for each, expected in zip(names, model.parameters(), strict=True):
            in_8_bits = wanted.state[expected][key].dtype == torch.uint8
            assert in_8_bits == (expected.numel() >= SHORT)
            assert not in_8_bits or torch.equal(by_name[each], wanted.state[expected][key])


@pytest.mark.parametrize("name", KINDS)
def test_the_gradients_of_the_property_move_weights_and_leave_blocks_without_any(name):
    model, optimizer = plain(name, [(60, 90)], 6)
    start = Bare([(60, 90)])
    assert not torch.equal(model.weights[0], start.weights[0])
    assert (gradient((1800,), 0, 0, 6)[:256] == 0).all()
    assert len(optimizer.state[model.weights[0]]["state1"].unique()) > 20
