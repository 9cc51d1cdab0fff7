"""Every causal-LM class of the installed transformers is either proved equal to plain Hugging Face or refused."""

import re

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
from transformers import AutoConfig, PretrainedConfig

from lengthwise.core.errors import ModelRefused, Problems
from lengthwise.core.plan import Piece
from lengthwise.models import FAMILIES, check_model_config
from models.test_models_checkpointing import recomputing
from tiers import more, some

# One a mechanism that `doors` has not by default: latent attention, capped scores, sinks.
BY_DEFAULT = {"deepseek_v3", "gemma2", "gpt_oss"}
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
    [[PAIRS[0], Piece(ranks=(1,), sequences=(2, 6))], [Piece(ranks=(3, 2, 1, 0), sequences=(4, 7), heads=4), PAIRS[1]]],
    layers=2,
)
SPLIT = recomputing(SPLIT, "all_but_attention", "layer")


CASES = {**{name: (name, {}) for name in FAMILIES if name in MODEL_TYPES}, **VARIANTS}


@pytest.mark.parametrize("case", [name if name in BY_DEFAULT else more(name) for name in (*CASES, *TOWER_PAIRS)])
def test_listed_family_equals_plain_hugging_face(case):
    """Of a model with towers, its text part."""
    model_type, changes = CASES.get(case, (case, {}))
    is_text = case in CASES
    config = tiny_family_config(model_type, changes) if is_text else tiny_tower_config(*TOWER_PAIRS[case])
    check_model_config(config)
    pair = build_pair(model_type, config)
    for plan in (MIXED,) if model_type in NOT_RECOMPUTED else (RECOMPUTED, SPLIT):
        at_once = 7 * VOCAB if plan is not SPLIT else None  # 7 tokens a chunk
        found = family_difference(pair, plan, LENGTHS, precision="fp64", logits_at_once=at_once)
        assert max(found.loss, found.router_loss) <= 1e-13
        assert found.gradient <= 1e-12


REFUSED = [name for name in MODEL_TYPES if name not in (*FAMILIES, *(pair[0] for pair in TOWER_PAIRS.values()))]


@pytest.mark.parametrize("model_type", some(REFUSED, 0, 33))
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
