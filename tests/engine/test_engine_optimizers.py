"""Every optimizer by name: slices of 1 to 4 ranks make the update of torch's own on whole parameters."""

from functools import partial

import pytest
import torch
from testing.laid import whole_parameters
from testing.on_meta import OneOfMany
from testing.peaks import kept_bytes
from testing.strict import StrictWorld
from torch import nn
from transformers import LlamaConfig

from engine.optimizer_cases import CASES, keys_of, plain_optimizer
from lengthwise.comm import SoloTransport
from lengthwise.config import OptimizerConfig
from lengthwise.config.optimizer_config import OPTIMIZERS
from lengthwise.engine.byte_watch import LiveBytes
from lengthwise.engine.optimizer import sliced_optimizer
from lengthwise.engine.whole_optimizer import FUSED
from lengthwise.models import wrapped_layers
from lengthwise.models.model_source import build_skeleton
from tiers import more, some

STEPS, LR = 6, 1e-2
FUSED_CASES = [case for case in CASES if case.split()[0] in FUSED]


def make_model(width):
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 3))
    random = torch.Generator().manual_seed(0)  # of its own: ranks of a strict world are threads
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05, generator=random)
    return model


def make(transport, case, dtype=torch.float64, *, width=70, fused=None):
    model = make_model(width)
    config = OptimizerConfig.model_validate(keys_of(case))
    flat = whole_parameters(model, transport, dtype=dtype, layers=[*model], bucket_entries=1)
    return model, flat, sliced_optimizer(config, model, flat, transport.rank, fused=fused)


def objectives(model, step):
    """Two microbatches of a step, whose gradients add up."""
    dtype = model[0].weight.dtype
    for number in range(2):
        x = torch.randn(9, model[0].in_features, generator=torch.Generator().manual_seed(2 * step + number))
        yield model(x.to(dtype)).square().mean()


def train(model, optimizer, steps, limit=1.0):
    for step in steps:
        for objective in objectives(model, step):
            objective.backward()
        optimizer.end_step(LR / (step + 1), SoloTransport(), limit=limit)


def rehearse(optimizer, transport):
    with optimizer.rehearsing():
        optimizer.end_step(0.0, transport)


def plain(case, max_grad_norm):
    model = make_model(70).double()
    optimizer = plain_optimizer(case, list(model.parameters()))
    for step in range(STEPS):
        optimizer.zero_grad()
        for objective in objectives(model, step):
            objective.backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = LR / (step + 1)
        optimizer.step()
    return list(model.parameters())


KERNELS = [(case, fused) for case in CASES for fused in (False, True) if not fused or case in FUSED_CASES]


def test_every_optimizer_is_tried():
    assert {case.split()[0] for case in CASES} == set(OPTIMIZERS)
    assert {key for args in CASES.values() for key in args} >= {
        key for keys in OPTIMIZERS.values() for key in keys if key != "lr"
    }


@pytest.mark.parametrize(("case", "fused"), KERNELS)
@pytest.mark.parametrize(("ranks", "max_grad_norm"), [(3, 1e-3), (2, None), more(1, 1e-3), more(4, None)])
def test_slices_make_the_update_of_whole_parameters(case, fused, ranks, max_grad_norm):
    def work(transport):
        model, _, own = make(transport, case, fused=fused)
        rehearse(own, transport)  # which changes nothing of what follows
        for step in range(STEPS):
            for number, objective in enumerate(objectives(model, step)):
                if transport.rank == (step + number) % transport.world_size:
                    objective.backward()
            own.end_step(LR / (step + 1), transport, limit=max_grad_norm)
        return [each.detach().clone() for each in model.parameters()]

    wanted, start = plain(case, max_grad_norm), make_model(70).double()
    for found in StrictWorld(ranks).run(work):
        for got, expected, before in zip(found, wanted, start.parameters(), strict=True):
            torch.testing.assert_close(got, expected.detach(), rtol=1e-12, atol=1e-14)
            assert not torch.equal(got, before)


@pytest.mark.parametrize("case", CASES)
def test_an_entry_is_updated_to_the_same_bits_however_parameters_are_cut(case):
    """Vectors of a CPU round otherwise than one entry: no slice ends between two vectors of a parameter."""
    gradients = [torch.randn(each.shape, generator=torch.Generator().manual_seed(1)) for each in make_parameters()]

    def updated(ranks):
        found = [torch.full((each.numel(),), float("nan")) for each in gradients]
        for rank in range(ranks):
            transport = OneOfMany(rank, ranks)
            model = nn.ModuleList(nn.ParameterList([each]) for each in make_parameters())
            flat = whole_parameters(model, transport, dtype=torch.bfloat16, layers=[*model], bucket_entries=1)
            optimizer = sliced_optimizer(OptimizerConfig.model_validate(keys_of(case)), model, flat, rank)
            for step in range(4):
                for run in flat.layout.runs(rank):
                    own = gradients[run.parameter].flatten()[run.entry : run.entry + run.stop - run.start]
                    flat.grad_shard[run.start : run.stop] = own
                optimizer.scale_gradients(0.3)
                optimizer.update(LR / (step + 1))
            for run in flat.layout.runs(rank):
                own = flat.master_weights[run.start : run.stop]
                found[run.parameter][run.entry : run.entry + run.stop - run.start] = own
        return found

    whole = updated(1)
    assert not any(each.isnan().any() for each in whole)
    assert all(map(torch.equal, updated(5), whole))


def make_parameters():
    random = torch.Generator().manual_seed(0)
    shapes = [(3, 37), (103,), (2, 90), (5,)] * 15
    return [nn.Parameter(torch.randn(*shape, generator=random)) for shape in shapes]


@pytest.mark.parametrize(("case", "fused"), KERNELS)
def test_what_goes_on_from_its_state_is_the_same_to_the_bit(case, fused):
    model, flat, optimizer = make(SoloTransport(), case, torch.float32, fused=fused)
    train(model, optimizer, range(3))
    weights, states = flat.master_weights.clone(), optimizer.vectors()
    again, others, later = make(SoloTransport(), case, torch.float32, fused=fused)
    others.master_weights.copy_(weights)
    assert later.vectors().keys() == states.keys()
    later.take_vectors(states, updates=3)
    rehearse(later, SoloTransport())  # of a run that goes on, as of one that starts
    train(model, optimizer, range(3, STEPS))
    train(again, later, range(3, STEPS))
    assert torch.equal(flat.master_weights, others.master_weights)
    assert not torch.equal(flat.master_weights, weights)


@pytest.mark.parametrize("case", ["adamw", "sgd momentum"])
@pytest.mark.parametrize(("ranks", "dtype"), some([(1, torch.float32), (3, torch.bfloat16), (2, torch.float64)], 0, 1))
def test_an_offloaded_optimizer_makes_the_same_update_to_the_bit(case, ranks, dtype):
    """Its gradients are copied from the device's after they are clipped, its weights go back as values."""

    def work(transport, offload, state=None):
        model = make_model(70)
        config = OptimizerConfig.model_validate(keys_of(case, offload=offload))
        options = {"dtype": dtype, "layers": [*model], "bucket_entries": 1}
        flat = whole_parameters(model, transport, exact_on=torch.device("cpu") if offload else None, **options)
        optimizer = sliced_optimizer(config, model, flat, transport.rank)
        kept = [each for state in optimizer.optimizer.state.values() for each in state.values()]
        apart = {each.untyped_storage().data_ptr() for each in (flat.master_weights, *kept)}
        on_device = [flat.values, flat.grads, flat.grad_shard, *model.parameters()]
        if offload:
            assert not apart & {each.untyped_storage().data_ptr() for each in on_device}
        steps = range(STEPS) if state is None else range(STEPS // 2, STEPS)
        if state is not None:
            flat.master_weights.copy_(state[0])
            optimizer.take_vectors(state[1], updates=STEPS // 2)
            flat.publish()
        middle = None
        for step in steps:
            if step == STEPS // 2:
                middle = flat.master_weights.clone(), optimizer.vectors()
            for number, objective in enumerate(objectives(model, step)):
                if transport.rank == (step + number) % transport.world_size:
                    objective.backward()
            optimizer.end_step(LR / (step + 1), transport, limit=1e-3)
        return middle, [each.detach().clone() for each in model.parameters()]

    found = {offload: StrictWorld(ranks).run(partial(work, offload=offload)) for offload in (False, True)}
    states = {offload: [middle for middle, _ in each] for offload, each in found.items()}
    for offload in (False, True):  # from the state of the other
        again = StrictWorld(ranks).run(lambda t, o=offload: work(t, o, states[not o][t.rank]))
        for (_, own), (_, other), (_, expected) in zip(found[offload], again, found[False], strict=True):
            assert all(map(torch.equal, own, expected))
            assert all(map(torch.equal, other, expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, more(torch.float32)], ids=str)
@pytest.mark.parametrize(("case", "fused"), KERNELS)
def test_all_that_is_kept_is_there_before_the_first_step_and_its_end_needs_what_is_said(case, fused, dtype):
    config = OptimizerConfig.model_validate(keys_of(case))
    with LiveBytes() as live:
        model, flat, optimizer = make(SoloTransport(), case, dtype, width=1200, fused=fused)
        live.peak_bytes = before = live.now_bytes
        for step in range(STEPS):
            live.peak_bytes = live.now_bytes
            optimizer.end_step(LR, SoloTransport())
            assert live.peak_bytes - before <= optimizer.pending_bytes()[1] + (1 << 14), step
            assert live.now_bytes - before < 1 << 12
    assert abs(before - kept_bytes(model, flat, config)) < 1 << 14  # counters of steps


@pytest.mark.parametrize("case", CASES)
def test_what_torch_has_fused_is_on_the_cpu_too(case):
    groups = make(SoloTransport(), case)[2].optimizer.param_groups
    assert all(group.get("fused", False) == (case in FUSED_CASES) for group in groups)


def test_an_8b_model_starts_and_ends_a_step_within_6_and_16_by_w_bytes_a_parameter_and_one_layer():
    """Of Llama 3's shape in bf16, on no device: operations are counted, not run."""
    config = LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    model = build_skeleton(config)
    parameters = sum(each.numel() for each in model.parameters())
    assert 8.0e9 < parameters < 8.1e9
    layers = wrapped_layers(model)
    layer = sum(each.numel() for each in layers[0].parameters())
    world_size = 8
    transport = OneOfMany(0, world_size)
    with LiveBytes() as live:
        flat = whole_parameters(model, transport, dtype=torch.bfloat16, device=torch.device("meta"), layers=layers)
        optimizer = sliced_optimizer(OptimizerConfig(), model, flat, 0, fused=True)
        optimizer.step(1e-3)
    kept = parameters * (6 + 16 / world_size)
    assert kept <= live.now_bytes < kept * 1.001
    assert live.peak_bytes <= kept + 2 * layer
