"""The balance loss from counts equals Hugging Face's function on all rows together, however the rows are cut."""

import itertools
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from testing import MODEL_TYPES, SIZES, TOWER_PAIRS, build_pair, make_batch, make_plan, run_step, tiny_tower_config
from testing.tiny import VOCAB
from transformers import LlamaConfig, Qwen3MoeConfig
from transformers.models.auto import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from lengthwise.core.errors import ModelRefused
from lengthwise.core.plan import Piece
from lengthwise.core.trained import WITH_TOWERS
from lengthwise.models import FAMILIES, ROUTER_FAMILIES, RouterBalance, check_model_config, count_choices, keep_double
from lengthwise.run.verify import gradient_differences
from tiers import some


def family_module(model_type):
    return sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]].__module__]


def modeling_file(whole):
    return Path(sys.modules[CONFIG_MAPPING[whole].__module__].__file__.replace("configuration_", "modeling_"))


def any_model(experts, top_k, coefficient=1.0):
    config = SimpleNamespace(model_type="mixtral", router_aux_loss_coef=coefficient)
    parameters = [torch.zeros(1)]
    return SimpleNamespace(
        config=config, num_experts=experts, num_experts_per_tok=top_k, parameters=lambda: iter(parameters)
    )


def drawn(seed, layers, rows, experts, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, experts, generator=random, dtype=torch.float64).to(dtype) * 2 for _ in range(layers)]


def in_parts(model, logits, cuts):
    """Return (loss, gradients) from parts of the rows, each of them counted and shared apart."""
    leaves = [layer.clone().requires_grad_() for layer in logits]
    edges = [0, *sorted(cuts), len(logits[0])]
    parts = [[leaf[start:stop] for leaf in leaves] for start, stop in itertools.pairwise(edges)]
    balance = RouterBalance(model, sum(count_choices(model, part) for part in parts))
    shares = [balance.share(part) for part in parts]
    for share in reversed(shares):
        share.backward()
    return sum(share.item() for share in shares), [leaf.grad for leaf in leaves]


def by_hugging_face(model, logits):
    leaves = [layer.clone().requires_grad_() for layer in logits]
    with keep_double(logits[0].dtype):
        formula = family_module("mixtral").load_balancing_loss_func
        loss = formula(tuple(leaves), model.num_experts, model.num_experts_per_tok)
    loss.backward()
    return loss.item(), [leaf.grad for leaf in leaves]


@given(
    seed=st.integers(0, 10_000),
    layers=st.integers(1, 3),
    rows=st.sampled_from((1, 2, 3, 7, 31, 64)),
    experts=st.sampled_from((1, 2, 5, 8)),
    data=st.data(),
)
def test_parts_of_any_cut_sum_to_hugging_faces_loss_over_all_rows(seed, layers, rows, experts, data):
    model = any_model(experts, data.draw(st.integers(1, experts)))
    cuts = data.draw(st.lists(st.integers(0, rows), max_size=5))  # parts without a row are among them
    logits = drawn(seed, layers, rows, experts)
    loss, gradients = in_parts(model, logits, cuts)
    expected, expected_gradients = by_hugging_face(model, logits)
    assert loss == pytest.approx(expected, rel=1e-13)
    for got, want in zip(gradients, expected_gradients, strict=True):
        assert (got - want).norm() <= 1e-12 * want.norm() + 1e-17


@pytest.mark.exhaustive
def test_every_family_with_hugging_faces_balance_loss_has_ours():
    """A family that gains the loss, or a changed formula, must be looked at before it is trained with it."""
    texts = set(FAMILIES) & set(MODEL_TYPES)
    found = {name for name in texts if hasattr(family_module(name), "load_balancing_loss_func")}
    around = {name for name in WITH_TOWERS if "load_balancing_loss_func(" in modeling_file(name).read_text()}
    known = set(ROUTER_FAMILIES) & {*texts, *WITH_TOWERS}
    assert found | around == known, "listed here before there is no harm: it is refused there"
    model, logits = any_model(5, 2), drawn(2, 2, 33, 5)
    losses = {
        name: family_module(name).load_balancing_loss_func(tuple(logits), model.num_experts, model.num_experts_per_tok)
        for name in found
    }
    assert len(set(map(float, losses.values()))) == 1


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
        (lambda: tiny_tower_config("internvl", "qwen3_moe", changes=ASKED),
         r"text_config.output_router_logits: .* true in internvl, whose class in Hugging Face adds no balance loss"),
        (lambda: tiny_tower_config("qwen3_vl_moe", "qwen3_vl_moe_text", **ASKED),
         r"output_router_logits: expected text_config.output_router_logits, .* got true beside text_config"),
        (lambda: LlamaConfig(**SIZES, **ASKED), r"output_router_logits.*mixtral.*got true in llama.*false"),
        # Plain Hugging Face fails in its forward there, hours in on a real run.
        (lambda: Qwen3MoeConfig(**SIZES, **SPARSE), r"output_router_logits.*got dense layers only"),
    ],
)  # fmt: skip
def test_balance_loss_that_there_would_not_be_is_refused(config, said):
    with pytest.raises(ModelRefused, match=said):
        check_model_config(config())
