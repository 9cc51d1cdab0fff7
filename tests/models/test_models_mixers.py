"""Scans and convolutions of hybrid models: waves and offload, and calls without a plan."""

import copy
import functools
from dataclasses import replace
from functools import partial

import pytest
import torch
from testing import CountingStore, family_difference, make_plan

from lengthwise.attention import PlannedAttention, choose_kernel
from lengthwise.comm import SoloTransport
from lengthwise.core.errors import ModelRefused
from lengthwise.core.plan import Piece
from lengthwise.models import mixer_layers as mixers
from lengthwise.models.adapter import attending_by_plan, plain_output, planned_output
from lengthwise.models.mixer_layers import put_mixers
from lengthwise.program import lower_plan
from models.test_models_checkpointing import pair_of, recomputing
from tiers import more

LENGTHS = (19, 14, 5, 1, 13, 9)
# Rings of three and two with packs beside them, and a pack that is cut over four.
PLAN = make_plan(
    4,
    LENGTHS,
    [
        [Piece(ranks=(0, 2, 1), sequences=(0,)), Piece(ranks=(3,), sequences=(2, 3))],
        [Piece(ranks=(1, 0, 2, 3), sequences=(4, 5)), Piece(ranks=(3, 0), sequences=(1,))],
    ],
)
DELTA, MAMBA2, CONVOLUTION = "qwen3_5_text", "nemotron_h", "lfm2"


@pytest.mark.parametrize("family", [CONVOLUTION, more(DELTA), more(MAMBA2)])
def test_waves_and_offload_keep_states_and_halos_exact(family):
    plan = recomputing(PLAN, "layer")
    offloading = tuple(replace(each, offload=0.7) for each in plan.microbatches)
    for changed, how in (
        (replace(plan, schedule={"kind": "waves"}, requires=("waves",)), {"ranks_per_node": 4}),
        (replace(plan, microbatches=offloading), {"make_store": CountingStore}),
    ):
        found = family_difference(pair_of(family), changed, LENGTHS, precision="fp64", **how)
        assert max(found.loss, found.gradient) <= 1e-12


def test_a_scan_without_the_plan_is_refused_in_a_planned_forward_and_plain_outside_of_one():
    model = copy.deepcopy(pair_of(DELTA)["planned"])
    (program,) = lower_plan(make_plan(1, (6,), [Piece(ranks=(0,), sequences=(0,))]), 0)
    planned = PlannedAttention(program, SoloTransport(), choose_kernel(torch.device("cpu")))
    ids, positions = torch.arange(6), torch.arange(6)
    layer = model.model.layers[0].linear_attn
    layer.forward = lambda hidden_states, **_: type(layer).forward(layer, hidden_states)
    with torch.no_grad():
        with pytest.raises(ModelRefused, match=r"causal_conv1d_fn: .*got a call without it"):
            planned_output(model, planned, ids, positions)
        with attending_by_plan(model), pytest.raises(ModelRefused, match="called outside a plan"):
            model(input_ids=ids[None])
        plain = copy.deepcopy(pair_of(DELTA)["plain"])
        expected = plain(input_ids=ids[None], use_cache=False).logits
        del layer.forward
        assert torch.allclose(planned_output(model, planned, ids, positions).logits, expected, atol=1e-5)


def test_layers_that_kernels_of_the_hub_replaced_are_refused():
    model = copy.deepcopy(pair_of(CONVOLUTION)["planned"])
    model._use_kernels = True
    with pytest.raises(ModelRefused, match="use_kernels"):
        put_mixers(model, lambda: True)


@pytest.mark.parametrize("family", [DELTA, more(MAMBA2)])
def test_the_plain_model_takes_no_function_of_a_package(family, monkeypatch):
    """Where flash-linear-attention is installed transformers calls its kernels in fp64 and on the CPU, too."""

    def of_a_package(function):
        @functools.wraps(function)
        def call(*_args, **_options):
            raise RuntimeError("0 active drivers")

        return call

    model, ids = copy.deepcopy(pair_of(family)["plain"]).train(), torch.arange(9)  # fused layers only train
    wanted = plain_output(model, ids).logits
    for file in mixers._modeling_files(model):
        for name in filter(partial(hasattr, file), mixers.mixers_in(model)):
            monkeypatch.setattr(file, name, of_a_package(mixers.plain_function(model, name)))
        if fused := getattr(file, mixers._FUSED, None):
            monkeypatch.setattr(file, mixers._FUSED, of_a_package(mixers._in_torch(fused)))
    assert torch.equal(plain_output(model, ids).logits, wanted)
    with pytest.raises(RuntimeError, match="active drivers"):
        model(input_ids=ids[None], use_cache=False)
