"""The balance loss of routers around a text part is Hugging Face's own; which families have one."""

import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from testing import MODEL_TYPES, SIZES, TOWER_PAIRS, build_pair, make_batch, make_plan, run_step, tiny_tower_config
from testing.tiny import VOCAB
from transformers import LlamaConfig, Qwen3MoeConfig
from transformers.models.auto import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from lengthwise.core.errors import ModelRefused
from lengthwise.core.plan import Piece
from lengthwise.core.trained import WITH_TOWERS
from lengthwise.models import FAMILIES, ROUTER_FAMILIES, check_model_config, keep_double
from lengthwise.run.verify import gradient_differences
from tiers import some


def family_module(model_type):
    return sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]].__module__]


def modeling_file(whole):
    return Path(sys.modules[CONFIG_MAPPING[whole].__module__].__file__.replace("configuration_", "modeling_"))


@pytest.mark.exhaustive
def test_every_family_with_hugging_faces_balance_loss_has_ours():
    """A family that gains the loss, or a changed formula, must be looked at before it is trained with it."""
    texts = set(FAMILIES) & set(MODEL_TYPES)
    found = {name for name in texts if hasattr(family_module(name), "load_balancing_loss_func")}
    around = {name for name in WITH_TOWERS if "load_balancing_loss_func(" in modeling_file(name).read_text()}
    known = set(ROUTER_FAMILIES) & {*texts, *WITH_TOWERS}
    assert found | around == known, "listed here before there is no harm: it is refused there"
    logits = tuple(torch.randn(33, 5) for _ in range(2))
    assert len({float(family_module(name).load_balancing_loss_func(logits, 5, 2)) for name in found}) == 1


@pytest.mark.parametrize(
    ("whole", "text", "changes"),
    some([pair for label, pair in TOWER_PAIRS.items() if label.endswith("router loss")], -1),
)
def test_balance_loss_around_a_text_part_is_that_of_hugging_faces_own_class(whole, text, changes):
    """Of one document, whose loss Hugging Face's forward gives with its labels, balance loss included."""
    models = build_pair("whole", tiny_tower_config(whole, text, changes))
    batch = make_batch((23,), vocab=VOCAB, seed=1)
    plan = make_plan(2, (23,), [Piece(ranks=(1, 0), sequences=(0,))], layers=2)
    found = run_step(models["planned"], plan, batch, precision="fp64")
    plain = models["plain"].whole
    for parameter in plain.parameters():
        parameter.data = parameter.data.double()
    ids, labels = batch.whole(0)
    with keep_double(torch.float64):
        output = plain(input_ids=ids[None], labels=F.pad(labels, (1, 0))[None, :-1], use_cache=False)
    output.loss.backward()
    assert found.router_loss == pytest.approx(output.aux_loss.item(), rel=1e-13)
    assert found.loss + 0.5 * found.router_loss == pytest.approx(output.loss.item(), rel=1e-13)
    expected = {name: each.grad for name, each in models["plain"].named_parameters() if each.requires_grad}
    assert max(gradient_differences(found.gradients, expected).values()) < 1e-12


def test_run_file_page_names_the_families_with_the_loss():
    page = (Path(__file__).parents[2] / "docs/run-file.md").read_text()
    named = page.partition("Families with such a loss:")[2].partition("; the others are refused")[0]
    assert re.findall(r"\w+", named.replace("(`aux_loss_coef`)", "")) == list(ROUTER_FAMILIES)


ASKED = {"output_router_logits": True}
SPARSE = {"num_experts": 4, "moe_intermediate_size": 8, "mlp_only_layers": [0, 1], **ASKED}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (lambda: tiny_tower_config("internvl", "qwen3_moe", changes=ASKED), "true in internvl, whose class .* adds no"),
        (lambda: tiny_tower_config("qwen3_vl_moe", "qwen3_vl_moe_text", **ASKED), "got true beside text_config"),
        (lambda: LlamaConfig(**SIZES, **ASKED), r"output_router_logits.*mixtral.*got true in llama.*false"),
        # Plain Hugging Face fails in its forward there, hours in on a real run.
        (lambda: Qwen3MoeConfig(**SIZES, **SPARSE), r"output_router_logits.*got dense layers only"),
    ],
)
def test_balance_loss_that_there_would_not_be_is_refused(config, said):
    with pytest.raises(ModelRefused, match=said):
        check_model_config(config())
