"""Stages of a pipeline on strict ranks: gradients of one process, whatever rings, packs and counts of microbatches."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing.families import build_pair
from testing.pipelines import as_pipeline, pipeline_difference
from testing.plans import draw_lengths, make_plan, random_plan
from testing.stores import CopyStore
from testing.tiny import tiny_family_config

from lengthwise.core.errors import TransferError
from lengthwise.core.plan import Piece
from lengthwise.engine.step import _RankStep
from properties import costliest
from tiers import some

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
    "gpt-oss, sinks": ("gpt_oss", {**SIZES, **WINDOWS}),
    "gpt-oss, router loss": ("gpt_oss", {**SIZES, **WINDOWS, **ROUTERS}),
    "qwen3-moe, router loss, a dense layer": ("qwen3_moe", {**SIZES, **ROUTERS, "mlp_only_layers": [0]}),
}
PAIRS: dict[str, dict] = {}


def pair_of(name: str):
    if name not in PAIRS:
        family, changes = CONFIGS[name]
        PAIRS[name] = build_pair(family, tiny_family_config(family, changes))
    return PAIRS[name]


@pytest.mark.parametrize("name", some(CONFIGS, -1))
def test_rings_and_packs_of_three_replicas_give_the_gradients_of_one_process(name):
    lengths = (17, 5, 3, 9, 1, 12)
    rows = [
        [Piece(ranks=(0, 2, 1), sequences=(0,)), Piece(ranks=(1,), sequences=(4,))],
        Piece(ranks=(0,), sequences=(1, 2)),
        Piece(ranks=(1, 2), sequences=(3,)),
        Piece(ranks=(2,), sequences=(5,)),
    ]
    plan = as_pipeline(make_plan(3, lengths, rows, layers=4), 2)
    found = pipeline_difference(pair_of(name), plan, lengths)
    assert max(found.gradient, found.loss, found.router_loss) < TOLERANCE


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
    plan = as_pipeline(plan, *cut, recompute=kinds)
    ratios = [choose.choice([0.0, choose.random(), 1.0]) for _ in plan.microbatches]
    offloading = [replace(each, offload=ratio) for each, ratio in zip(plan.microbatches, ratios, strict=True)]
    plan = replace(plan, microbatches=tuple(offloading))
    options = {"logits_at_once": choose.choice([None, 48, 480]), "make_store": lambda _: CopyStore()}
    found = pipeline_difference(pair_of(name), plan, lengths, **options)
    assert max(found.gradient, found.loss, found.router_loss) < TOLERANCE


def test_a_stage_that_fails_ends_all_ranks_and_they_say_where_they_wait(monkeypatch):
    lengths = (17, 5, 3, 9)
    plan = as_pipeline(
        make_plan(2, lengths, [Piece(ranks=(0, 1), sequences=(0, 1)), Piece(ranks=(1,), sequences=(2, 3))]), 2
    )
    backward = _RankStep.backward

    def failing(step, action):
        if (step.mesh.world.rank, action.place.microbatch) == (3, 1):
            raise OSError("a stage that fails")
        backward(step, action)

    monkeypatch.setattr(_RankStep, "backward", failing)
    said = []
    monkeypatch.setattr(TransferError, "__init__", _noting(TransferError.__init__, said))
    with pytest.raises(OSError, match="a stage that fails"):
        pipeline_difference(pair_of("llama"), plan, lengths)
    assert {each.split(",")[0] for each in said} == {"rank 0", "rank 1", "rank 2"}
    assert all(", step, " in each for each in said)


def _noting(inner, said):
    def init(self, where, **keys):
        said.append(where)
        inner(self, where, **keys)

    return init
