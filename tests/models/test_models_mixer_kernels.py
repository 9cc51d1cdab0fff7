"""Packages for layers with states and convolutions: calls by their contract, their proof, and which a model takes."""

import sys
from collections import Counter
from functools import cache
from types import ModuleType, SimpleNamespace

import pytest
import torch
from testing import build_pair, family_difference, make_plan, tiny_family_config
from testing.mixers import STAND_INS

from lengthwise.attention import prove
from lengthwise.comm import SoloTransport
from lengthwise.core.plan import Piece
from lengthwise.models import choose_mixers, mixer_choice
from lengthwise.models import mixer_layers as mixers
from lengthwise.models.mixer_choice import cases_of, layers_of
from lengthwise.models.mixer_kernels import CONVOLUTION, DELTA_RULE, KDA, MAMBA2, PACKAGES, package_kernel
from lengthwise.models.model_source import build_skeleton
from models.test_models_checkpointing import recomputing
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
