"""What travels while a step runs, to the same bits, and what the host waits for: only where it must.

Waits are those of a step on tensors without values, of long contexts, with the calls of a GPU.
"""

import copy
from dataclasses import dataclass, field
from functools import cache
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, get_peft_model
from sharded_runs import KINDS, WAVES_OF_NODES, in_waves
from testing import RecordingTransport, make_batch, make_plan, tiny_family_config, tiny_model
from testing.laid import freed_parameters, stage_parameters, whole_parameters
from testing.on_meta import HOPPER, META, OneOfMany, device_without_values, pinned_store_on_meta
from testing.pipelines import as_pipeline
from testing.plans import in_turn
from testing.strict import StrictWorld
from testing.tiny import VARIANTS, VOCAB
from transformers import AutoModelForCausalLM

from lengthwise.attention import choose_kernel
from lengthwise.comm import Mesh
from lengthwise.config import OptimizerConfig
from lengthwise.core.plan import Piece
from lengthwise.engine.offloading import Offloading
from lengthwise.engine.optimizer import sliced_optimizer
from lengthwise.engine.stage_share import StageShare
from lengthwise.engine.step import StepContext, run_part
from lengthwise.models import FAMILIES, Computing, ModelStage, choose_model_kernel, keep_double, wrapped_layers
from lengthwise.models.adapter import ATTENTION_NAME, register_attention
from lengthwise.models.experts import choose_experts, needs_of
from lengthwise.program import all_end_alone
from lengthwise.program.stage_program import cut_layers
from tiers import more, some

BF16 = torch.bfloat16
PACKS = ((9, 12, 6000, 7), [[Piece(ranks=(0,), sequences=(0, 2, 3))], [Piece(ranks=(0,), sequences=(1,))]])
RINGS = (
    (100_000, 5000, 30, 7, 20_000),
    [
        [Piece(ranks=(0, 2, 1), sequences=(0,))],
        [Piece(ranks=(3,), sequences=(1,)), Piece(ranks=(0,), sequences=(2, 3))],
        [Piece(ranks=(2, 0, 1, 3), sequences=(4,), heads=2)],
    ],
)
FLASH, CUDNN = "_flash_attention", "_scaled_dot_product_cudnn_attention"
STEP = ["copy to the host: step.run_part", "event: clock._seconds_between"]
NORM = ["number: norm.gradient_norm"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step of a rank, and what it waits for at its end beside the norm."""

    family: str = "llama"
    changes: dict = field(default_factory=dict)
    plan: tuple = RINGS
    rank: int = 0
    recompute: tuple = ("none",)
    node: int = 0  # ranks that share parameters; 0: each has all
    stages: int = 1
    adapters: bool = False
    offload: float = 0.0  # of activations
    host_optimizer: bool = False
    once: tuple = ()  # waits of a model's first step alone
    end: tuple = ()


BALANCE = {**VARIANTS["mixtral, router loss"][1], "sliding_window": None}
LONG_FACTORS = ("copy to the device: modeling_rope_utils._compute_longrope_parameters",)
FULL = {"use_sliding_window": False}
UPDATE_ON_HOST = "copy to the host: optimizer._bring_gradients"
CASES = {
    "packs": Case(plan=PACKS, changes=VARIANTS["llama, rope dynamic"][1]),
    "rings, split heads, every kind of recomputation": Case(recompute=KINDS),
    "windows": Case(family="gemma3_text", recompute=KINDS, rank=2),
    "sinks": Case(family="gpt_oss", recompute=("layer",)),
    "grouped experts": Case(family="qwen3_moe", changes=FULL, recompute=KINDS),
    "balance loss of routers": Case(family="mixtral", changes=BALANCE),
    "longrope": Case(changes=VARIANTS["llama, rope longrope"][1], once=LONG_FACTORS),
    "adapters": Case(adapters=True),
    "zero3": Case(node=4, recompute=KINDS),
    "hybrid, grouped experts": Case(family="qwen3_moe", changes=FULL, node=2, recompute=KINDS),
    "last of two stages": Case(stages=2, recompute=KINDS, rank=1),
    "activations on the host": Case(changes={"num_hidden_layers": 4}, offload=0.5),
    "optimizer on the host, zero3": Case(node=4, host_optimizer=True, end=(UPDATE_ON_HOST,)),
}
DEFAULT = ("packs", "grouped experts", "zero3", "last of two stages", "optimizer on the host, zero3")


def model_of(case):
    register_attention()
    config = tiny_family_config(case.family, {"max_position_embeddings": 1 << 20} | case.changes)
    with META:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).train()
        if case.adapters:
            model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).get_base_model()
    experts = needs_of(model, BF16, on_gpu=True, capability=HOPPER.capability)
    if experts.replaceable:
        model.set_experts_implementation(choose_experts("auto", experts)[0])
    return model


def plan_of(case, layers):
    lengths, pieces = case.plan
    ranks = 1 + max(rank for each in pieces for piece in each for rank in piece.ranks)
    plan = make_plan(ranks, lengths, pieces, layers=layers)
    plan = in_turn(plan, recompute=case.recompute, offload=[case.offload])
    if case.stages > 1:
        return as_pipeline(plan, case.stages, recompute=case.recompute)
    return in_waves(plan, *case.recompute) if case.node else plan


def prepare(case, model, transport):
    """Cut a model as the case says; return its parameters, and where it runs."""
    host = torch.device("cpu") if case.host_optimizer else None
    how = {"dtype": BF16, "device": META, "exact_on": host}
    if case.stages > 1:
        mesh, chunks = Mesh(transport, case.stages), cut_layers([1.0] * 2, case.stages)
        stage = ModelStage(model, chunks, stages=case.stages, stage=mesh.stage)
        with patch.object(StageShare, "saved"):  # which asks the other stages
            return stage_parameters(stage, mesh, **how), {"mesh": mesh, "chunks": stage.own}
    how["layers"], there = wrapped_layers(model), {"mesh": Mesh(transport, 1)}
    if case.node:
        return freed_parameters(model, transport, ranks_per_node=case.node, **how), there
    return whole_parameters(model, transport, overlaps=True, **how), there


def run_case(case):
    """Run a step; return what it waits for in its microbatches, and at its end, and the operators of both."""
    model = model_of(case)
    plan, batch = plan_of(case, model.config.num_hidden_layers), make_batch(case.plan[0], vocab=VOCAB)
    with device_without_values() as waits:
        kernel = choose_model_kernel(model.config, Computing(), META, dtype=BF16)
        transport = OneOfMany(case.rank, plan.ranks * case.stages)
        parameters, there = prepare(case, model, transport)
        optimizer = sliced_optimizer(OptimizerConfig(offload=case.host_optimizer), model, parameters, case.rank)
        offloading = Offloading(model, kernel, pinned_store_on_meta()) if case.offload else None
        waits.found.clear()
        how = {"name": "step", "kernel": kernel, "parameters": parameters, "offloading": offloading}
        run_part(plan, batch, StepContext(model=model, **there, **how))
        during = waits.take()
        optimizer.end_step(1e-3, transport)
        return during, waits.take(), waits.operators


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # peft reads it
@pytest.mark.parametrize("name", [name if name in DEFAULT else more(name) for name in CASES])
def test_a_step_waits_for_its_device_where_it_must(name):
    """The sums of losses are read once, when all of a step was posted, with its clock, and the norm at its end."""
    case = CASES[name]
    during, end, operators = run_case(case)
    assert during == [*case.once, *STEP]
    assert end == [*NORM, *case.end]
    for kernel in (FLASH, CUDNN):
        assert {f"{kernel}_forward", f"{kernel}_backward"} & operators, kernel


ASKING = "jetmoe"  # cannot run without the numbers that its experts ask for
WAITING = ("longcat_flash",)  # whose layers ask which experts have tokens


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", sorted({*FAMILIES} - {ASKING}))
def test_no_layer_of_a_family_waits(family):
    during, end, _ = run_case(Case(family=family, plan=((9, 12, 40, 7), PACKS[1])))
    assert (during == STEP) == (family not in WAITING)
    assert end == NORM


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
OVERLAPPED = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 8, "output_router_logits": True, "router_aux_loss_coef": 0.5},
}


@cache
def built(family):
    return tiny_model(family, OVERLAPPED[family])


def train(inner, family, dtype, recompute, *, overlaps):
    """Run steps; return the calls of each, the values after it, and how many sums were begun early."""
    transport = RecordingTransport(inner)
    model = copy.deepcopy(built(family))
    flat = whole_parameters(
        model, transport, dtype=dtype, layers=wrapped_layers(model), bucket_entries=1, overlaps=overlaps,
        values_late=overlaps,
    )  # fmt: skip
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


@pytest.mark.parametrize("family", some(OVERLAPPED))
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
