"""Token counts rounded up, as GPUs want them, and attention by varlen calls: to the gradient, nothing changes."""

from testing import build_pair, family_difference, make_plan, tiny_family_config
from testing.varlen import ReferenceVarlenOps

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


def test_the_path_of_gpus_equals_plain_hugging_face():
    """Varlen calls for packs and ring diagonals, windows as the kernels count them, sinks, and padding to 128."""
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.5}  # whose counts are of real tokens
    pair = build_pair("gpt_oss", tiny_family_config("gpt_oss", changes))
    kernel = VarlenKernel(ReferenceVarlenOps())
    difference = family_difference(pair, PLAN, LENGTHS, precision="fp64", kernel=kernel)
    assert max(difference.loss, difference.router_loss) < 1e-12
    assert difference.gradient < 1e-12
