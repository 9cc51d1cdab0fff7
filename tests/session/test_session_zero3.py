"""A session whose parameters lie over the ranks gives what the plain loop gives; what needs them whole is refused."""

import copy
import sys
from functools import partial

import pytest
import torch
from loops import VOCAB, both_loops, in_ranks, loss_tokens, plain_losses, planned_loop, rows_of, small_model, steps_of
from testing.tiny import tiny_family_config
from transformers import AutoModelForCausalLM

from lengthwise import Session
from lengthwise.core.errors import LengthwiseError, ModelRefused, Problems
from lengthwise.models import keep_double
from tiers import more

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
STEPS = [[97, 60, 5], [1, 40, 81]]
CONSTANT = partial(torch.optim.lr_scheduler.ConstantLR, factor=1.0)


def in_double(work):
    def rank_work(rank):
        with keep_double(torch.float64):
            return work(rank)

    return rank_work


def family_model(family, dtype=torch.float64, **changes):
    torch.manual_seed(0)
    config = tiny_family_config(family, {"vocab_size": VOCAB, **changes})
    attention = "eager" if family == "gpt_oss" else "sdpa"
    how = {"attn_implementation": attention, "experts_implementation": "eager", "dtype": dtype}
    return AutoModelForCausalLM.from_config(config, **how).train()


def weight_groups(parameters):
    """AdamW as many loops have it: no decay for vectors; so groups are in another order than the model."""
    vectors = [each for each in parameters if each.dim() < 2]
    matrices = [each for each in parameters if each.dim() >= 2]
    return ADAMW([{"params": vectors, "weight_decay": 0.0}, {"params": matrices}])


@pytest.mark.parametrize(
    ("ranks", "make", "changes"),
    [
        (3, weight_groups, {"tie_word_embeddings": True}),
        more(3, ADAMW, {}),
        more(2, MOMENTUM, {"tie_word_embeddings": True}),
        more(1, ADAMW, {"tie_word_embeddings": True}),
    ],
)
def test_a_loop_is_the_plain_loop(ranks, make, changes, tmp_path):
    capacity = 128 if ranks == 1 else 64
    options = {"capacity": capacity, "shard": "zero3", "recompute": "layer" if ranks == 2 else "auto"}
    work = in_double(lambda _rank: both_loops(make, model=small_model(**changes), **options))
    for loss, norm, weights in in_ranks(work, ranks, tmp_path):
        assert loss < 1e-13
        assert norm < 1e-12
        assert weights < 1e-11


@pytest.mark.parametrize("family", [more("gpt_oss"), more("gemma3_text"), more("qwen3_moe")])
def test_windows_sinks_and_experts_are_those_of_the_plain_loop(family, tmp_path):
    def work(_rank):
        return both_loops(MOMENTUM, model=family_model(family), steps=steps_of(STEPS), shard="zero3")

    for found in in_ranks(in_double(work), 3, tmp_path):
        assert max(found) < 1e-11


def test_routers_are_balanced_over_the_whole_batch(tmp_path):
    def work(_rank):
        model = family_model("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.5)
        plain, (rows, *_) = copy.deepcopy(model), steps_of(STEPS)
        optimizer = MOMENTUM(model.parameters())
        with Session(model, optimizer, capacity_tokens=64, shard="zero3") as session:
            found = session.backward(rows)
            session.clip_grad_norm_(1e9)
        outputs = [plain(input_ids=row["input_ids"][None], use_cache=False) for row in rows]
        logits = tuple(map(torch.cat, zip(*(each.router_logits for each in outputs), strict=True)))
        formula = sys.modules[type(plain).__module__].load_balancing_loss_func
        config = plain.config
        balance = formula(logits, config.num_experts, config.num_experts_per_tok)
        loss = sum(plain_losses(plain, rows)) / loss_tokens(rows)
        (loss + 0.5 * balance).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item()
        return (found.loss, found.router_loss, found.grad_norm), (loss.item(), balance.item(), norm)

    for found, expected in in_ranks(in_double(work), 2, tmp_path):
        assert found == pytest.approx(expected, rel=1e-12)
