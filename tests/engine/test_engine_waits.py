"""A step on tensors without values, of long contexts, with the calls of a GPU: the host waits only where it must."""

from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, get_peft_model
from sharded_runs import KINDS, in_waves
from testing import make_batch, make_plan, tiny_family_config
from testing.laid import freed_parameters, stage_parameters, whole_parameters
from testing.on_meta import HOPPER, META, OneOfMany, device_without_values, pinned_store_on_meta
from testing.pipelines import as_pipeline
from testing.plans import in_turn
from testing.tiny import VARIANTS, VOCAB
from transformers import AutoModelForCausalLM

from lengthwise.comm import Mesh
from lengthwise.config import OptimizerConfig
from lengthwise.core.plan import Piece
from lengthwise.engine.offloading import Offloading
from lengthwise.engine.optimizer import sliced_optimizer
from lengthwise.engine.stage_share import StageShare
from lengthwise.engine.step import StepContext, run_part
from lengthwise.models import FAMILIES, Computing, ModelStage, choose_model_kernel, wrapped_layers
from lengthwise.models.adapter import ATTENTION_NAME, register_attention
from lengthwise.models.experts import choose_experts, needs_of
from lengthwise.program.stage_program import cut_layers
from tiers import more

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
