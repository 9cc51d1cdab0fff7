"""Compiled decoder layers, exact and traced once for all lengths however activations are kept; the compiled loss.

Where the loss runs compiled, that wrong ones do not, and what it computes for any number of tokens.
"""

import copy
import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch._dynamo
from testing import make_batch, make_plan, put_forwards, run_ranks, tiny_model
from testing.laid import whole_parameters
from testing.stores import CopyStore
from testing.strict import StrictWorld
from testing.tiny import VOCAB
from torch._dynamo.utils import counters

from engine.sharded_runs import KINDS, WAVES, in_waves, run, shard
from lengthwise.attention import choose_kernel
from lengthwise.comm import Mesh, SoloTransport
from lengthwise.core.plan import Piece
from lengthwise.engine.offloading import Offloading
from lengthwise.engine.step import StepContext, run_part
from lengthwise.models import Computing, keep_double, loss_choice
from lengthwise.models.computing import compiled_forwards
from lengthwise.models.loss import loss_by, token_loss, token_losses
from lengthwise.models.loss_choice import choose_losses, compiled_losses
from lengthwise.run.verify import gradient_differences
from tiers import more

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


TOKENS = (70, 2, 33, 48, 7)
BARS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3}  # of the largest number; bf16 rounds gradients


def by_formula(logits, labels, weights):
    """Return losses and the gradient of their sum, in fp64, by hand."""
    shares = logits.double().softmax(-1)
    given = torch.where(labels < 0, 0.0, 1.0 if weights is None else weights.double())
    own = torch.nn.functional.one_hot(labels.clamp(min=0), logits.shape[-1])
    return -(shares * own).sum(-1).log().where(labels >= 0, 0.0), given[:, None] * (shares - own)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of inductor's imports
@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", more("inductor")])
@pytest.mark.parametrize("dtype", BARS, ids=str)
def test_one_graph_computes_the_loss_of_any_number_of_tokens(dtype, backend, weighed):
    random, losses = torch.Generator().manual_seed(0), compiled_losses(backend=backend)
    for number, tokens in enumerate(TOKENS):
        logits = (3 * torch.randn(tokens, 61, generator=random)).to(dtype).requires_grad_()
        labels = torch.randint(-20, 61, (tokens,), generator=random).clamp(min=-1)
        labels = labels.where(labels >= 0, -100)
        weights = torch.rand(tokens, generator=random) if weighed else None
        each, gradient = by_formula(logits.detach(), labels, weights)
        # Under autocast and outside of it, as steps and the proof are.
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bool(number % 2)):
            found = losses[token_loss](logits, labels, weights)
        (made,) = torch.autograd.grad(found, logits)
        assert found.item() == pytest.approx((each * (1 if weights is None else weights)).sum().item(), rel=1e-6)
        assert made.dtype == dtype
        assert (made - gradient).abs().max() <= BARS[dtype]
        assert graphs() == 1
    with torch.no_grad():
        assert torch.allclose(losses[token_losses](logits, labels).double(), each, rtol=1e-6)


def doubled(loss, *given):
    return 2 * loss(*given)


@pytest.mark.parametrize(
    ("computing", "wrong", "said"),
    [
        (Computing(), None, []),  # a CPU compiles only what it is asked to
        (Computing(compile=True), None, ["loss: compiled to one pass; proved in "]),
        (
            Computing(compile=True),
            1,
            ["loss: by torch's operations; because rank 1: sum of 72 tokens, float32: loss is"],
        ),
    ],
)
def test_the_loss_is_compiled_if_it_is_right_on_every_rank(computing, wrong, said, monkeypatch):
    losses, here = compiled_losses(backend="eager"), threading.local()
    twice = {each: partial(doubled, each) for each in losses}
    monkeypatch.setattr(loss_choice, "compiled_losses", lambda: twice if here.rank == wrong else losses)

    def work(transport):
        here.rank, model, lines = transport.rank, tiny_model("llama"), []
        choose_losses(model, transport, CPU, dtype=torch.float32, computing=computing, say=lines.append)
        transport.all_reduce(torch.zeros(1))  # all have traced
        traced, logits, labels = graphs(), torch.randn(9, 48, requires_grad=True), torch.arange(9)
        assert torch.equal(loss_by(model, token_loss, logits, labels), token_loss(logits, labels))
        loss_by(model, token_loss, logits.bfloat16(), labels)  # a dtype that was not proved
        assert graphs() == traced, "the proved graph runs"
        assert [line[: len(text)] for line, text in zip(lines, said, strict=True)] == said
        return traced

    assert all(bool(traced) == bool(said) for traced in StrictWorld(2).run(work))
