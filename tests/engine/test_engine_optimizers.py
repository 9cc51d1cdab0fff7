"""Every optimizer by name: slices of 1 to 4 ranks make the update of torch's own on whole parameters."""

import pytest
import torch
from testing.laid import whole_parameters
from testing.on_meta import OneOfMany
from testing.peaks import kept_bytes
from testing.strict import StrictWorld
from torch import nn

from lengthwise.comm import SoloTransport
from lengthwise.config import OptimizerConfig
from lengthwise.config.optimizer_config import OPTIMIZERS
from lengthwise.engine.byte_watch import LiveBytes
from lengthwise.engine.optimizer import sliced_optimizer
from lengthwise.engine.whole_optimizer import FUSED
from tiers import more

STEPS, LR = 6, 1e-2
CASES = {
    "adamw": {"betas": [0.8, 0.9], "weight_decay": 0.3},
    "adam": {"betas": [0.8, 0.9], "weight_decay": 0.3, "eps": 1e-4},
    "sgd": {"weight_decay": 0.3},
    "sgd momentum": {"momentum": 0.9, "weight_decay": 0.3},
    "lion": {"weight_decay": 0.3},
}
_TORCH = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}
FUSED_CASES = [case for case in CASES if case.split()[0] in FUSED]


def keys_of(case, **more):
    """The optimizer section of a run file."""
    return {"name": case.split()[0], **CASES[case], **more}


class PlainLion:
    """Lion as its paper writes it, on whole parameters."""

    def __init__(self, groups):
        self.param_groups = groups
        self._average = {}

    def zero_grad(self):
        for group in self.param_groups:
            for each in group["params"]:
                each.grad = None

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for each in group["params"]:
                m = self._average.get(each, torch.zeros_like(each))
                c = 0.9 * m + (1 - 0.9) * each.grad
                each -= group["lr"] * (torch.sign(c) + group["weight_decay"] * each)
                self._average[each] = 0.99 * m + (1 - 0.99) * each.grad


def plain_optimizer(case, parameters):
    """torch's own optimizer on whole parameters, decay only on those of two dimensions."""
    name, args = case.split()[0], {**CASES[case]}
    decay = args.pop("weight_decay", 0.0)
    groups = [
        {"params": [each for each in parameters if (each.dim() >= 2) == decayed], "weight_decay": decay * decayed}
        for decayed in (True, False)
    ]
    if name == "lion":
        return PlainLion(groups)
    return getattr(torch.optim, _TORCH[name])(groups, lr=1.0, foreach=False, **args)


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
@pytest.mark.parametrize(("ranks", "max_grad_norm"), [(3, 1e-3), (2, 1e3), more(2, None)])
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
def test_all_that_is_kept_is_there_before_the_first_step_and_its_end_needs_what_is_said(case, fused):
    config = OptimizerConfig.model_validate(keys_of(case))
    with LiveBytes() as live:
        model, flat, optimizer = make(SoloTransport(), case, torch.bfloat16, width=1200, fused=fused)
        live.peak_bytes = before = live.now_bytes
        for step in range(STEPS):
            live.peak_bytes = live.now_bytes
            optimizer.end_step(LR, SoloTransport())
            assert live.peak_bytes - before <= optimizer.pending_bytes()[1] + (1 << 14), step
            assert live.now_bytes - before < 1 << 12
    assert abs(before - kept_bytes(model, flat, config)) < 1 << 14  # counters of steps
