"""Loss and every gradient under a plan equal those of the plain Hugging Face model, one document at a time."""

import copy
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from testing import SIZES, enliven, make_batch, make_plan, run_step
from testing.laid import whole_parameters
from testing.tiny import ROPES
from transformers import (
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from lengthwise.comm import SoloTransport
from lengthwise.core.plan import Piece
from lengthwise.core.shape import Cluster
from lengthwise.cost import analytic_cost, named_hardware, shape_from_config
from lengthwise.models import DTYPES, ModelSource, build_model, keep_double, plain_attention
from lengthwise.planner import PlanOptions, plan_step

LENGTHS = (1, 57, 2, 3, 40, 1, 5, 7, 31, 11, 13, 8)
LOCAL_AND_GLOBAL = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts_per_tok": 2}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama yarn": LlamaConfig(**SIZES, rope_parameters=ROPES["yarn"]),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
    "qwen3 tied": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
    "phi3": Phi3Config(**SIZES, sliding_window=6),
    "gemma3": Gemma3TextConfig(
        **SIZES, head_dim=8, query_pre_attn_scalar=8, sliding_window=6, layer_types=LOCAL_AND_GLOBAL
    ),
    "gpt-oss": GptOssConfig(
        **SIZES, head_dim=8, **EXPERTS, num_local_experts=4, sliding_window=6, layer_types=LOCAL_AND_GLOBAL
    ),
    "mixtral": MixtralConfig(**SIZES, **EXPERTS, num_local_experts=4),
    "olmoe": OlmoeConfig(**SIZES, **EXPERTS, num_experts=4),
}
BATCH = make_batch(LENGTHS, vocab=48, seed=1, masked=0.2)
BARS = {"fp64": (1e-13, 1e-12), "fp32": (2e-6, 1e-5)}


@cache
def built(family, attention="lengthwise"):
    source = ModelSource(name=family, config=copy.deepcopy(CONFIGS[family]), weights=False)
    attention = plain_attention(source) if attention == "plain" else attention
    return enliven(build_model(source, seed=3, attention=attention))


@cache
def planned(ranks, lengths=LENGTHS, *, capacity=None):
    """One plan for all families: their sizes are the same, and parity is asked of any plan."""
    cost = analytic_cost(shape_from_config(CONFIGS["llama"].to_dict()), named_hardware("cpu"))
    cluster = Cluster(ranks=ranks, capacity_tokens=capacity or -(-max(lengths) // ranks) + 1)
    return plan_step(lengths, cluster, cost, PlanOptions(layers=2))


@cache
def run_plain(family, batch, precision, weights="fp32"):
    """Return (loss, gradients) of plain Hugging Face with sdpa, one document at a time, with an own loss."""
    model = rounded(built(family, "plain"), weights)
    flat = whole_parameters(model, SoloTransport(), dtype=DTYPES[precision])
    total = 0.0
    with keep_double(DTYPES[precision]):
        for i in range(len(batch.ids)):
            row = batch.dataset.read(i, 0, batch.lengths[i])
            ids, labels = (torch.from_numpy(each.astype(np.int64)) for each in row)
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            wide = logits.double() if precision == "fp64" else logits.float()
            loss = F.cross_entropy(wide[:-1], labels[1:], ignore_index=-100, reduction="sum")
            (loss / batch.loss_tokens).backward()
            total += loss.item()
    flat.reduce_gradients()
    return total / batch.loss_tokens, flat.gather_gradients()


def run_planned(family, plan, batch, precision, weights="fp32", **how):
    """Return (loss, gradients) under a plan."""
    found = run_step(rounded(built(family), weights), plan, batch, precision=precision, **how)
    return found.loss, found.gradients


def rounded(model, weights):
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[weights]).float()
    return model


def gradient_errors(got, want):
    assert got.keys() == want.keys()
    norms = {name: tensor.double().norm().item() for name, tensor in want.items()}
    floor = 1e-3 * sorted(norms.values())[len(norms) // 2]
    return {n: (got[n].double() - want[n].double()).norm().item() / max(norms[n], floor) for n in want}


def check_parity(got, want, precision):
    loss_bar, gradient_bar = BARS[precision]
    assert abs(got[0] - want[0]) <= loss_bar * abs(want[0])
    errors = gradient_errors(got[1], want[1])
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    assert errors[worst] <= gradient_bar, f"{worst}: {errors[worst]}"


def test_fp32_error_is_near_that_of_one_process():
    """At most 3 x the one-process fp32 error against fp64, + 1e-6."""
    batch = make_batch(LENGTHS, vocab=48, seed=1)
    exact = run_plain("qwen3", batch, "fp64")[1]
    alone = gradient_errors(run_plain("qwen3", batch, "fp32")[1], exact)
    for ranks in (2, 5):
        got = gradient_errors(run_planned("qwen3", planned(ranks), batch, "fp32")[1], exact)
        assert all(got[name] <= 3 * alone[name] + 1e-6 for name in exact)


def test_bf16_error_is_near_that_of_one_device():
    """At most 1.5 x the one-device bf16 error against fp64, over all gradients together and tensor by tensor.

    A tensor's error is the root mean square over six batches: the rounding of one batch in a tensor of few entries is
    by chance more than twice that of another, and which one it is differs from one CPU to the next.
    """
    batches = [make_batch(LENGTHS, vocab=48, seed=seed) for seed in range(1, 7)]
    exact = [run_plain("llama", batch, "fp64", weights="bf16") for batch in batches]
    alone = [run_plain("llama", batch, "bf16", weights="bf16") for batch in batches]
    ones = mean_errors(alone, exact)
    found = [run_planned("llama", planned(5), batch, "bf16", weights="bf16") for batch in batches]
    for got, one, want in zip(found, alone, exact, strict=True):
        assert abs(got[0] - want[0]) <= 1.5 * abs(one[0] - want[0]) + 1e-4 * abs(want[0])
        assert total_error(got[1], want[1]) <= 1.5 * total_error(one[1], want[1])
    for name, error in mean_errors(found, exact).items():
        assert error <= 1.5 * ones[name] + 3e-3, name


def mean_errors(found, exact):
    """The root mean square of each tensor's error over several batches."""
    errors = [gradient_errors(got[1], want[1]) for got, want in zip(found, exact, strict=True)]
    return {name: (sum(each[name] ** 2 for each in errors) / len(errors)) ** 0.5 for name in errors[0]}


def total_error(gradients, exact):
    return sum((gradients[n].double() - exact[n]).square().sum().item() for n in exact) ** 0.5


def test_gradient_does_not_scale_with_ranks_or_microbatches():
    lengths = (30, 3, 9)
    batch = make_batch(lengths, vocab=48, masked=0.5)
    want = run_plain("llama", batch, "fp64")
    alone = [Piece(ranks=(0,), sequences=(i,)) for i in range(3)]
    ring = Piece(ranks=(3, 0, 2, 1), sequences=(0, 1, 2))
    for ranks, microbatches in ((1, alone), (1, [Piece(ranks=(0,), sequences=(0, 1, 2))]), (4, alone), (4, [ring])):
        plan = make_plan(ranks, lengths, microbatches, layers=2)
        check_parity(run_planned("llama", plan, batch, "fp64"), want, "fp64")


def test_fully_masked_batch_rows_have_loss_zero_and_no_gradient():
    batch = make_batch((6, 12), vocab=48, masked=1.0)
    assert batch.loss_tokens == 0
    batch.loss_tokens = 1
    plan = make_plan(2, (6, 12), [Piece(ranks=(0, 1), sequences=(0, 1))], layers=2)
    loss, gradients = run_planned("llama", plan, batch, "fp64")
    assert loss == 0
    assert all(not gradient.any() for gradient in gradients.values())


def test_evaluation_moves_keys_and_leaves_no_gradient():
    batch = make_batch(LENGTHS, vocab=48)
    loss, gradients = run_planned("llama", planned(3), batch, "fp64", train=False)
    assert not any(gradient.any() for gradient in gradients.values())
    assert loss == pytest.approx(run_plain("llama", batch, "fp64")[0], rel=1e-13)
