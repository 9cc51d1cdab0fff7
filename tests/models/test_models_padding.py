"""Token counts rounded up, as GPUs want them, and attention by varlen calls: to the gradient, nothing changes."""

import copy

import pytest
import torch
from testing import build_pair, families, family_difference, make_batch, make_plan, tiny_family_config
from testing.strict import StrictWorld
from testing.varlen import ReferenceVarlenOps

from lengthwise.attention import FlashCpuKernel, PlannedAttention
from lengthwise.attention.varlen import VarlenKernel
from lengthwise.comm import SoloTransport
from lengthwise.core.plan import Piece
from lengthwise.engine.replicated import FlatParameters
from lengthwise.engine.step import run_plan
from lengthwise.models import FAMILIES, keep_double, largest_head_dim
from lengthwise.program import lower_plan
from tiers import more

# 1 and 2 leave ranks of a ring without a token; 127 to 129 lie around the multiple.
LENGTHS = (127, 128, 129, 1, 2, 31)
PLAN = make_plan(
    3,
    LENGTHS,
    [
        [Piece(ranks=(0, 2, 1), sequences=(2,)), Piece(ranks=(0,), sequences=(1,))],
        [Piece(ranks=(1,), sequences=(0, 5))],
        [Piece(ranks=(2, 0, 1), sequences=(3, 4))],
    ],
)


def gradients(kernel):
    """Return (losses, gradients) of a model with routers on three ranks, in fp64."""
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    planned = build_pair("qwen3_moe", tiny_family_config("qwen3_moe", changes))["planned"]
    batch = make_batch(LENGTHS, vocab=families.VOCAB, seed=1, masked=0.2)

    def work(transport):
        model = copy.deepcopy(planned)
        flat = FlatParameters(model, transport, dtype=torch.float64)
        with keep_double(torch.float64):
            done = run_plan(model, PLAN, batch, transport, kernel, name="padding")
        flat.reduce_gradients()
        return torch.tensor([done.loss_sum, done.router_loss], dtype=torch.float64), flat.gather_gradients()

    results = StrictWorld(3).run(work)
    return sum(losses for losses, _ in results), results[0][1]


def test_padding_to_128_changes_no_loss_and_no_gradient():
    """Also not of routers, whose counts are of real tokens; what differs are sums in matrices of another height."""
    expected, padded = (gradients(FlashCpuKernel(token_multiple=multiple)) for multiple in (1, 128))
    assert torch.allclose(padded[0], expected[0], rtol=1e-13, atol=0)
    for name, gradient in expected[1].items():
        assert (padded[1][name] - gradient).norm() <= 1e-13 * max(gradient.norm(), 1e-3), name


def test_rows_are_tokens_rounded_up_and_never_none():
    for rank in range(3):
        for program in lower_plan(PLAN, rank):
            transport = SoloTransport()
            transport.rank = rank
            planned = PlannedAttention(program, transport, FlashCpuKernel(token_multiple=128))
            assert planned.num_rows == max(1, -(-planned.num_tokens // 128)) * 128


@pytest.mark.parametrize("model_type", ["gpt_oss", more("gemma3_text")])
def test_the_path_of_gpus_equals_plain_hugging_face(monkeypatch, model_type):
    """Varlen calls for packs and ring diagonals, windows as the kernels count them, sinks, and padding to 128."""
    monkeypatch.setattr(families, "choose_kernel", lambda device: VarlenKernel(ReferenceVarlenOps()))
    pair = build_pair(model_type, tiny_family_config(model_type))
    difference = family_difference(pair, PLAN, LENGTHS, precision="fp64")
    assert difference.loss < 1e-12
    assert difference.gradient < 1e-12


def test_largest_head_dim_is_known_of_every_family():
    """It decides whether flash kernels can be used: 8 as made tiny, 8 + 4 where keys have a rotary part, or its own."""
    found = {model_type: largest_head_dim(tiny_family_config(model_type)) for model_type in FAMILIES}
    assert {model_type: dim for model_type, dim in found.items() if dim not in (8, 12)} == {
        "gemma4_text": 512,
        "gemma4_unified_text": 512,
    }
    assert found["llama"] == 8
    assert found["deepseek_v3"] == 12
