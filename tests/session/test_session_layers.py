"""How a session's planned steps compute and sum: fused and compiled layers in them alone, gradients summed early."""

from functools import partial

import pytest
import torch
from loops import SGD, both_loops, in_double, in_ranks, said
from testing.small import VOCAB, plain_loss, small_model, steps_of
from testing.tiny import tiny_family_config
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lengthwise.core.errors import NumericError
from lengthwise.models import computing, keep_double, loss_choice
from lengthwise.models.fused_layers import fused_forwards
from lengthwise.session import Session
from models.test_models_fused_layers import PlainKernels
from tiers import more

ROWS = steps_of()[0]


def twice_as_much(model, x):
    return 2.0 * type(model).forward(model, x)


@pytest.fixture
def liger(monkeypatch):
    """Let runs that ask for Liger have plain formulas in its place, on the CPU and in fp64."""
    plain = PlainKernels()

    def forwards(model, asked, *_):
        return fused_forwards(model, plain) if asked == "liger" else ({}, "off; because it is not asked for")

    monkeypatch.setattr(computing, "choose_forwards", forwards)
    monkeypatch.setattr(computing, "choose_fused", lambda *_: ("liger", "a test"))
    return plain


@pytest.mark.parametrize("options", [{"fused_layers": "liger"}, more({"compile": True, "stages": 2})])
def test_layers_compute_as_asked_in_steps_alone(options, tmp_path, monkeypatch, liger):
    """A forward that the user has put on a module stays; between steps the model is plain."""
    for file, name in ((computing, "compiled_forwards"), (loss_choice, "compiled_losses")):
        monkeypatch.setattr(file, name, partial(getattr(file, name), backend="eager"))

    def work(_rank):
        model = small_model()
        norm = model.model.layers[0].input_layernorm
        norm.forward = partial(twice_as_much, norm)
        assert max(both_loops(SGD, model=model, steps=steps_of([[60, 50]]), **options)) < 1e-11
        kept = vars(norm).pop("forward", None)
        assert kept is not None or "stages" in options
        assert not any("forward" in vars(module) for module in model.modules())
        assert bool(liger.calls) == ("fused_layers" in options)

    in_ranks(in_double(work), 2, tmp_path)


def compile_all(model):
    for each in (model, *model.model.layers):
        each.compile(backend="eager")


def checkpoint_layers(model):
    model.activation_checkpointing_enable()


@pytest.mark.exhaustive
@pytest.mark.parametrize("changes", [compile_all, checkpoint_layers])
def test_what_a_loop_compiles_or_checkpoints_itself_stays_out_of_planned_steps(changes, capfd):
    """Before the session, or between its steps; the model keeps it for the loop's own calls."""
    norms = []
    for before, between in ((None, None), (compile_all, changes)):
        model = small_model()
        if before is changes:
            changes(model)
        with Session(model, SGD(model.parameters()), capacity_tokens=200) as session:
            norms.append(session.backward(ROWS).grad_norm)
            session.optimizer.zero_grad()
            if between is changes:
                changes(model)
            norms.append(session.backward(ROWS).grad_norm)
    assert norms == norms[:1] * 4
    layer = model.model.layers[0]
    assert layer._compiled_call_impl or layer.gradient_checkpointing
    assert ("compile=True" in capfd.readouterr().out) == ("compile" in changes.__name__)


def with_dropout(value):
    model = small_model()
    model.model.layers[1].mlp = torch.nn.Sequential(model.model.layers[1].mlp, torch.nn.Dropout(value))
    return model


def with_balance(value):
    config = tiny_family_config("qwen3_moe", {"vocab_size": VOCAB, "output_router_logits": bool(value)})
    how = {"experts_implementation": "eager", "dtype": torch.float64}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, **how).train()


def set_dropout(model, value):
    model.model.layers[1].mlp[1].p = value


def set_balance(model, value):
    model.config.output_router_logits = bool(value)


@pytest.mark.parametrize(("make", "change"), [(with_dropout, set_dropout), more(with_balance, set_balance)])
def test_dropout_and_balance_losses_that_a_loop_sets_are_those_of_the_start_and_sharing_returns(make, change):
    """Where rows share a prefix, which a plan computes once without them, and once for every row with them."""
    prompt = torch.arange(60)
    rows = [torch.cat([prompt, torch.full((length,), length)]) for length in (5, 7, 9, 11)]
    rows = [{"input_ids": row, "labels": torch.where(torch.arange(len(row)) < 60, -100, row)} for row in rows]

    def losses(value):
        model = make(value)
        with Session(model, SGD(model.parameters()), capacity_tokens=400, shard="zero1") as session:
            shares = bool(session.backward(rows).plan.parents)
            session.optimizer.zero_grad()
            change(model, 0.5)
            result = session.backward(rows)
            change(model, 0.0)
            again = bool(session.backward(rows).plan.parents)
        return (shares, again), (result.loss, result.router_loss, result.grad_norm)

    with keep_double(torch.float64):
        (early, found), (late, expected) = losses(0.0), losses(0.5)
    assert (early, late) == ((True, True), (False, False))
    assert found == expected


def test_embeddings_that_depend_on_the_microbatch_are_refused():
    for key in ("max_norm", "scale_grad_by_freq", "sparse"):
        model = small_model()
        setattr(model.model.embed_tokens, key, 1.0)
        told = said(partial(Session, model, SGD(model.parameters()), capacity_tokens=128))
        assert f"expected embeddings without {key}" in told


class HalfRMSNorm(LlamaRMSNorm):
    """A norm of the user's, with a formula of its own."""

    def forward(self, hidden_states):
        return 0.5 * super().forward(hidden_states)


def test_classes_and_forwards_of_the_user_are_not_replaced(liger):
    """Also a forward that a module gets when the session is there."""
    model = small_model()
    model.model.layers[0].input_layernorm.__class__ = HalfRMSNorm
    with keep_double(torch.float64), Session(model, capacity_tokens=256, fused_layers="liger") as session:
        norm = model.model.norm
        norm.forward = partial(twice_as_much, norm)
        assert session.evaluate(ROWS).loss == pytest.approx(plain_loss(model, ROWS, torch.float64), rel=1e-13)
        assert "forward" in vars(norm)


@pytest.mark.exhaustive
def test_sums_that_were_begun_end_with_a_step_that_is_refused(tmp_path):
    """A loss that is not finite is known once sums are under way: the next step is none the worse."""

    def work(_rank):
        model = small_model()
        with Session(model, SGD(model.parameters()), capacity_tokens=64, shard="zero1", overlap=True) as session:
            wanted = session.backward(ROWS).grad_norm
            session.optimizer.zero_grad()
            with pytest.raises(NumericError):
                session.backward(ROWS, loss=lambda outputs, _: outputs.logits.sum() * float("nan"))
            assert session.backward(ROWS).grad_norm == wanted

    in_ranks(in_double(work), 2, tmp_path)


def test_hooks_that_would_see_a_part_of_a_gradient_are_refused():
    model, told = small_model(), "lm_head.weight: expected no register_post_accumulate_grad_hook"
    with Session(model, SGD(model.parameters()), capacity_tokens=128) as session:
        session.backward(ROWS)
        session.optimizer.zero_grad()
        model.lm_head.weight.register_post_accumulate_grad_hook(lambda each: each.grad.mul_(0.5))
        assert told in said(lambda: session.backward(ROWS))
    assert told in said(lambda: Session(model, SGD(model.parameters()), capacity_tokens=128))
