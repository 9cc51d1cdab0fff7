"""Flat buffers: every parameter in one rank's slice, master weights exact, gradients in fp32, all ranks alike."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lengthwise.comm import SoloTransport, StrictWorld
from lengthwise.engine.replicated import FlatParameters


class Rank(SoloTransport):
    """A rank of a larger world that nobody answers: enough to look at its slice."""

    def __init__(self, rank, world_size):
        super().__init__()
        self.rank, self.world_size = rank, world_size


@given(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=6), st.integers(1, 12)
)  # fmt: skip
def test_flat_slices_cover_every_parameter_once_with_its_own_decay(shapes, world_size):
    model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
    expected = [len(shape) >= 2 for shape in shapes for _ in range(torch.Size(shape).numel())]
    values = torch.cat([parameter.detach().flatten() for parameter in model])
    found, decays = [], []
    for rank in range(world_size):
        copy = nn.ParameterList([nn.Parameter(parameter.detach().clone()) for parameter in model])
        flat = FlatParameters(copy, Rank(rank, world_size), dtype=torch.float32)
        for shard in flat.shards():
            assert len(shard.weights) == len(shard.gradient) > 0
            found.append(shard.weights)
            decays += [shard.decayed] * len(shard.weights)
        assert all(torch.equal(a, b) for a, b in zip(copy, model, strict=True))
    assert torch.equal(torch.cat(found), values)
    assert decays == expected


def test_flat_keeps_fp32_master_weights_of_a_bf16_model_and_adds_gradients_in_fp32():
    model = nn.Linear(3, 1, bias=False)
    model.weight.data.copy_(torch.tensor([[1.0009765625, 2.0, 3.0]]))  # 1 + 2^-10, which bf16 does not have
    flat = FlatParameters(model, SoloTransport(), dtype=torch.bfloat16)
    assert (model.weight.dtype, flat.master_weights.dtype, flat.grads.dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.float32,
    )
    assert flat.master_weights[0] == 1.0009765625
    assert model.weight[0, 0] == 1
    for value in (256.0, 1.0, 1.0):  # in bf16, 256 + 1 + 1 stays 256
        model(torch.tensor([[value, 0, 0]], dtype=torch.bfloat16)).sum().backward()
    assert flat.reduce_gradients()[0] == 258
    assert model.weight.grad is None


def test_flat_parameters_start_from_those_of_rank_0():
    """Whatever each rank loaded or drew, all train the same model."""

    def work(transport):
        layer = torch.nn.Linear(3, 2)
        with torch.no_grad():
            layer.weight.fill_(float(transport.rank))
            layer.bias.fill_(10.0 + transport.rank)
        flat = FlatParameters(layer, transport, dtype=torch.float32)
        return flat.values.tolist(), flat.master_weights.tolist()

    results = StrictWorld(3).run(work)
    assert all(values == results[0][0] for values, _ in results)
    assert results[0][0][:8] == [0.0] * 6 + [10.0] * 2
    assert [value for _, master_weights in results for value in master_weights] == results[0][0]
