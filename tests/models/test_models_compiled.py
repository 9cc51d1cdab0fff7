"""Compiled decoder layers: exact, traced once for all lengths, under every way to keep or recompute activations."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch._dynamo
from testing import make_batch, make_plan, put_forwards, run_ranks, tiny_model
from testing.laid import whole_parameters
from testing.stores import CopyStore
from testing.tiny import VOCAB
from torch._dynamo.utils import counters

from engine.sharded_runs import KINDS, WAVES, in_waves, run, shard
from lengthwise.attention import choose_kernel
from lengthwise.comm import Mesh, SoloTransport
from lengthwise.core.plan import Piece
from lengthwise.engine.offloading import Offloading
from lengthwise.engine.step import StepContext, run_part
from lengthwise.models import keep_double
from lengthwise.models.computing import compiled_forwards
from lengthwise.run.verify import gradient_differences

CPU = torch.device("cpu")
KERNEL = choose_kernel(CPU)
LENGTHS = ((21, 5, 8, 13), (2, 30, 11), (40,))


@pytest.fixture(autouse=True)
def nothing_traced():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Trained:
    """A model of one rank whose gradients can be asked for again and again, in fp64."""

    def __init__(self, model):
        self.model = model
        self._flat = whole_parameters(model, SoloTransport(), dtype=torch.float64)
        self._offloading = Offloading(model, KERNEL, CopyStore())

    def run(self, lengths, **how):
        """Return (loss, gradients), and forget them."""
        packs = [(0,), *(tuple(range(len(lengths)))[start : start + 2] for start in range(1, len(lengths), 2))]
        pieces, layers = [Piece(ranks=(0,), sequences=each) for each in packs], self.model.config.num_hidden_layers
        plan = make_plan(1, lengths, pieces, layers=layers)
        plan = replace(plan, microbatches=tuple(replace(each, **how) for each in plan.microbatches))
        batch, options = make_batch(lengths, vocab=VOCAB), {"name": "test", "offloading": self._offloading}
        with keep_double(torch.float64):
            work = run_part(plan, batch, StepContext(self.model, Mesh(SoloTransport(), 1), KERNEL, **options))
        self._flat.reduce_gradients()
        gradients = {name: each.clone() for name, each in self._flat.gather_gradients().items()}
        self._flat.grads.zero_()
        return work.loss_sum, gradients


def graphs():
    return counters["stats"]["unique_graphs"]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of inductor's imports
@pytest.mark.parametrize(
    ("backend", "bar", "layers", "how"),
    [
        ("eager", 0.0, 1, {}),  # runs what was traced as it was: what differs would be the trace's fault
        ("inductor", 1e-12, 1, {}),  # what runs on GPUs, as C++ here
        # aot_eager: whole graphs through autograd, which saves what the graph says.
        ("aot_eager", 1e-12, 4, {"recompute": "layer", "offload": 0.5}),
        ("eager", 1e-12, 4, {"recompute": "all_but_attention", "offload": 0.5}),
        ("aot_eager", 1e-12, 4, {"recompute": "elementwise", "offload": 0.5}),
    ],
)
def test_microbatches_of_any_length_run_the_same_graphs(backend, bar, layers, how):
    """Step by step; the lengths after the first may trace nothing."""
    model, traced = tiny_model("llama", {"num_hidden_layers": layers}), []
    own = copy.deepcopy(model)
    said = put_forwards(own, compiled_forwards(own, backend=backend))
    assert said.startswith(f"{layers} layers are compiled around their attention")
    compiled, plain = Trained(own), Trained(model)
    for lengths in LENGTHS:
        (want, expected), before = plain.run(lengths, **how), graphs()
        found, gradients = compiled.run(lengths, **how)
        assert abs(found - want) <= bar * want
        assert max(gradient_differences(gradients, expected).values()) <= bar
        traced.append(graphs() - before)
    assert traced[0] > 1
    assert not any(traced[1:]), f"graphs traced at each step: {traced}"


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "ranks", "per_node"), [*((kind, 3, None) for kind in KINDS), ("none", 4, 2)])
def test_waves_of_units_run_the_same_graphs_with_the_same_bits(kind, ranks, per_node):
    """Rings, packs and ranks without tokens, with parameters that are there only while their layer runs."""
    model = tiny_model("llama")
    steps = [((41, 11, 5, 7, 1, 23), WAVES), ((33, 9, 4, 12, 3, 30), WAVES)]

    def work(transport, *, compiles):
        own, found, traced = copy.deepcopy(model), [], []
        if compiles:
            put_forwards(own, compiled_forwards(own, backend="eager"))
        parameters = shard(own, transport, ranks_per_node=per_node)
        for lengths, waves in steps:
            run(own, parameters, transport, in_waves(make_plan(ranks, lengths, waves, layers=2), kind), lengths)
            parameters.reduce_gradients()
            found.append(parameters.gather_gradients())
            traced.append(graphs())
        return found, traced

    expected, found = (run_ranks(partial(work, compiles=compiles), ranks) for compiles in (False, True))
    assert not any(any(traced) for _, traced in expected)
    for (got, (first, second)), (want, _) in zip(found, expected, strict=True):
        assert 0 < first == second, "lengths after the first trace nothing"
        for ours, others in zip(got, want, strict=True):
            assert ours.keys() == others.keys()
            assert all(torch.equal(ours[name], each) for name, each in others.items())


@pytest.mark.parametrize(
    ("family", "said"),
    [("mixtral", "experts are not traced yet"), ("ctrl", "this family has no wrap around its layers")],
)
def test_models_that_are_not_compiled_say_so_and_stay_as_they_are(family, said):
    model = tiny_model(family)
    assert compiled_forwards(model, backend="eager") == ({}, f"no layer is compiled: {said}")
    Trained(model).run(LENGTHS[0])
    assert not graphs()
