"""The chunked loss: equal to the loss over whole logits, without ever making them."""

import pytest
import torch
from testing import LiveBytes, make_batch, make_plan, relative_error, tiny_family_config, tiny_tower_config
from testing.tiny import VOCAB
from transformers import AutoModelForImageTextToText

from lengthwise.attention import PlannedAttention, choose_kernel
from lengthwise.comm import SoloTransport
from lengthwise.core.errors import ModelRefused
from lengthwise.core.plan import Piece
from lengthwise.cost import loss_bytes, shape_from_config
from lengthwise.models.adapter import model_log_probabilities, model_loss
from lengthwise.models.double import keep_double
from lengthwise.models.loss import has_own_logits
from lengthwise.models.model_source import ModelSource, build_model
from lengthwise.models.text_part import text_part
from lengthwise.program import lower_plan
from tiers import some

CPU = torch.device("cpu")
LENGTHS = (23, 1, 40, 7)
ROUNDS = make_plan(1, LENGTHS, [Piece(ranks=(0,), sequences=(0, 1, 2, 3))], layers=2)
TOLERANCES = {torch.float64: 1e-13, torch.float32: 3e-6}
# Untied, tied, capped logits, scaled logits, no bias before the head, a decoder inside the base model.
FAMILIES = ("llama", "gemma", "gemma3_text", "cohere", "granite", "opt", "qwen3_moe")


def microbatch():
    batch = make_batch(LENGTHS, vocab=VOCAB, seed=1, masked=0.2)
    (program,) = lower_plan(ROUNDS, 0)
    planned = PlannedAttention(program, SoloTransport(), choose_kernel(CPU))
    return planned, batch.tensors(program.segments(0))


def loss_and_gradients(model, *, tokens_at_once, dtype=torch.float64, grad=True, weighed=False):
    """Run one microbatch; None: whole logits."""
    model = model.to(dtype)
    model.zero_grad(set_to_none=True)
    planned, tensors = microbatch()
    at_once = None if tokens_at_once is None else tokens_at_once * model.config.vocab_size
    with torch.set_grad_enabled(grad), keep_double(dtype):
        weights = 0.25 + (torch.arange(len(tensors[0])) % 5) if weighed else None
        found = model_loss(model, planned, *tensors, weights, logits_at_once=at_once)
        if grad:
            (found / 3).backward()
    return found.detach(), {name: each.grad for name, each in model.named_parameters() if each.requires_grad}


def tiny(family, **changes):
    config = tiny_family_config(family, changes)
    return build_model(ModelSource(name=family, config=config, weights=False), seed=3)


@pytest.mark.parametrize("dtype", some(TOLERANCES), ids=str)
@pytest.mark.parametrize("family", some(FAMILIES, 0, 2, 3))
def test_chunked_loss_equals_whole(family, dtype):
    model = tiny(family)
    plain, _ = loss_and_gradients(model, tokens_at_once=None, dtype=dtype)
    wanted, gradients = loss_and_gradients(model, tokens_at_once=None, dtype=dtype, weighed=True)
    assert relative_error(wanted, plain) > 0.1
    for tokens_at_once in (1, 7, 70):  # of 71
        found, chunked = loss_and_gradients(model, tokens_at_once=tokens_at_once, dtype=dtype, weighed=True)
        assert relative_error(found, wanted) < TOLERANCES[dtype]
        assert chunked.keys() == gradients.keys()
        floor = 1e-3 * max(each.norm().item() for each in gradients.values() if each is not None)
        for name, gradient in gradients.items():
            assert (gradient is None) == (chunked[name] is None), name
            if gradient is not None:
                assert relative_error(chunked[name], gradient, floor=floor) < TOLERANCES[dtype], name


def test_log_probabilities_in_chunks_are_those_of_all_logits_and_less_the_loss():
    model = tiny("gemma3_text").double()
    (planned, tensors), found = microbatch(), []
    with keep_double(torch.float64):
        for tokens_at_once in (71, 7):
            at_once = tokens_at_once * model.config.vocab_size
            found.append(model_log_probabilities(model, planned, *tensors, logits_at_once=at_once))
            planned, _ = microbatch()
        loss = model_loss(model, planned, *tensors)
    assert relative_error(found[1], found[0]) < 1e-14
    assert relative_error(-found[0].sum(), loss.detach()) < 1e-14
    assert not found[1][tensors[2] == -100].any()


def test_chunked_loss_in_bf16_is_as_near_to_fp64_as_whole():
    model = tiny("gemma3_text").to(torch.bfloat16)
    runs = {tokens: loss_and_gradients(model, tokens_at_once=tokens, dtype=torch.bfloat16) for tokens in (None, 7)}
    wanted, gradients = loss_and_gradients(model, tokens_at_once=None)
    floor = 1e-3 * max(each.norm().item() for each in gradients.values())  # of keys' biases, whose true gradient is 0
    errors = {
        tokens: sum(relative_error(found[name], each, floor=floor) ** 2 for name, each in gradients.items()) ** 0.5
        for tokens, (_, found) in runs.items()
    }
    assert errors[7] < 1.2 * errors[None]
    assert relative_error(runs[7][0], wanted) < 1.2 * relative_error(runs[None][0], wanted) + 1e-4


def test_gradient_of_a_head_in_bf16_is_rounded_once_after_its_chunks():
    """The sum of the chunks' gradients and the divisor of a step are multiplied in fp32."""
    model, chunks, products = tiny("llama"), [], torch.autograd.grad

    def kept(*given, **how):
        found = products(*given, **how)
        chunks.append(found[1].double())
        return found

    microbatch()  # whose kernel is proved by gradients, too
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "grad", kept)
        _, found = loss_and_gradients(model, tokens_at_once=7, dtype=torch.bfloat16)  # of a third of the loss
    assert len(chunks) > 10
    exact = sum(chunks) / 3
    assert torch.equal(found["lm_head.weight"].double(), exact.float().bfloat16().double())


def test_chunked_loss_holds_what_the_memory_model_says():
    dtype = torch.bfloat16
    model = tiny("llama", vocab_size=32768).to(dtype)
    shape, peaks = shape_from_config(model.config.to_dict()), {}
    for tokens_at_once in (None, 8):
        model.zero_grad(set_to_none=True)
        with LiveBytes(*model.parameters()) as live:
            loss_and_gradients(model, tokens_at_once=tokens_at_once, dtype=dtype)
        peaks[tokens_at_once] = live.peak_bytes
    wanted = loss_bytes(shape, sum(LENGTHS), dtype.itemsize, logits_at_once=8 * 32768)
    assert peaks[8] == pytest.approx(wanted, rel=0.15)  # the layers' activations come on top
    assert peaks[8] < 0.5 * peaks[None]


def test_chunked_loss_refuses_a_model_whose_decoder_does_not_run(monkeypatch):
    model = tiny("llama")
    monkeypatch.setattr(type(model), "get_decoder", lambda self: torch.nn.Identity())
    with pytest.raises(ModelRefused, match="runs its decoder once"):
        loss_and_gradients(model, tokens_at_once=7)


def test_a_model_with_a_tower_makes_logits_in_chunks_unless_its_forward_is_the_users():
    whole = AutoModelForImageTextToText.from_config(tiny_tower_config("gemma3", "gemma3_text"))
    assert not has_own_logits(text_part(whole))
    whole.forward = lambda **asked: type(whole).forward(whole, **asked)
    assert has_own_logits(text_part(whole))
