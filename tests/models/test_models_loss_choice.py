"""The compiled loss: where it runs, that wrong ones do not, and what it computes for any number of tokens."""

import threading
from functools import partial

import pytest
import torch
import torch._dynamo
from testing import tiny_model
from testing.strict import StrictWorld
from torch._dynamo.utils import counters

from lengthwise.models import Computing, loss_choice
from lengthwise.models.loss import loss_by, token_loss, token_losses
from lengthwise.models.loss_choice import choose_losses, compiled_losses
from tiers import more

CPU = torch.device("cpu")
TOKENS = (70, 2, 33, 48, 7)
BARS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3}  # of the largest number; bf16 rounds gradients


@pytest.fixture(autouse=True)
def nothing_traced():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs():
    return counters["stats"]["unique_graphs"]


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
