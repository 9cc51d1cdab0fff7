"""Parameters cut over ranks by rows, under plans in lock-step: gradients, memory, order, and what is refused."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testing import (
    RecordingTransport,
    build_pair,
    family_difference,
    make_batch,
    make_plan,
    random_plan,
    run_ranks,
    tiny_family_config,
)
from testing.order import Operation, StrictMatcher, check_order, rank_groups
from transformers import AutoModelForCausalLM

from lengthwise.attention import choose_kernel
from lengthwise.core.plan import Piece
from lengthwise.engine.sharded import ShardedParameters
from lengthwise.engine.step import run_plan
from lengthwise.models import wrapped_layers
from lengthwise.models.adapter import ATTENTION_NAME, register_attention
from properties import costliest
from tiers import some

CPU = torch.device("cpu")
LENGTHS = (41, 11, 5, 7, 1, 23)
# A ring beside nothing, a ring beside a pack, and a wave of which ranks 0 and 1 have nothing.
WAVES = [
    [Piece(ranks=(0, 2, 1), sequences=(0,))],
    [Piece(ranks=(0, 1), sequences=(5,)), Piece(ranks=(2,), sequences=(1, 2))],
    [Piece(ranks=(2,), sequences=(3, 4))],
]


def in_waves(plan, *recompute):
    kinds = recompute or ("none",)
    microbatches = [replace(each, recompute=kinds[i % len(kinds)]) for i, each in enumerate(plan.microbatches)]
    requires = tuple(sorted({*plan.requires, "waves"}))
    return replace(plan, microbatches=tuple(microbatches), schedule={"kind": "waves"}, requires=requires)


@pytest.mark.parametrize("family", some(["llama", "qwen3", "gemma3_text", "qwen3_moe", "gpt_oss", "mistral"], 0, 2))
def test_gradients_are_those_of_one_process(family):
    """Whatever is computed again, a loss in chunks, and ranks that have nothing in a wave."""
    config = tiny_family_config(family)
    if family == "qwen3_moe":
        config.output_router_logits, config.router_aux_loss_coef = True, 0.5
    plan = in_waves(make_plan(3, LENGTHS, WAVES, layers=2), "none", "layer", "all_but_attention")
    found = family_difference(
        build_pair(family, config), plan, LENGTHS, precision="fp64", logits_at_once=7 * config.vocab_size, sharded=True
    )
    assert found.loss <= 1e-13
    assert found.router_loss <= 1e-13
    assert found.gradient <= 1e-12


@given(data=st.data())
@costliest
def test_gradients_of_any_waves_are_those_of_one_process(data):
    """Lengths of 1 and primes, fewer sequences than ranks, more ranks than rows of some parameters."""
    ranks = data.draw(st.sampled_from((2, 3, 5, 8)))
    lengths = data.draw(st.lists(st.sampled_from((1, 2, 3, 7, 13, 2 * ranks - 1, 29, 40)), min_size=1, max_size=7))
    if max(lengths) == 1:
        lengths.append(2)  # one token has no next one
    config = tiny_family_config(data.draw(st.sampled_from(("llama", "qwen3"))))
    config.tie_word_embeddings = data.draw(st.booleans())
    choose = random.Random(data.draw(st.integers(0, 2**16)))
    plan = random_plan(choose, ranks, lengths, layers=2, num_heads=4)
    plan = in_waves(plan, *choose.choices(("none", "layer", "all_but_attention"), k=2))
    found = family_difference(build_pair("llama", config), plan, lengths, precision="fp64", sharded=True)
    assert max(found.loss, found.gradient) <= 1e-11


def sharded_step(transport, plan, dtype=torch.float64, lengths=LENGTHS):
    """Run a step; return what holds the parameters."""
    register_attention()
    torch.manual_seed(1)
    config = tiny_family_config("llama")
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.float32)
    parameters = ShardedParameters(model, transport, dtype=dtype, device=CPU, layers=wrapped_layers(model))
    batch = make_batch(lengths, vocab=config.vocab_size)
    run_plan(model, plan, batch, transport, choose_kernel(CPU), name="step", parameters=parameters)
    return model, parameters


def operations_of(call):
    if call.name != "exchange":
        return [Operation(kind="collective", size=call.name)]
    return [
        Operation(kind=kind, peer=peer, size=(shape, dtype))
        for kind, messages in (("send", call.sends), ("receive", call.receives))
        for peer, shape, dtype in messages
    ]


@given(seed=st.integers(0, 2**16), kind=st.sampled_from(("none", "layer", "all_but_attention")))
@costliest
def test_all_that_ranks_post_completes_on_one_strict_queue_a_rank(seed, kind):
    """Gathers, sums and rings of all ranks, in the order in which each posts them; a gather meets the same gather."""
    choose = random.Random(seed)
    ranks = choose.choice((2, 3, 4))
    lengths = [choose.randint(2, 40) for _ in range(choose.randint(1, 6))]
    plan = in_waves(random_plan(choose, ranks, lengths, layers=2, num_heads=4), kind)

    def work(transport):
        recording = RecordingTransport(transport)
        sharded_step(recording, plan, lengths=lengths)
        return recording.calls

    calls = run_ranks(work, ranks)
    collectives = [[each.name for each in row if each.name != "exchange"] for row in calls]
    assert collectives.count(collectives[0]) == ranks
    labels = [label for label, posted in rank_groups(plan, 0, windows=[None, None]) if posted[0].kind == "collective"]
    names = ["all_gather" if ", gather of " in label else "reduce_scatter" for label in labels if ", " in label]
    assert [each for each in collectives[0] if each != "broadcast"] == names, "as `check_order` has them"
    assert check_order(plan, layers=2) >= 0
    matcher = StrictMatcher(ranks)
    for rank, row in enumerate(calls):
        for number, call in enumerate(row):
            if operations := operations_of(call):
                matcher.post(rank, f"{number} {call.name}", operations)
    assert sum(1 for _ in matcher.progress())
    assert not matcher.stuck()


def test_a_rank_keeps_its_part_and_no_more():
    """Between passes nothing of a layer is left: neither gathered values nor gradients."""
    plan = in_waves(make_plan(4, LENGTHS, WAVES, layers=2))

    def work(transport):
        model, parameters = sharded_step(transport, plan, torch.bfloat16)
        parameters.publish()
        kept = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in parameters.tensors()}
        local = [each.to_local() for each in model.parameters()]
        assert {each.untyped_storage().data_ptr() for each in local} <= {*kept}
        return sum(kept.values()), sum(each.numel() for each in model.parameters())

    (kept, entries), *_ = run_ranks(work, 4)
    assert kept / entries == pytest.approx(8 / 4, rel=0.05), "masters and gradients, in fp32"
