"""Fused layers: which runs have them, what is exchanged in which model; plain functions stand for Liger's."""

import copy
import re
import threading
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from testing.families import build_pair, family_difference, tiny_model
from testing.plans import make_plan
from testing.sequences import make_batch
from testing.steps import run_step
from testing.strict import StrictWorld
from testing.tiny import put_forwards, tiny_family_config
from transformers.models.llama import modeling_llama

from lengthwise.core.errors import ConfigError
from lengthwise.core.plan import Piece
from lengthwise.models import fused_layers
from lengthwise.models.fused_layers import FUSED_FAMILIES, FusedNeeds, choose_forwards, choose_fused, fused_forwards
from tiers import some

CPU = torch.device("cpu")
LENGTHS = (13, 1, 8)
PLAN = make_plan(2, LENGTHS, [Piece(ranks=(0, 1), sequences=(0,)), Piece(ranks=(0,), sequences=(1, 2))], layers=2)
MOE = ("mixtral", "olmoe")
NORMS = {"qwen3": 9, "qwen3_moe": 9, "olmoe": 9, "olmo2": 9, "gemma3_text": 13}


class PlainKernels:
    """Liger's functions by their published signatures and formulas, in any dtype; `calls` counts them."""

    def __init__(self):
        self.calls = Counter()

    def __deepcopy__(self, _memo):  # as functions, it is not copied with a model
        return self

    def liger_rms_norm(self, X, W, eps, offset=0.0, casting_mode="llama", in_place=True):
        self.calls["norm"] += 1
        assert casting_mode in ("llama", "gemma")
        assert not in_place, "the gradient that comes in may belong to others, too"
        return X * torch.rsqrt(X.square().mean(-1, keepdim=True) + eps) * (offset + W)

    def liger_swiglu(self, a, b):
        self.calls["swiglu"] += 1
        return F.silu(a) * b

    def liger_geglu(self, a, b):
        self.calls["geglu"] += 1
        return F.gelu(a, approximate="tanh") * b

    def liger_rope(self, q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
        self.calls["rope"] += 1
        assert position_ids is None
        dim = cos.shape[-1]

        def turned(x):
            x, rest = x[..., :dim], x[..., dim:]
            half = torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), dim=-1)
            return torch.cat((x * cos.unsqueeze(unsqueeze_dim) + half * sin.unsqueeze(unsqueeze_dim), rest), dim=-1)

        return turned(q), turned(k)


@pytest.mark.parametrize("family", some(FUSED_FAMILIES, 0))
def test_fused_layers_of_a_family_give_what_plain_hugging_face_gives(family):
    """In fp64, over a ring and a pack: each formula, offset and epsilon, and that each module was exchanged."""
    pair, plain = build_pair(family, tiny_family_config(family)), PlainKernels()
    said = put_forwards(pair["planned"], fused_forwards(pair["planned"], plain))
    found = family_difference(pair, PLAN, LENGTHS, precision="fp64")
    assert max(found.loss, found.gradient) <= 1e-12
    norms, gates = NORMS.get(family, 5), {"qwen3_moe": 1, **dict.fromkeys(MOE, 0)}.get(family, 2)
    words = [f"{gates} gated MLPs"] if gates else []
    assert sorted(said.split(", ")) == sorted([*words, "2 attentions (RoPE)", f"{norms} norms"])
    passes = plain.calls["rope"] // 2  # of the two layers
    gate = "geglu" if family.startswith("gemma") else "swiglu"
    assert plain.calls == Counter({"rope": 2 * passes, "norm": norms * passes, gate: gates * passes})


class InPlace(PlainKernels):
    """RoPE leaves other values in its inputs, and no counter says so: Liger's turns them in place."""

    def liger_rope(self, q, k, *angles, **options):
        turned = super().liger_rope(q, k, *angles, **options)
        q.data.zero_(), k.data.zero_()
        return turned


def test_rope_in_place_does_not_reach_products_that_are_kept():
    model, batch = build_pair("llama", tiny_family_config("llama"))["planned"], make_batch(LENGTHS, vocab=48)
    put_forwards(model, fused_forwards(model, InPlace()))
    kept, again = (
        run_step(model, replace(PLAN, microbatches=tuple(replace(m, recompute=kind) for m in PLAN.microbatches)), batch)
        for kind in ("none", "elementwise")
    )
    assert again.has_bits_of(kept)


def test_only_this_model_is_changed_and_a_copy_runs_its_own_modules():
    """`verify` has a plain model beside it, and Liger's own patches would change both."""
    model, rope, ones = tiny_model("llama"), modeling_llama.apply_rotary_pos_emb, torch.ones(3, 32)
    put_forwards(model, fused_forwards(model, PlainKernels()))
    assert modeling_llama.apply_rotary_pos_emb is rope
    assert not any("forward" in vars(module) for module in tiny_model("llama").modules())
    norm = copy.deepcopy(model).model.norm
    norm.weight.data.zero_()
    assert not norm(ones).any()
    assert model.model.norm(ones).any()


def needs(**changes):
    values = {"family": "llama", "dtype": torch.bfloat16, "on_gpu": True, "compiled": False, "liger": "0.8.5"}
    return FusedNeeds(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"on_gpu": False}, "Liger's kernels are for GPUs"),
        ({"compiled": True}, "compile: true fuses the same operations"),
        ({"dtype": torch.float64}, "Liger's kernels compute in fp32, and this model in float64"),
        ({"family": "gpt_oss"}, "gpt_oss is not among the supported families (gemma, gemma3_text, granite,"),
        ({"liger": "0.7.0.dev20260101+cu13"}, "liger-kernel 0.7.0.dev20260101+cu13 is older than 0.8.5"),
    ],
)
def test_auto_goes_without_and_a_name_is_refused_with_the_reason(changes, reason):
    name, said = choose_fused("auto", needs(**changes))
    assert (name, said[: len(reason)]) == ("off", reason)
    with pytest.raises(ConfigError, match=re.escape(reason) + r".*(Set |pip install 'liger-kernel>=0\.8\.5')"):
        choose_fused("liger", needs(**changes))


def half_gradient(*given):
    return PlainKernels().liger_swiglu(*given).lerp(PlainKernels().liger_swiglu(*given).detach(), 0.5)


HOW = {
    "right": (9, r"liger \(2 attentions \(RoPE\), 2 gated MLPs, 5 norms\); .* 0\.8\.5 is .*; proved in \d+\.\d\d s$"),
    "wrong": (0, "rank 0: LlamaMLP, bfloat16: gradient of gate is off by 0.5 of its norm"),
    "missing": (0, "rank 1: liger-kernel.* cannot be imported"),
}


@pytest.mark.parametrize("how", HOW)
def test_liger_computes_if_it_is_right_on_every_rank(how, monkeypatch):
    """Plain functions stand for Liger's, and the CPU for a GPU."""
    plain, here, (number, words) = PlainKernels(), threading.local(), HOW[how]
    if how == "wrong":
        plain.liger_swiglu = half_gradient

    def functions():
        if (how, here.rank) == ("missing", 1):
            raise ImportError("no module named triton")
        return plain

    monkeypatch.setattr(fused_layers, "liger_functions", functions)

    def work(transport):
        here.rank, model = transport.rank, tiny_model("llama")
        forwards, said = choose_forwards(model, "auto", needs(), CPU, transport)
        assert (len(forwards), bool(re.search(words, said))) == (number, True), said
        if how == "wrong":
            with pytest.raises(ConfigError, match=words):
                choose_forwards(model, "liger", needs(), CPU, transport)

    StrictWorld(2).run(work)
