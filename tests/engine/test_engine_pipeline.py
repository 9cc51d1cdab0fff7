"""Stages of a pipeline on strict ranks: gradients of one process, whatever rings, packs and counts of microbatches."""

import random
import re
from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing import RecordingTransport
from testing.fake_nccl import Call
from testing.families import build_pair, reference
from testing.pipelines import as_pipeline, pipeline_difference, run_pipeline
from testing.plans import draw_lengths, make_plan, random_plan
from testing.stage_actions import stage_items
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


@pytest.mark.parametrize("name", some(CONFIGS, -4, -1))
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


def test_stages_post_what_is_run_on_clocks():
    """The rings and the messages of `stage_items`, in their order; a stage's ring is several rounds."""
    pieces = [Piece(ranks=ranks, sequences=(i,)) for i, ranks in enumerate([(0, 1), (0,), (1,), (1,), (0, 1)])]
    plan = as_pipeline(make_plan(2, (9, 8, 7, 6, 5), pieces, layers=4), 2, 2)
    pair, recorded = pair_of("llama"), {}
    batch, _ = reference(pair["plain"], plan.tokens, "fp64")
    run_pipeline(
        pair["planned"],
        plan,
        batch,
        around=lambda transport: recorded.setdefault(transport.rank, RecordingTransport(transport)),
    )
    for rank, items in enumerate(stage_items(plan, *[lambda *_: 0.0] * 3)):
        expected = [
            (str(call.label), sorted(each.peer for each in call.operations if call.communicator == "stages"))
            for call in items
            if isinstance(call, Call)
        ]
        own = [number for number, each in enumerate(plan.microbatches) if rank // 2 in each.ranks]
        posted = [_posted(call, own) for call in recorded[rank].calls]
        assert [name for name, _ in groupby(posted) if name] == expected


def _posted(call, own):
    """Return the label of what a call is part of, and its peers if it is one between stages; None: the step's end."""
    if tick := re.search("hidden states between stages at tick (.*)", call.phase):
        return str(("messages of tick", int(tick[1]))), sorted(peer for peer, *_ in (*call.sends, *call.receives))
    if action := re.search(r"microbatch (\d+) of \d+ (\w+), stage \d, chunk (\d+)", call.phase):
        return str(("ring", own[int(action[1]) - 1], int(action[3]), action[2] == "forward")), []
    return None


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
