"""Sums and values that travel while backward and forward run: the same bits, and no collective beside a transfer."""

import copy
from functools import cache

import pytest
import torch
from sharded_runs import WAVES_OF_NODES, in_waves
from testing import RecordingTransport, make_batch, make_plan, tiny_model
from testing.laid import freed_parameters, whole_parameters
from testing.plans import in_turn
from testing.strict import StrictWorld

from lengthwise.attention import choose_kernel
from lengthwise.comm import Mesh
from lengthwise.config import OptimizerConfig
from lengthwise.core.plan import Piece
from lengthwise.engine.optimizer import sliced_optimizer
from lengthwise.engine.step import StepContext, run_part
from lengthwise.models import keep_double, wrapped_layers
from lengthwise.program import all_end_alone
from tiers import some

CPU = torch.device("cpu")
LENGTHS = (37, 5, 9, 30, 3, 14)
# Rank 2 ends in a ring, ranks 0 and 1 in microbatches of their own; then a ring of all first; then no ring.
PLANS = [
    [
        [Piece(ranks=(0, 1, 2), sequences=(0,))],
        [Piece(ranks=(2, 1), sequences=(3,)), Piece(ranks=(0,), sequences=(1, 2))],
        [Piece(ranks=(1,), sequences=(4,))],
        [Piece(ranks=(0,), sequences=(5,))],
    ],
    [[Piece(ranks=(0, 1, 2), sequences=(0, 1, 2, 3, 4, 5))]],
    [[Piece(ranks=(0,), sequences=(0, 1))], [Piece(ranks=(1,), sequences=(2, 3, 4, 5))]],  # and rank 2 has nothing
]
LAST_ALONE = [
    [Piece(ranks=(0, 1), sequences=(0,))],
    [Piece(ranks=(0,), sequences=(1,))],
    [Piece(ranks=(1,), sequences=(2,))],
]


def plans_of(recompute):
    return [in_turn(make_plan(3, LENGTHS, each), recompute=[recompute]) for each in PLANS]


# Some experts that no token of a rank reaches; routers are counted between the forwards and backwards of a step.
FAMILIES = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 8, "output_router_logits": True, "router_aux_loss_coef": 0.5},
}


@cache
def built(family):
    return tiny_model(family, FAMILIES[family])


def train(inner, family, dtype, recompute, *, overlaps):
    """Run steps; return the calls of each, the values after it, and how many sums were begun early."""
    transport = RecordingTransport(inner)
    model = copy.deepcopy(built(family))
    flat = whole_parameters(
        model,
        transport,
        dtype=dtype,
        layers=wrapped_layers(model),
        bucket_entries=1,
        overlaps=overlaps,
        values_late=overlaps,
    )
    assert flat.layout.num_buckets > 2
    optimizer = sliced_optimizer(OptimizerConfig(), model, flat, transport.rank)
    names, values, norms = [], [], []
    with keep_double(dtype):
        for number, plan in enumerate(plans_of(recompute)):
            transport.calls.clear()
            batch = make_batch(LENGTHS, vocab=48, seed=number)
            context = StepContext(model, Mesh(transport, 1), choose_kernel(CPU), name=f"step {number}", parameters=flat)
            run_part(plan, batch, context)
            names.append([(call.name, call.phase) for call in transport.calls])
            norms.append(optimizer.end_step(1e-2, transport, limit=0.1))
        flat.published()
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return names, norms, values


@pytest.mark.parametrize("family", some(FAMILIES))
def test_overlapped_steps_are_those_of_any_other_to_the_bit(family):
    """A strict world: it refuses a transfer posted beside a collective, and ranks whose collectives differ in order."""
    built(family)
    apart, overlapped = (
        StrictWorld(3).run(lambda t, on=on: train(t, family, torch.bfloat16, "layer", overlaps=on))
        for on in (False, True)
    )
    for (_, norms, values), (_, other_norms, others) in zip(apart, overlapped, strict=True):
        assert norms == other_norms
        assert all(torch.equal(values[name], others[name]) for name in values)
    begun = [[sum(name == "reduce_scatter" for name, _ in step) for step in names] for names, *_ in overlapped]
    assert all(len(set(step)) == 1 and step[0] > 2 for step in zip(*begun, strict=True)), "before the step's end"
    assert not any(name == "reduce_scatter" for names, *_ in apart for step in names for name, _ in step)
    for step in (step for names, *_ in overlapped for step in names):
        assert (
            "exchange"
            not in [name for name, _ in step][step.index(next(c for c in step if c[0] == "reduce_scatter")) :]
        )


def train_in_nodes(inner, *, overlaps):
    """Run two steps on nodes of two ranks; return the calls of each, and this rank's sums after it."""
    transport, model = RecordingTransport(inner), copy.deepcopy(built("llama"))
    flat = freed_parameters(model, transport, dtype=torch.bfloat16, ranks_per_node=2, overlaps=overlaps)
    found = []
    for number, pieces in enumerate((WAVES_OF_NODES, WAVES_OF_NODES[:3])):  # the first ends in a ring on one rank
        transport.calls.clear()
        plan, batch = in_waves(make_plan(4, LENGTHS, pieces)), make_batch(LENGTHS, vocab=48, seed=number)
        context = StepContext(model, Mesh(transport, 1), choose_kernel(CPU), name=f"step {number}", parameters=flat)
        run_part(plan, batch, context)
        between = [call.phase for call in transport.calls if call.name == "reduce_scatter" and call.key is None]
        found.append((between, flat.reduce_gradients().clone()))
        flat.clear_gradients()
    return found


def test_sums_between_nodes_begin_while_the_last_wave_runs_backward_if_no_rank_ends_in_a_ring():
    built("llama")
    apart, overlapped = (StrictWorld(4).run(lambda t, on=on: train_in_nodes(t, overlaps=on)) for on in (False, True))
    for rank, other in zip(apart, overlapped, strict=True):
        assert all(torch.equal(own, early) for (_, own), (_, early) in zip(rank, other, strict=True))
        (ends_in_ring, _), (ends_alone, _) = other
        assert all("sum of gradients" in phase for phase in ends_in_ring)
        in_backward = ["backward" in phase for phase in ends_alone]
        assert len(in_backward) == len(ends_in_ring) > 2
        assert in_backward == [True] * len(in_backward)


@pytest.mark.parametrize(
    ("microbatches", "first", "alone"),
    [
        (PLANS[0], (), False),
        (LAST_ALONE, (1, 2), False),
        (PLANS[2], (), True),
        ([[Piece(ranks=(0, 1), sequences=(0,)), Piece(ranks=(0,), sequences=(1,))]], (), False),
    ],
)
def test_all_end_alone_counts_the_order_in_which_microbatches_run(microbatches, first, alone):
    assert all_end_alone(make_plan(3, LENGTHS, microbatches), first=first) is alone
