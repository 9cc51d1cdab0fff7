"""Layers with states and convolutions: waves and offload, calls without a plan, and packages for them.

Calls of packages by their contract, their proof, and which a model takes.
"""

import copy
import functools
import sys
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from testing import CountingStore, build_pair, family_difference, make_plan, tiny_family_config
from testing.mixers import STAND_INS

from lengthwise.attention import PlannedAttention, choose_kernel, prove
from lengthwise.comm import SoloTransport
from lengthwise.core.errors import ModelRefused
from lengthwise.core.plan import Piece
from lengthwise.models import choose_mixers, mixer_choice
from lengthwise.models import mixer_layers as mixers
from lengthwise.models.adapter import attending_by_plan, plain_output, planned_output
from lengthwise.models.mixer_choice import cases_of, layers_of
from lengthwise.models.mixer_kernels import CONVOLUTION, DELTA_RULE, KDA, MAMBA2, PACKAGES, package_kernel
from lengthwise.models.mixer_layers import put_mixers
from lengthwise.models.model_source import build_skeleton
from lengthwise.program import lower_plan
from models.test_models_checkpointing import pair_of, recomputing
from tiers import more

CPU = torch.device("cpu")
LENGTHS = (11, 6, 3, 1)
PLAN = make_plan(2, LENGTHS, [[Piece(ranks=(1, 0), sequences=(0,))], [Piece(ranks=(0,), sequences=(1, 2, 3))]])
FAMILY = {DELTA_RULE: "qwen3_5_text", KDA: "kimi_linear", MAMBA2: "nemotron_h", CONVOLUTION: "lfm2"}


@cache
def skeleton_of(family, **changes):
    return build_skeleton(tiny_family_config(family, changes))


def compare(name, function, dtype=torch.float32):
    kernel = PACKAGES[name].make(function)
    return prove(cases_of(name, kernel, skeleton_of(FAMILY[name]), dtype, CPU), dtype, CPU).fault


@pytest.mark.parametrize("name", [DELTA_RULE, MAMBA2, more(KDA)])
def test_any_plan_is_exact_by_calls_that_packages_take(name, monkeypatch):
    calls = Counter()

    def counted(each):
        def run(*args, **asked):
            calls[each] += 1
            return STAND_INS[each](*args, **asked)

        return run

    kernels = {(each, torch.float64): PACKAGES[each].make(counted(each)) for each in PACKAGES}
    monkeypatch.setattr(mixers, "_kernels", SimpleNamespace(get=lambda *_: kernels))
    family = FAMILY[name]
    pair = build_pair(family, tiny_family_config(family))
    found = family_difference(pair, recomputing(PLAN, "layer"), LENGTHS, precision="fp64")
    assert max(found.loss, found.gradient) <= 1e-12
    assert calls[name] > 0


@pytest.mark.parametrize("name", [MAMBA2, CONVOLUTION, more(DELTA_RULE), more(KDA)])
def test_a_kernel_is_proved_by_what_transformers_computes(name):
    assert compare(name, STAND_INS[name]) is None
    if name != KDA:
        assert compare(name, STAND_INS[name], torch.bfloat16) is None


def one_state(*args, initial_state=None, **asked):
    state = None if initial_state is None else initial_state[:1].expand_as(initial_state).contiguous()
    return STAND_INS[DELTA_RULE](*args, initial_state=state, **asked)


def half_gradient_of_states(*args, **asked):
    out, states = STAND_INS[DELTA_RULE](*args, **asked)
    return out, None if states is None else states.detach().lerp(states, 0.5)


def no_numbers(*args, seq_idx=None, **asked):
    return STAND_INS[MAMBA2](*args, **asked)


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        (DELTA_RULE, half_gradient_of_states, "gradient of key is off"),
        (DELTA_RULE, one_state, "out from states is off"),
        (MAMBA2, no_numbers, "out is off"),
        (CONVOLUTION, lambda *args, activation: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_what_a_kernel_gets_wrong_is_named(name, wrong, words):
    assert words in compare(name, wrong)


@pytest.fixture
def packages(monkeypatch):
    """Install the stand-ins as the packages, and let the CPU pass for a GPU."""
    monkeypatch.setattr(mixer_choice, "takes_packages", lambda _: True)
    for name, package in PACKAGES.items():
        parts = package.module.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            monkeypatch.setitem(sys.modules, path, sys.modules.get(path) or ModuleType(path))
        setattr(sys.modules[package.module], package.function, STAND_INS[name])


def chosen(family):
    model, said = build_skeleton(tiny_family_config(family)), []
    choose_mixers(model, SoloTransport(), CPU, dtype=torch.float32, say=said.append)
    used = {name: kernel.name for (name, _), kernel in mixers._kernels.get(model, {}).items()}
    return [line.partition("; proved in ")[0] for line in said], used


def test_packages_are_taken_where_they_are_installed_and_right(packages, monkeypatch):
    right = "computes as transformers does on this device"
    said, used = chosen("qwen3_5_text")
    assert all(line.endswith(f"; because it {right}") for line in said)
    assert used == {DELTA_RULE: "fla-core", CONVOLUTION: "causal-conv1d"}
    assert chosen("llama") == ([], {})
    monkeypatch.setattr(sys.modules["causal_conv1d"], "causal_conv1d_fn", lambda *args, activation: args[0])
    said, used = chosen("qwen3_5_text")
    assert used == {DELTA_RULE: "fla-core"}
    assert "transformers' own function, which is slower; because causal-conv1d is wrong on this device: " in said[1]


def test_a_missing_package_is_named_once_and_transformers_runs(monkeypatch):
    monkeypatch.setattr(mixer_choice, "takes_packages", lambda _: True)
    for module in ("fla", "causal_conv1d"):
        monkeypatch.setitem(sys.modules, module, None)
    said, used = chosen("kimi_linear")
    for line, package in zip(said, ("fla-core", "causal-conv1d"), strict=True):
        assert f"slower; because there is no package {package} (pip install 'lengthwise[hybrid]')" in line
    assert used == {}


@pytest.mark.parametrize(
    ("family", "changes", "name", "words"),
    [
        ("qwen3_5_text", {"linear_key_head_dim": 320}, DELTA_RULE, "keys of at most 256, and this model has 320"),
        ("lfm3", {}, CONVOLUTION, "widths of 2 to 4, and this model has 7"),
        ("lfm2", {"hidden_size": 36}, CONVOLUTION, "channels in multiples of 8, and this model has 36"),
    ],
)
def test_what_a_package_cannot_compute_is_named(packages, family, changes, name, words):
    layers = layers_of(build_skeleton(tiny_family_config(family, changes)))
    assert words in package_kernel(PACKAGES[name], layers, torch.bfloat16)
    assert "takes bf16, fp16 or fp32, not float64" in package_kernel(PACKAGES[name], layers, torch.float64)


OFFLOADED = (19, 14, 5, 1, 13, 9)
# Rings of three and two with packs beside them, and a pack that is cut over four.
OVER_FOUR = make_plan(
    4,
    OFFLOADED,
    [
        [Piece(ranks=(0, 2, 1), sequences=(0,)), Piece(ranks=(3,), sequences=(2, 3))],
        [Piece(ranks=(1, 0, 2, 3), sequences=(4, 5)), Piece(ranks=(3, 0), sequences=(1,))],
    ],
)
OF_DELTA, OF_MAMBA2, OF_CONVOLUTION = "qwen3_5_text", "nemotron_h", "lfm2"


@pytest.mark.parametrize("family", [OF_CONVOLUTION, more(OF_DELTA), more(OF_MAMBA2)])
def test_waves_and_offload_keep_states_and_halos_exact(family):
    plan = recomputing(OVER_FOUR, "layer")
    offloading = tuple(replace(each, offload=0.7) for each in plan.microbatches)
    for changed, how in (
        (replace(plan, schedule={"kind": "waves"}, requires=("waves",)), {"ranks_per_node": 4}),
        (replace(plan, microbatches=offloading), {"make_store": CountingStore}),
    ):
        found = family_difference(pair_of(family), changed, OFFLOADED, precision="fp64", **how)
        assert max(found.loss, found.gradient) <= 1e-12


def test_a_scan_without_the_plan_is_refused_in_a_planned_forward_and_plain_outside_of_one():
    model = copy.deepcopy(pair_of(OF_DELTA)["planned"])
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
        plain = copy.deepcopy(pair_of(OF_DELTA)["plain"])
        expected = plain(input_ids=ids[None], use_cache=False).logits
        del layer.forward
        assert torch.allclose(planned_output(model, planned, ids, positions).logits, expected, atol=1e-5)


def test_layers_that_kernels_of_the_hub_replaced_are_refused():
    model = copy.deepcopy(pair_of(OF_CONVOLUTION)["planned"])
    model._use_kernels = True
    with pytest.raises(ModelRefused, match="use_kernels"):
        put_mixers(model, lambda: True)


@pytest.mark.parametrize("family", [OF_DELTA, more(OF_MAMBA2)])
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
