"""Parameters in flat buffers, and cut over ranks by units: slices, gradients, memory, order, values that are away."""

import copy
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testing import (
    LiveBytes,
    RecordingTransport,
    build_pair,
    family_difference,
    make_plan,
    random_plan,
    run_ranks,
    tiny_family_config,
)
from testing.laid import freed_parameters, whole_parameters
from testing.late import LateTransport
from testing.order import check_order, rank_groups
from testing.peaks import kept_bytes
from testing.strict import StrictWorld
from torch import nn

from engine.sharded_runs import CPU, KINDS, LENGTHS, WAVES, WAVES_OF_NODES, OneOfSame, build, in_waves, run, shard
from lengthwise.comm import Lone, SoloTransport
from lengthwise.config import OptimizerConfig
from lengthwise.core.errors import ModelRefused
from lengthwise.core.plan import Piece
from lengthwise.cost import shape_from_config
from lengthwise.cost.memory import StepMemory, gathered_bytes
from lengthwise.engine.optimizer import sliced_optimizer
from lengthwise.engine.units import UnitPart
from lengthwise.models import wrapped_layers
from lengthwise.models.families import FAMILIES
from properties import costliest
from tiers import more, some

# No wrap for recomputation; layers that run more than once, which is refused.
FAMILIES_HERE = [each for each in FAMILIES if each not in ("ctrl", "hrm_text")]


@pytest.mark.parametrize(
    ("family", "ranks", "ranks_per_node"),
    [*some([(name, 3, 3) for name in FAMILIES_HERE], FAMILIES_HERE.index("gemma3_text")), ("qwen3_moe", 4, 2)],
)
def test_gradients_are_those_of_one_process(family, ranks, ranks_per_node):
    """Computed again or not, a loss in chunks, experts without tokens, ranks without work, rings over several nodes."""
    config = tiny_family_config(family)
    if family == "qwen3_moe":
        config.output_router_logits, config.router_aux_loss_coef = True, 0.5
    waves = WAVES if ranks == 3 else WAVES_OF_NODES
    plan = in_waves(make_plan(ranks, LENGTHS, waves, layers=config.num_hidden_layers), *KINDS)
    how = {"logits_at_once": 7 * config.vocab_size, "ranks_per_node": ranks_per_node}
    found = family_difference(build_pair(family, config), plan, LENGTHS, precision="fp64", **how)
    assert max(found.loss, found.router_loss) <= 1e-13
    assert found.gradient <= 1e-12


def test_a_sum_has_zeros_where_there_is_no_gradient(monkeypatch):
    """Between parameters, at the end of a unit, and of parameters that a microbatch does not reach; memory is NaN."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: empty(*shape, **how).fill_(float("nan")))
    own, gradient = torch.zeros(192), torch.zeros(192, dtype=torch.float64)
    shapes, starts = [(3, 5), (7,), (64,)], (0, 64, 128 - 57)  # the last begins where the second ends
    part = UnitPart(shapes, starts, entries=192, dtype=torch.float32, own=own, gradient=gradient)
    first, second, third = part.parameters
    for reached in ([first, third], [second], []):
        for each in reached:
            each.grad = torch.full(each.shape, 1.5)
        part.reduce(SoloTransport(), None)
        part.add_sum()
    expected = torch.zeros(192, dtype=torch.float64)
    expected[:15] = expected[64:135] = 1.5
    assert torch.equal(gradient, expected)


@given(data=st.data())
@costliest
def test_gradients_of_any_waves_are_those_of_one_process(data):
    """Lengths of 1 and primes, fewer sequences than ranks, more ranks than entries of some parameters."""
    ranks, per_node = data.draw(st.sampled_from(((2, 2), (3, 3), (5, 5), (8, 8), (8, 4), (8, 2), (6, 3), (4, 2))))
    lengths = data.draw(st.lists(st.sampled_from((1, 2, 3, 7, 13, 2 * ranks - 1, 29, 40)), min_size=1, max_size=7))
    if max(lengths) == 1:
        lengths.append(2)  # one token has no next one
    config = tiny_family_config(data.draw(st.sampled_from(("llama", "qwen3"))))
    config.tie_word_embeddings = data.draw(st.booleans())
    choose = random.Random(data.draw(st.integers(0, 2**16)))
    plan = random_plan(choose, ranks, lengths, layers=2, num_heads=4)
    plan = in_waves(plan, *choose.choices(KINDS, k=2))
    found = family_difference(build_pair("llama", config), plan, lengths, precision="fp64", ranks_per_node=per_node)
    assert max(found.loss, found.gradient) <= 1e-11


def test_reading_a_value_between_steps_is_an_error_in_words():
    """It was the end of the process: so in one of its own. What needs no value stays, and steps are as before."""

    def work(transport):
        model = build()
        parameters = shard(model, transport)
        plan, losses = in_waves(make_plan(2, LENGTHS, [[Piece(ranks=(0,), sequences=(0, 1))]], layers=2)), []
        for _ in range(2):
            losses.append(run(model, parameters, transport, plan).loss_sum)
            parameters.publish()
            weight = model.model.layers[1].mlp.up_proj.weight
            for name, read in (("norm", torch.norm), ("data", lambda each: each.data + 1)):
                with pytest.raises(ModelRefused, match=f"{name} of a parameter.*lie over the ranks"):
                    read(weight)
            with pytest.raises(ModelRefused, match="a parameter whose values lie over the ranks"):
                model.model.layers[1].mlp.up_proj(torch.ones(1, weight.shape[1]))
            assert "lie over the ranks" in f"{weight}"
        return losses

    for first, again in run_ranks(work, 2):
        assert first == again


@pytest.mark.parametrize("offload", [True, more(False)])
def test_what_the_optimizer_leaves_on_the_device_is_what_the_memory_model_counts(offload):
    model, config, ranks, dtype = build(num_hidden_layers=4), OptimizerConfig(offload=offload), 4, torch.bfloat16
    shape, exact_on = shape_from_config(model.config.to_dict()), CPU if offload else None

    def work(transport, layout, per_node=None):
        own = copy.deepcopy(model)
        if layout == "zero1":
            parameters = whole_parameters(own, transport, dtype=dtype, layers=wrapped_layers(own), exact_on=exact_on)
        else:
            parameters = shard(own, transport, dtype, per_node, exact_on)
        optimizer = sliced_optimizer(config, own, parameters, transport.rank)
        count, width = sum(each.numel() for each in own.parameters()), dtype.itemsize
        memory = StepMemory(shape=shape, dtype_bytes=width, parameters=count, ranks=ranks, offloads=offload)
        expected = replace(memory, shard=layout, ranks_per_node=per_node).state_bytes()
        host = sum(each.nbytes for each in (*parameters.state().values(), *optimizer.vectors().values()))
        host += parameters.grad_shard.nbytes
        return kept_bytes(own, parameters, config) / expected, host / memory.host_bytes() if offload else 1.0

    for layout in (("zero1",), ("zero3",), ("hybrid", 2)):
        for found in StrictWorld(ranks).run(lambda t, layout=layout: work(t, *layout)):
            assert found == pytest.approx((1, 1), rel=0.05), layout


@pytest.mark.parametrize(
    ("tied", "per_node", "casts_to"),
    [(True, 4, None), (False, 2, None), (False, 4, torch.bfloat16), more(False, 2, torch.bfloat16)],
)
def test_what_is_gathered_is_what_the_memory_model_counts(tied, per_node, casts_to):
    """Of a wave with next to no tokens in bf16, or in fp32 with linear layers gathered in bf16 and next to no words."""
    words, dtype = (64, torch.float32) if casts_to else (8192, torch.bfloat16)
    sizes = {"hidden_size": 256, "intermediate_size": 800, "head_dim": 64, "num_hidden_layers": 4}
    model = build(vocab_size=words, tie_word_embeddings=tied, **sizes)
    count, layer = (sum(each.numel() for each in part.parameters()) for part in (model, model.model.layers[0]))
    plan = in_waves(make_plan(4, (2,), [[Piece(ranks=(0,), sequences=(0,))]], layers=4), "layer")
    transport = LateTransport(OneOfSame(0, 4))
    parameters = shard(model, transport, dtype, per_node, casts_to=casts_to)
    narrow = {"layer_bytes": 2} if casts_to else {}
    if casts_to:
        sizes = {"shape": shape_from_config(model.config.to_dict()), "parameters": count, "ranks": 4, **narrow}
        memory = StepMemory(**sizes, shard="hybrid", ranks_per_node=per_node)
        assert kept_bytes(model, parameters, OptimizerConfig()) == pytest.approx(memory.state_bytes(), rel=0.02)
    with LiveBytes(*model.parameters(), *parameters.tensors()) as live:
        run(model, parameters, transport, plan, (2,), dtype=dtype, autocast=casts_to)
    how = {"ranks": per_node, "ties": tied, "casts": per_node == 4, **narrow}
    expected = gathered_bytes(layer, 256 * words, dtype_bytes=dtype.itemsize, **how)
    assert live.peak_bytes == pytest.approx(expected, rel=0.03)


@given(
    seed=st.integers(0, 2**16),
    kind=st.sampled_from(KINDS),
    family=st.sampled_from(("llama", "mistral")),
    tied=st.booleans(),
    chunks=st.sampled_from((None, 1, 5)),
)
@costliest
def test_all_that_ranks_post_completes_on_one_strict_queue_a_rank(seed, kind, family, tied, chunks):
    """Gathers, sums, heads and rings; collectives of a node's ranks have the same keys, whatever tokens these have."""
    choose = random.Random(seed)
    ranks, per_node = choose.choice(((2, 2), (3, 3), (4, 4), (4, 2), (6, 2), (6, 3)))
    lengths = [choose.randint(2, 40) for _ in range(choose.randint(1, 6))]
    plan = in_waves(random_plan(choose, ranks, lengths, layers=2, num_heads=4), kind)
    model = build(family, tie_word_embeddings=tied)
    windows = [getattr(model.config, "sliding_window", None)] * 2

    def work(transport):
        own, recording = copy.deepcopy(model), RecordingTransport(transport)
        at_once = None if chunks is None else chunks * own.config.vocab_size
        run(own, shard(own, recording, ranks_per_node=per_node), recording, plan, lengths, logits_at_once=at_once)
        return [each.key for each in recording.calls if each.key is not None]

    keys = StrictWorld(ranks).run(work)
    assert keys == [keys[rank - rank % per_node] for rank in range(ranks)]
    how = {"windows": windows, "tied": tied, "ranks_per_node": per_node}
    for rank in range(0, ranks, per_node):
        labels = [label for label, posted in rank_groups(plan, rank, **how) if ", " in label]
        expected = [each.split(", ")[1:] for each in labels if " of unit " in each]
        got = [["backward" if key.is_backward else "forward", key.kind] for key in keys[rank]]
        assert got == [[name, what.split()[0]] for name, what in expected], "as `check_order` has them"
    assert check_order(plan, layers=2, **how) >= 0


def freed_as_nan(self):
    self.wait()
    self._whole.fill_(float("nan"))


@pytest.mark.parametrize("kind", some(KINDS, 1))
def test_nothing_is_read_before_it_is_there_or_after_it_is_freed(kind, monkeypatch):
    """Under a transport that moves at `wait`, with NaN in what has not arrived and in units that were freed."""
    model, plan = build(tie_word_embeddings=False), in_waves(make_plan(3, LENGTHS, WAVES, layers=2), kind)

    def work(transport, around):
        own, transport = copy.deepcopy(model), around(transport)
        parameters = shard(own, transport)
        run(own, parameters, transport, plan, logits_at_once=7 * own.config.vocab_size)
        run(own, parameters, transport, plan, logits_at_once=7 * own.config.vocab_size, train=False)
        return parameters.gather_gradients()

    expected = StrictWorld(3).run(lambda t: work(t, lambda t: t))
    monkeypatch.setattr(UnitPart, "free", freed_as_nan)
    found = StrictWorld(3).run(lambda t: work(t, LateTransport))
    for name, each in expected[0].items():
        assert torch.equal(found[0][name], each), name


def test_a_model_that_runs_its_layers_in_another_order_is_refused():
    plan = in_waves(make_plan(2, (5,), [[Piece(ranks=(0,), sequences=(0,))]], layers=2))

    def work(transport):
        model = build()
        layers = wrapped_layers(model)[::-1]
        parameters = freed_parameters(model, transport, dtype=torch.float64, device=CPU, layers=layers)
        run(model, parameters, transport, plan, (5,))

    with pytest.raises(ModelRefused, match="layer 0 again, or late"):
        StrictWorld(2).run(work)


def as_one(layout, shards):
    """Put the shards of all ranks together as the whole buffer."""
    whole = torch.full((layout.entries,), float("nan"), dtype=shards[0].dtype)
    for rank, own in enumerate(shards):
        for bucket in range(layout.num_buckets):
            whole[layout.in_whole(bucket, rank)] = own[layout.in_shard(bucket)]
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
