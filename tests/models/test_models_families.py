"""Every causal-LM class of the installed transformers is either proved equal to plain Hugging Face or refused."""

import re
from functools import cache

import pytest
from huggingface_hub.errors import StrictDataclassError
from testing import (
    MODEL_TYPES,
    TOWER_PAIRS,
    VARIANTS,
    build_pair,
    family_difference,
    make_plan,
    tiny_family_config,
    tiny_tower_config,
)
from testing.tiny import VOCAB
from testing.varlen import ReferenceFlashAttn
from transformers import AutoConfig, PretrainedConfig

from lengthwise.attention.cuda_kernels import FlashAttnOps
from lengthwise.attention.varlen import VarlenKernel
from lengthwise.core.errors import ModelRefused, Problems
from lengthwise.core.plan import Piece
from lengthwise.core.shape import Cluster
from lengthwise.cost import analytic_cost, named_hardware, shape_from_config
from lengthwise.models import FAMILIES, check_model_config
from lengthwise.planner import PlanOptions, plan_step, score
from models.test_models_checkpointing import recomputing
from tiers import more, some

BY_DEFAULT = {  # one a mechanism: dense, windows, sinks, caps, experts, latent attention, no wrap, repeats, states
    "ctrl", "deepseek_v3", "gemma2", "gpt_oss", "hrm_text", "qwen3_5_text", "nemotron_h", "lfm2",
    "llama, padded vocabulary", "qwen3, tied embeddings", "olmoe, router loss",
}  # fmt: skip
LENGTHS = (1, 57, 2, 40, 5, 31, 11, 8)
# ctrl has no wrap; hrm_text runs its layers several times, the first times without gradients: refused by their counts.
NOT_RECOMPUTED = ("ctrl", "hrm_text")
# Every kind over a ring, here or in SPLIT, and packs that are recomputed.
RINGS = [Piece(ranks=(2, 0, 1), sequences=(1, 0, 5)), Piece(ranks=(0, 2), sequences=(3, 2, 7))]
MIXED = make_plan(3, LENGTHS, [RINGS[0], Piece(ranks=(1,), sequences=(4, 6)), RINGS[1]], layers=2)
RECOMPUTED = recomputing(MIXED, "none", "elementwise", "layer")
# Split heads beside packs: in pairs with a ring over them, and over as many ranks as there are heads of queries.
PAIRS = Piece(ranks=(2, 3, 0, 1), sequences=(1, 0, 5), heads=2), Piece(ranks=(0, 1), sequences=(3,), heads=2)
SPLIT = make_plan(
    4,
    LENGTHS,
    [
        [PAIRS[0], Piece(ranks=(1,), sequences=(2, 6))],
        [Piece(ranks=(3, 2, 1, 0), sequences=(4, 7), heads=4), PAIRS[1]],
    ],
    layers=2,
)
SPLIT = recomputing(SPLIT, "all_but_attention", "layer")


def cost_of(model_type):
    return analytic_cost(shape_from_config(tiny_family_config(model_type).to_dict()), named_hardware("cpu"))


@cache
def planned():
    """One plan for all families: parity is asked of any plan. `make families`: on 1, 2, 3 and 5 ranks."""
    plan = plan_step(LENGTHS, Cluster(ranks=3, capacity_tokens=20), cost_of("llama"), PlanOptions(layers=2))
    assert any(piece.degree == 1 < len(piece.sequences) for m in plan.microbatches for piece in m.pieces)
    assert plan.ring_tokens > 0
    return plan


CASES = {**{name: (name, {}) for name in FAMILIES if name in MODEL_TYPES}, **VARIANTS}


@pytest.mark.parametrize("case", [name if name in BY_DEFAULT else more(name) for name in CASES])
def test_listed_family_equals_plain_hugging_face(case):
    model_type, changes = CASES[case]
    config = tiny_family_config(model_type, changes)
    check_model_config(config)
    assert score(planned(), cost_of(model_type)).makespan_seconds > 0
    pair = build_pair(model_type, config)
    for plan in (planned(),) if model_type in NOT_RECOMPUTED else (RECOMPUTED, SPLIT):
        at_once = 7 * VOCAB if plan is not SPLIT else None  # 7 tokens a chunk
        found = family_difference(pair, plan, LENGTHS, precision="fp64", logits_at_once=at_once)
        assert max(found.loss, found.router_loss) <= 1e-13
        assert found.gradient <= 1e-12


def test_scores_capped_by_flash_attn_are_those_of_plain_hugging_face():
    """Packs, rings, windows and grouped heads, through what stands for the package's functions."""
    pair, kernel = build_pair("gemma2", tiny_family_config("gemma2")), VarlenKernel(FlashAttnOps(ReferenceFlashAttn()))
    for plan in (planned(), RECOMPUTED):
        found = family_difference(pair, plan, LENGTHS, precision="fp64", kernel=kernel)
        assert found.loss <= 1e-13
        assert found.gradient <= 1e-12


@pytest.mark.parametrize(
    "label", [label if label == "qwen3_vl, qwen3_vl_text" else more(label) for label in TOWER_PAIRS]
)
def test_text_part_of_a_model_with_towers_equals_plain_hugging_face(label):
    config = tiny_tower_config(*TOWER_PAIRS[label])
    check_model_config(config)
    pair = build_pair(label, config)
    for plan in (RECOMPUTED, SPLIT):
        found = family_difference(pair, plan, LENGTHS, precision="fp64", logits_at_once=7 * VOCAB)
        assert max(found.loss, found.router_loss) <= 1e-13
        assert found.gradient <= 1e-12


REFUSED = [name for name in MODEL_TYPES if name not in (*FAMILIES, *(pair[0] for pair in TOWER_PAIRS.values()))]


@pytest.mark.parametrize("model_type", some(REFUSED, *range(0, 100, 33)))
def test_family_that_is_not_proved_is_refused_by_name_and_layer(model_type):
    try:
        config = AutoConfig.for_model(model_type)
    except (ValueError, StrictDataclassError):  # a few have no valid default
        config = PretrainedConfig()
        config.model_type = model_type
    with pytest.raises((ModelRefused, Problems)) as raised:
        check_model_config(config)
    first = str(raised.value).splitlines()[0]
    assert re.match(rf"error\[model\] {model_type}: (\S+ \(\w+\)|model config: \w+)", first)
    assert "plain TRL" in first
