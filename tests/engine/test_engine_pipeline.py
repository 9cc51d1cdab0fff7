"""Stages of a pipeline on strict ranks: gradients of one process, whatever rings, packs and counts of microbatches."""

import random
from functools import cache

from hypothesis import given
from hypothesis import strategies as st
from testing.families import build_pair
from testing.pipelines import as_pipeline, pipeline_difference
from testing.plans import draw_lengths, in_turn, random_plan
from testing.stores import CopyStore
from testing.tiny import tiny_family_config

from properties import costliest

TOLERANCE = 1e-12
SIZES = {"num_hidden_layers": 4}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
CONFIGS = {
    "llama": ("llama", SIZES),
    "llama, tied": ("llama", {**SIZES, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**SIZES, "layer_types": None}),
    "gemma2, windows, capped scores": ("gemma2", {**SIZES, **WINDOWS}),
    "gemma3, windows": ("gemma3_text", {**SIZES, **WINDOWS}),
    "gpt-oss, sinks, router loss": ("gpt_oss", {**SIZES, **WINDOWS, **ROUTERS}),
    "qwen3-moe, router loss, a dense layer": ("qwen3_moe", {**SIZES, **ROUTERS, "mlp_only_layers": [0]}),
}


@cache
def pair_of(name: str):
    family, changes = CONFIGS[name]
    return build_pair(family, tiny_family_config(family, changes))


@costliest
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(sorted(CONFIGS)),
    replicas=st.integers(1, 3),
    cut=st.sampled_from([(2, 1), (2, 2), (3, 1), (4, 1)]),
    count=st.integers(1, 7),
)
def test_any_plan_on_any_stages_gives_the_gradients_of_one_process(seed, name, replicas, cut, count):
    choose = random.Random(seed)
    lengths = draw_lengths(choose, replicas, count)
    lengths[0] = max(9, lengths[0])  # of which some token has a loss
    plan = random_plan(choose, replicas, lengths, layers=4, num_heads=4)
    kinds = choose.choice([("none",), ("layer",), ("none", "all_but_attention", "layer")])
    ratios = [choose.choice([0.0, choose.random(), 1.0]) for _ in plan.microbatches]
    plan = in_turn(as_pipeline(plan, *cut), recompute=kinds, offload=ratios)
    options = {"logits_at_once": choose.choice([None, 48, 480]), "make_store": lambda _: CopyStore()}
    found = pipeline_difference(pair_of(name), plan, lengths, **options)
    assert max(found.gradient, found.loss, found.router_loss) < TOLERANCE
