"""Experts in one grouped product: which runs may, and that it gives what experts one by one give."""

import pytest
import torch
from testing import make_batch, make_plan, run_step, tiny_model, tiny_tower_config
from testing.tiny import MODEL_TYPES, VOCAB, tiny_family_config

from lengthwise.core.errors import ConfigError
from lengthwise.core.plan import Piece
from lengthwise.models import DTYPES, Computing, ModelSource, build_model, check_computing, choose_layers
from lengthwise.models.experts import ExpertsNeeds, choose_experts, expert_weights, needs_of
from lengthwise.models.families import FAMILIES
from lengthwise.models.model_source import build_skeleton
from tiers import some

CPU = torch.device("cpu")
LENGTHS = (21, 1, 8, 13)
PIECES = [Piece(ranks=(0,), sequences=(0, 1)), Piece(ranks=(0,), sequences=(2, 3))]
BARS = {"fp32": 3e-6, "bf16": 1e-2}


def run(family, experts, precision):
    """Return (loss, gradients, what was said) of a step of one rank."""
    model, said = tiny_model(family), []
    choose_layers(model, Computing(experts=experts), CPU, dtype=DTYPES[precision], say=said.append).put()
    plan = make_plan(1, LENGTHS, PIECES, layers=model.config.num_hidden_layers)
    found = run_step(model, plan, make_batch(LENGTHS, vocab=VOCAB), precision=precision)
    return found.loss, found.gradients, said


@pytest.mark.parametrize("precision", BARS)
@pytest.mark.parametrize("family", some([name for name in FAMILIES if name in MODEL_TYPES], 0, 1))
def test_grouped_products_give_what_experts_one_by_one_give(family, precision):
    """Every family with experts that the interface takes; in bf16 grouped ones are no further from fp32 than others."""
    config, dtype = tiny_family_config(family), DTYPES[precision]
    if not expert_weights(build_skeleton(config)):
        with pytest.raises(ConfigError, match="got no experts in one parameter"):
            check_computing(config, Computing(experts="grouped_mm"), dtype=dtype, on_gpus=False)
        return
    if not needs_of(tiny_model(family), dtype, on_gpu=False, capability=None).replaceable:
        with pytest.raises(ConfigError, match="this family computes its experts itself"):
            run(family, "grouped_mm", precision)
        return
    one_by_one, grouped = (run(family, experts, precision) for experts in ("eager", "grouped_mm"))
    assert [each[2] for each in (one_by_one, grouped)] == [
        ["experts: eager; because it is asked for"],
        ["experts: grouped_mm; because it is asked for"],
    ]
    exact = one_by_one if precision == "fp32" else run(family, "eager", "fp32")
    errors = [distance(each, exact) for each in (one_by_one, grouped)]
    assert errors[1] <= 3 * errors[0] + BARS[precision]
    assert precision == "bf16" or distance(grouped, one_by_one) > 0, "the same code ran twice"


def distance(got, want):
    """The relative L2 difference of all gradients together, or of the losses, whichever is larger."""
    rows = [torch.cat([each.flatten().double() for each in found[1].values()]) for found in (got, want)]
    return max((rows[0] - rows[1]).norm() / rows[1].norm(), abs(got[0] - want[0]) / abs(want[0]))


def needs(**changes):
    values = {"dtype": torch.bfloat16, "rows_bytes": (64, 96), "replaceable": True, "on_gpu": True, **changes}
    return ExpertsNeeds(**{"capability": (9, 0) if values["on_gpu"] else None, **values})


@pytest.mark.parametrize(
    ("asked", "changes", "implementation", "reason"),
    [
        ("auto", {}, "grouped_mm", "experts in bf16 on a GPU"),
        ("auto", {"on_gpu": False}, "eager", "this is not bf16 on a GPU"),
        ("auto", {"dtype": torch.float64}, "eager", "grouped products take bf16 and fp32, not float64"),
        ("auto", {"rows_bytes": (60, 64)}, "eager", "need rows of whole 16 bytes, and this model's have (60, 64)"),
        ("auto", {"capability": (7, 5)}, "eager", "need compute capability 8.0, and this GPU has 7.5"),
        ("auto", {"replaceable": False}, "eager", "this family computes its experts itself"),
        ("eager", {}, "eager", "it is asked for"),
    ],
)
def test_which_experts_and_why(asked, changes, implementation, reason):
    found, said = choose_experts(asked, needs(**changes))
    assert found == implementation
    assert said.endswith(reason)
    if implementation == "eager" and reason not in ("this is not bf16 on a GPU", "it is asked for"):
        with pytest.raises(ConfigError, match=r"Set experts: auto, or eager\."):
            choose_experts("grouped_mm", needs(**changes))


def test_experts_inside_a_wrapper_compute_as_is_said():
    """The interface is that of the model inside, not of the wrapper around it."""
    source = ModelSource(name="wrapped", config=tiny_tower_config("internvl", "qwen3_moe"), weights=False)
    model = build_model(source, seed=3)
    inside, said = model.get_decoder().config, []
    for asked, dtype in (("grouped_mm", torch.float32), ("eager", torch.float64)):
        choose_layers(model, Computing(experts=asked), CPU, dtype=dtype, say=said.append).put()
        assert inside._experts_implementation == asked
    assert said == [f"experts: {each}; because it is asked for" for each in ("grouped_mm", "eager")]
