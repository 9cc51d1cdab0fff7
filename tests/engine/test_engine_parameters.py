"""Flat buffers: every parameter in one rank's slice, master weights exact, gradients in fp32, all ranks alike."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testing.laid import whole_parameters
from torch import nn

from lengthwise.comm import Lone, SoloTransport
from lengthwise.config import OptimizerConfig
from lengthwise.core.errors import ModelRefused
from lengthwise.engine.byte_watch import LiveBytes
from lengthwise.engine.optimizer import sliced_optimizer


def as_one(layout, shards):
    """Put the shards of all ranks together as the whole buffer."""
    whole = torch.full((layout.entries,), float("nan"), dtype=shards[0].dtype)
    for rank, shard in enumerate(shards):
        for bucket in range(layout.num_buckets):
            whole[layout.in_whole(bucket, rank)] = shard[layout.in_shard(bucket)]
    return whole


@given(
    st.lists(
        st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=4), min_size=1, max_size=5
    ),
    st.integers(1, 12),
    st.sampled_from([1, 100, 1000]),
)
def test_slices_cover_every_parameter_once_with_its_own_decay(layers, world_size, bucket_entries):
    """Layers of parameters of any shape; some end a bucket."""
    model = nn.ModuleList(nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes]) for shapes in layers)
    shards, decays = [], []
    for rank in range(world_size):
        own = copy.deepcopy(model)
        how = {"dtype": torch.float32, "layers": [*own], "bucket_entries": bucket_entries}
        flat = whole_parameters(own, Lone(rank, world_size), **how)
        weights, decayed = (torch.full_like(flat.grad_shard, float("nan")) for _ in range(2))
        for group in sliced_optimizer(OptimizerConfig(), own, flat, rank).optimizer.param_groups:
            for piece in group["params"]:
                place = slice(piece.storage_offset(), piece.storage_offset() + len(piece))
                assert weights[place].isnan().all()
                weights[place], decayed[place] = piece.detach(), float(group["weight_decay"] > 0)
        shards.append(weights)
        decays.append(decayed)
        assert all(torch.equal(a, b) for a, b in zip(own.parameters(), model.parameters(), strict=True))
        for each in (*own.parameters(), *flat.views(flat.grads)):
            assert each.storage_offset() * each.element_size() % 128 == 0, "slower products, and grouped ones refuse it"
    weights, decays = (flat.views(as_one(flat.layout, each)) for each in (shards, decays))
    for parameter, weight, decay in zip(model.parameters(), weights, decays, strict=True):
        assert torch.equal(weight, parameter)
        assert (decay == (parameter.ndim >= 2)).all()


@pytest.mark.parametrize("world_size", [1, 8])
@pytest.mark.parametrize(("dtype", "a_parameter"), [(torch.bfloat16, 6), (torch.float32, 8)], ids=str)
def test_flat_start_needs_no_more_than_is_kept(dtype, a_parameter, world_size):
    """6 + 16/W bytes a parameter in bf16, of them 8/W for the optimizer, at every moment; 8B on 8 x 80 GB starts."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(6)))
    entries = 6 * 512 * 512
    with LiveBytes(*model.parameters()) as live:
        flat = whole_parameters(model, Lone(0, world_size), dtype=dtype, layers=[*model], bucket_entries=1)
    exact_alone = world_size == 1 and dtype == torch.float32
    shard = 0 if exact_alone else 4 if world_size == 1 else 8 / world_size  # the rest of 16/W are moments
    assert live.peak_bytes <= entries * (a_parameter + shard) + 8192
    assert sum(each.nbytes for each in {id(x): x for x in flat.tensors()}.values()) == live.now_bytes


def test_flat_keeps_fp32_master_weights_of_a_bf16_model_and_adds_gradients_in_fp32():
    model = nn.Linear(3, 1, bias=False)
    model.weight.data.copy_(torch.tensor([[1.0009765625, 2.0, 3.0]]))  # 1 + 2^-10, which bf16 does not have
    flat = whole_parameters(model, SoloTransport(), dtype=torch.bfloat16)
    assert (model.weight.dtype, flat.master_weights.dtype, flat.grads.dtype) == (torch.bfloat16, *[torch.float32] * 2)
    assert flat.master_weights[0] == 1.0009765625
    assert model.weight[0, 0] == 1
    for value in (256.0, 1.0, 1.0):  # in bf16, 256 + 1 + 1 stays 256
        model(torch.tensor([[value, 0, 0]], dtype=torch.bfloat16)).sum().backward()
    assert flat.reduce_gradients()[0] == 258
    assert model.weight.grad is None


@pytest.mark.parametrize("exact_on", [None, torch.device("cpu")])
def test_what_somebody_wrote_into_values_is_taken_into_exact_ones_and_no_other_entry(exact_on):
    """By `.data` and by `copy_`; nothing changes where nobody did."""
    model = nn.Sequential(*(nn.Linear(70, 9) for _ in range(5)))
    how = {"dtype": torch.bfloat16, "layers": [*model], "bucket_entries": 1, "exact_on": exact_on}
    flat = whole_parameters(model, SoloTransport(), **how)
    exact = flat.views(flat.master_weights)
    flat.take_changes()
    for step in range(3):
        flat.master_weights.mul_(1.01)
        flat.publish()
        expected = [each.clone() for each in exact]
        flat.take_changes()
        model[3].weight.data[2, step] = 0.3
        with torch.no_grad():
            model[1].bias.copy_(torch.arange(9.0))
        expected[6][2, step] = torch.tensor(0.3).bfloat16()
        expected[3].copy_(torch.arange(9.0))
        for _ in range(2):
            flat.take_changes()
            assert all(map(torch.equal, exact, expected))


def test_another_parameter_in_the_same_memory_is_refused():
    """Its gradients would be added to nothing."""
    model = nn.Linear(3, 1, bias=False)
    flat = whole_parameters(model, SoloTransport(), dtype=torch.bfloat16)
    flat.attach_gradients()
    model.weight = nn.Parameter(model.weight.detach())
    with pytest.raises(ModelRefused, match="1 trainable parameters in their places"):
        flat.attach_gradients()
