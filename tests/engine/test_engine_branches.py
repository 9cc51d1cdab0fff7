"""A prefix computed once, in any plan: loss and gradients are those of whole rows, one after the other."""

import random
from functools import cache

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from testing import SIZES, make_plan, random_plan, relative_error, run_step, tiny_family_config
from testing.families import enliven
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from lengthwise.core.plan import RECOMPUTE_KINDS, Piece
from lengthwise.cost import plain_cost
from lengthwise.models import keep_double
from lengthwise.models.adapter import attending_by_plan, plain_output
from lengthwise.planner.prefixes import plan_shared
from lengthwise.program import check_plan
from lengthwise.session.row_batch import RowBatch
from models.test_models_checkpointing import recomputing
from properties import costly
from tiers import more

VOCAB = SIZES["vocab_size"]
COST = plain_cost(linear_seconds=1e-4, quadratic_seconds=1e-9)
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "gemma3": Gemma3TextConfig(
        **SIZES, head_dim=8, sliding_window=20, layer_types=["sliding_attention", "full_attention"]
    ),
}


@cache
def model_of(name):
    """Return a tiny model in fp64; its states decay slowly."""
    torch.manual_seed(1)
    config = CONFIGS[name] if name in CONFIGS else tiny_family_config(name)
    how = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float64}
    model = AutoModelForCausalLM.from_config(config, **how)
    return model.double() if name in CONFIGS else enliven(model.double())


def grouped_rows(choose, sizes):
    """Draw rows in groups with one prompt: sizes are (tokens of the prompt, tokens of each answer)."""
    system, rows = [choose.randrange(VOCAB) for _ in range(18)], []
    for prompt, answers in sizes:
        asked = [*system, *(choose.randrange(VOCAB) for _ in range(prompt))]
        for answer in answers:
            said = [choose.randrange(VOCAB) for _ in range(answer)]
            rows.append({"input_ids": torch.tensor(asked + said), "labels": torch.tensor([-100] * len(asked) + said)})
    choose.shuffle(rows)
    return rows


def plain_step(model, rows):
    """Return loss and gradients of the rows one by one, by the model's own attention."""
    total, count = 0.0, sum(int((row["labels"][1:] != -100).sum()) for row in rows)
    for row in rows:
        logits = plain_output(model, row["input_ids"]).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, row["labels"][1:], ignore_index=-100, reduction="sum")
    (total / count).backward()
    return total.item() / count, {name: each.grad for name, each in model.named_parameters()}


def shared_plan(rows, most_tokens, plan_lengths):
    """Return a plan of the trees of these rows, of at most `most_tokens`, or None without a tree."""
    batch = RowBatch(rows)
    shared = batch.shared_prefixes()
    return shared and plan_shared(batch.lengths, shared, most_tokens, COST, plan_lengths)


def check(name, rows, plan):
    check_plan(plan)
    model = model_of(name)
    model.zero_grad()
    with keep_double(torch.float64):
        loss, gradients = plain_step(model, rows)
    model.zero_grad()
    with attending_by_plan(model):
        step = run_step(model, plan, RowBatch(rows).planned_by(plan))
    assert step.loss == pytest.approx(loss, rel=1e-12)
    for parameter, each in gradients.items():
        assert relative_error(step.gradients[parameter], each) < 1e-12, parameter


def three_ways(lengths, _cost):
    """Cut one tree over three ranks, unevenly, one over two that split heads, and leave one whole."""
    cut = Piece(ranks=(2, 0, 1), sequences=(0,), shares=(1.0, 0.0, 2.0))
    split, whole = Piece(ranks=(1, 0), sequences=(1,), heads=2), Piece(ranks=(2,), sequences=(2,))
    return recomputing(make_plan(3, lengths, [[cut], [split, whole]]), "layer", "none")


@pytest.mark.parametrize("name", ["gemma3", more("qwen3_5_text"), "bamba"])
def test_a_tree_gives_what_whole_rows_give_cut_split_and_whole(name):
    choose = random.Random(0)
    rows = [row for _ in range(3) for row in grouped_rows(choose, [(18, (4, 3)), (5, (2,))])]
    plan = shared_plan(rows, 2000, three_ways)
    assert len(plan.tokens) == len(rows) + 3 * 2, "two shared prefixes in each tree"
    check(name, rows, plan)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "gemma3", "lfm2", "qwen3_5_text", "qwen3_next", "kimi_linear", "olmo_hybrid", "bamba"),
        *("nemotron_h", "falcon_h1", "granitemoehybrid", "lfm2_moe"),
    ],
)
@costly
@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 60), st.lists(st.integers(1, 40), min_size=1, max_size=5)), min_size=1, max_size=3
    ),
    ranks=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
def test_a_shared_prefix_gives_what_whole_rows_give(name, sizes, ranks, seed):
    choose = random.Random(seed)

    def any_plan(lengths, _cost):
        plan = random_plan(choose, ranks, lengths, num_heads=SIZES["num_attention_heads"])
        return recomputing(plan, *choose.sample(RECOMPUTE_KINDS, 2))

    rows = grouped_rows(choose, sizes)
    plan = shared_plan(rows, choose.choice([60, 200, 2000]), any_plan)
    assume(plan is not None)
    check(name, rows, plan)
