"""Token counts rounded up, as GPUs want them, and attention by varlen calls: to the gradient, nothing changes."""

import pytest
from testing import build_pair, family_difference, make_batch, make_plan, run_step, tiny_family_config, tiny_model
from testing.tiny import VOCAB
from testing.varlen import ReferenceVarlenOps

from lengthwise.attention import FlashCpuKernel
from lengthwise.attention.varlen import VarlenKernel
from lengthwise.core.plan import Piece

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


def test_padding_to_128_changes_no_loss_and_no_gradient():
    """Also not of routers, whose counts are of real tokens; what differs are sums in matrices of another height."""
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    model = tiny_model("qwen3_moe", changes)
    batch = make_batch(LENGTHS, vocab=VOCAB, seed=1, masked=0.2)
    plain, padded = (run_step(model, PLAN, batch, kernel=FlashCpuKernel(token_multiple=each)) for each in (1, 128))
    assert (padded.loss, padded.router_loss) == pytest.approx((plain.loss, plain.router_loss), rel=1e-13)
    for name, gradient in plain.gradients.items():
        assert (padded.gradients[name] - gradient).norm() <= 1e-13 * max(gradient.norm(), 1e-3), name


def test_the_path_of_gpus_equals_plain_hugging_face():
    """Varlen calls for packs and ring diagonals, windows as the kernels count them, sinks, and padding to 128."""
    pair = build_pair("gpt_oss", tiny_family_config("gpt_oss"))
    kernel = VarlenKernel(ReferenceVarlenOps())
    difference = family_difference(pair, PLAN, LENGTHS, precision="fp64", kernel=kernel)
    assert difference.loss < 1e-12
    assert difference.gradient < 1e-12
