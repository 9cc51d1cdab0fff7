"""Every causal-LM class of the installed transformers is either proved equal to plain Hugging Face or refused."""

import re

import pytest
from huggingface_hub.errors import StrictDataclassError
from testing.families import build_pair, family_difference
from testing.tiny import MODEL_TYPES, VARIANTS, VOCAB, tiny_family_config
from testing.towers import TOWER_PAIRS, tiny_tower_config
from transformers import AutoConfig, PretrainedConfig

from lengthwise.core.errors import ModelRefused, Problems
from lengthwise.models import FAMILIES, check_model_config
from models.test_models_checkpointing import LENGTHS, RINGS, SPLIT, recomputing
from tiers import more, some

# One a mechanism that `doors` has not by default: latent attention, capped scores, sinks.
BY_DEFAULT = {"deepseek_v3", "gemma2", "gpt_oss"}
# ctrl has no wrap; hrm_text runs its layers several times, the first times without gradients: refused by their counts.
NOT_RECOMPUTED = ("ctrl", "hrm_text")
RECOMPUTED = recomputing(RINGS, "none", "elementwise", "layer")  # every kind over a ring, here or with split heads
OVER_HEADS = recomputing(SPLIT, "all_but_attention", "layer")


CASES = {**{name: (name, {}) for name in FAMILIES if name in MODEL_TYPES}, **VARIANTS}


@pytest.mark.parametrize("case", [name if name in BY_DEFAULT else more(name) for name in (*CASES, *TOWER_PAIRS)])
def test_listed_family_equals_plain_hugging_face(case):
    """Of a model with towers, its text part."""
    model_type, changes = CASES.get(case, (case, {}))
    is_text = case in CASES
    config = tiny_family_config(model_type, changes) if is_text else tiny_tower_config(*TOWER_PAIRS[case])
    check_model_config(config)
    pair = build_pair(model_type, config)
    for plan in (RINGS,) if model_type in NOT_RECOMPUTED else (RECOMPUTED, OVER_HEADS):
        at_once = 7 * VOCAB if plan is not OVER_HEADS else None  # 7 tokens a chunk
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
