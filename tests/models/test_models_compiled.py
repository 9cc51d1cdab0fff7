"""Compiled decoder layers: exact, traced once for all lengths, under every way to keep or recompute activations."""

import copy
from dataclasses import replace

import pytest
import torch
import torch._dynamo
from testing import enliven, make_batch, make_plan
from testing.strict import StrictWorld
from testing.tiny import VOCAB, tiny_family_config
from torch._dynamo.utils import counters

from lengthwise.attention import choose_kernel
from lengthwise.comm import SoloTransport
from lengthwise.core.plan import Piece
from lengthwise.engine.activations import Offloading
from lengthwise.engine.replicated import FlatParameters
from lengthwise.engine.step import run_plan
from lengthwise.models import DTYPES, Computing, ModelSource, build_model, compute_so, keep_double
from lengthwise.models.computing import compile_layers
from lengthwise.offload import CopyStore
from tiers import some

CPU = torch.device("cpu")
KERNEL = choose_kernel(CPU)
LENGTHS = ((21, 5, 8, 13), (2, 30, 11), (40,), (7, 9, 17, 3), (33, 20))
BARS = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 3e-2}


@pytest.fixture(autouse=True)
def nothing_traced():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def built(family, **changes):
    config = tiny_family_config(family, changes)
    return enliven(build_model(ModelSource(name=family, config=config, weights=False), seed=3))


class Trained:
    """A model of one rank whose gradients can be asked for again and again."""

    def __init__(self, model, precision="fp64", transport=None):
        self.model, self._dtype, self._transport = model, DTYPES[precision], transport or SoloTransport()
        self._flat = FlatParameters(model, self._transport, dtype=self._dtype)
        self._offloading = Offloading(model, KERNEL, CopyStore())

    def run(self, plan, lengths, *, train=True):
        """Return (loss, gradients), and forget them."""
        batch = make_batch(lengths, vocab=VOCAB, seed=len(lengths))
        options = {"name": "test", "train": train, "offloading": self._offloading}
        with keep_double(self._dtype):
            work = run_plan(self.model, plan, batch, self._transport, KERNEL, **options)
        if not train:
            return work.loss_sum, {}
        self._flat.reduce_gradients()
        gradients = {name: each.clone() for name, each in self._flat.gather_gradients().items()}
        self._flat.grads.zero_()
        return work.loss_sum, gradients


def plan_of(lengths, *, layers, recompute="none", offload=None, ranks=1):
    """The first sequence over all ranks, then the others in packs of two."""
    pairs = [tuple(range(len(lengths)))[start : start + 2] for start in range(1, len(lengths), 2)]
    pieces = [Piece(ranks=tuple(range(ranks)), sequences=(0,)), *(Piece(ranks=(0,), sequences=each) for each in pairs)]
    plan = make_plan(ranks, lengths, pieces, layers=layers)
    return replace(
        plan,
        microbatches=tuple(replace(each, recompute=recompute, offload=offload) for each in plan.microbatches),
    )


def worst(got, want):
    """The largest relative L2 difference of a gradient, floored by the median norm, and that of the losses."""
    norms = {name: each.double().norm().item() for name, each in want[1].items()}
    floor = 1e-3 * sorted(norms.values())[len(norms) // 2]
    found = [(got[1][n].double() - want[1][n].double()).norm().item() / max(norms[n], floor) for n in norms]
    return max(abs(got[0] - want[0]) / abs(want[0]), *found)


def graphs():
    return counters["stats"]["unique_graphs"]


def check(compiled, plain, bar, **options):
    """Compare step by step; the lengths after the first may trace nothing."""
    traced = []
    for lengths in LENGTHS:
        plan = plan_of(lengths, layers=plain.model.config.num_hidden_layers, **options)
        want = plain.run(plan, lengths)
        before = graphs()
        assert worst(compiled.run(plan, lengths), want) <= bar
        traced.append(graphs() - before)
    assert traced[0] > 1
    assert not any(traced[1:]), f"graphs traced at each step: {traced}"


def pair(family, precision="fp64", *, backend="eager", **changes):
    model = built(family, **changes)
    compiled = copy.deepcopy(model)
    said = compile_layers(compiled, backend=backend)
    assert said.startswith(f"{model.config.num_hidden_layers} layers are compiled around their attention")
    return Trained(compiled, precision), Trained(model, precision)


@pytest.mark.parametrize("precision", some(BARS, 0))
def test_microbatches_of_any_length_run_the_same_graphs_to_the_bit(precision):
    """The backend that runs what was traced as it was: what differs would be the trace's fault."""
    check(*pair("llama", precision), 0.0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", some(["gemma3_text", "phi3"], 0))
def test_other_families_run_the_same_graphs_to_the_bit(family):
    """gemma3: windows in some layers, so two kinds of attention in graphs of one layer class."""
    check(*pair(family), 0.0)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("recompute", "offload", "backend"),
    some(
        [
            ("none", 0.5, "eager"),
            ("layer", None, "eager"),
            ("layer", 0.5, "aot_eager"),
            ("all_but_attention", None, "aot_eager"),
            ("all_but_attention", 0.5, "eager"),
        ],
        4,
    ),
)
def test_compiled_layers_are_recomputed_and_offloaded_like_others(recompute, offload, backend):
    """aot_eager: whole graphs through autograd, which saves what the graph says."""
    compiled, plain = pair("llama", backend=backend, num_hidden_layers=4)
    check(compiled, plain, BARS["fp64"], recompute=recompute, offload=offload)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of inductor's imports
def test_inductor_keeps_the_gradients_of_fp64():
    """What runs on GPUs, as C++ here: one fused kernel for each part between products."""
    check(*pair("llama", backend="inductor"), BARS["fp64"])


@pytest.mark.exhaustive
def test_an_evaluation_is_a_class_of_its_own_traced_once():
    compiled, plain = pair("llama")
    traced = []
    for lengths in (*LENGTHS, *LENGTHS):
        before, plan = graphs(), plan_of(lengths, layers=2)
        with torch.no_grad():
            assert compiled.run(plan, lengths, train=False)[0] == plain.run(plan, lengths, train=False)[0]
        compiled.run(plan, lengths)
        traced.append(graphs() - before)
    assert not any(traced[1:])


@pytest.mark.exhaustive
def test_rings_of_compiled_layers_give_what_one_rank_gives():
    model, lengths = built("llama"), (40, 7, 9)
    want = Trained(copy.deepcopy(model)).run(plan_of(lengths, layers=2), lengths)
    compile_layers(model, backend="eager")
    plan = plan_of(lengths, layers=2, ranks=2, recompute="layer")

    def work(transport):
        loss, gradients = Trained(copy.deepcopy(model), transport=transport).run(plan, lengths)
        losses = torch.tensor([loss], dtype=torch.float64)
        transport.all_reduce(losses)
        return losses.item(), gradients

    for got in StrictWorld(2).run(work):
        assert worst(got, want) <= BARS["fp64"]
    assert graphs()


def test_a_copy_of_a_compiled_model_runs_its_own_layers():
    model, lengths = built("llama"), LENGTHS[0]
    compile_layers(model, backend="eager")
    other = copy.deepcopy(model)
    for parameter in other.model.layers.parameters():
        parameter.data.zero_()
    plan = plan_of(lengths, layers=2)
    changed, unchanged = (Trained(each).run(plan, lengths) for each in (other, model))
    assert changed[0] != unchanged[0]
    assert not changed[1]["model.layers.0.mlp.down_proj.weight"].any()
    assert unchanged[1]["model.layers.0.mlp.down_proj.weight"].any()


@pytest.mark.parametrize(
    ("family", "said"),
    [("mixtral", "experts are not traced yet"), ("ctrl", "this family has no wrap around its layers")],
)
def test_models_that_are_not_compiled_say_so_and_stay_as_they_are(family, said):
    model = built(family)
    assert compile_layers(model, backend="eager") == f"no layer is compiled: {said}"
    Trained(model).run(plan_of(LENGTHS[0], layers=model.config.num_hidden_layers), LENGTHS[0])
    assert not graphs()


def test_the_run_files_key_compiles_and_its_default_does_not(monkeypatch):
    asked, said = [], []
    monkeypatch.setattr("lengthwise.models.computing.compile_layers", lambda model: asked.append(model) or "done")
    model = built("llama")
    compute_so(model, Computing(), CPU, dtype=torch.float64, say=said.append)
    assert (asked, said) == ([], [])
    compute_so(model, Computing(compile=True), CPU, dtype=torch.float64, say=said.append)
    assert (asked, said) == ([model], ["compile: done"])
