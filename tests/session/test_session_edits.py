"""What a loop does to gradients and weights beside the session's backward: as in the plain loop, or refused."""

import pytest
import torch
from loops import ADAMW, in_double, in_ranks, said
from testing.small import rows_of, small_model

from lengthwise import Session
from lengthwise.core.errors import LengthwiseError

FIRST = rows_of([9, 12], 1)


def members(loop):
    return [parameter for group in loop.optimizer.param_groups for parameter in group["params"]]


def clamp_weights(loop):
    with torch.no_grad():
        for parameter in members(loop):
            parameter.clamp_(-0.02, 0.02)


class Planned:
    """A loop with a session."""

    def __init__(self, model, options):
        self.model, self.optimizer = model, ADAMW(model.parameters())
        self.session = Session(model, self.optimizer, capacity_tokens=64, **options)
        self.step, self.backward = self.optimizer.step, self.session.backward


def own_backward(loop):
    loop.model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()


def set_by_name(loop):
    loop.model.lm_head.weight.grad = torch.zeros_like(loop.model.lm_head.weight)
    loop.step()


def norm_in_a_hook(loop):
    loop.optimizer.register_step_pre_hook(lambda *_: members(loop)[0].norm())
    loop.step()


def other_members(loop):
    del loop.optimizer.param_groups[0]["params"][0]
    loop.step()


def freeze_a_slice(loop):
    members(loop)[0].requires_grad = False
    loop.backward(FIRST)


def other_data(loop):
    loop.model.lm_head.weight.data = loop.model.lm_head.weight.data * 0.5
    loop.step()


def write_both_ways(loop):
    clamp_weights(loop)
    loop.model.lm_head.weight.detach().mul_(0.5)
    loop.step()


def run_the_model_while_slices_are_newer(loop):
    clamp_weights(loop)
    with torch.no_grad():
        loop.model(input_ids=torch.tensor([[5, 6, 7]]))


REFUSED = [
    (lambda loop: torch.nn.utils.clip_grad_norm_(members(loop), 1.0), r"Call session\.clip_grad_norm_"),
    (lambda loop: [parameter.grad.clone().sum() for parameter in members(loop)], "sum of a slice"),
    (norm_in_a_hook, "norm of a slice"),
    (lambda loop: loop.optimizer.step(lambda: loop.backward(FIRST)), "expected no closure"),
    (lambda loop: [parameter.grad.data for parameter in members(loop)], "data of a slice"),
    (other_members, "other parameters in them"),
    (freeze_a_slice, "a frozen parameter"),
    (other_data, r"lm_head.weight: expected its \.data in place"),
    (own_backward, "backward outside of the session"),
    (set_by_name, "a gradient of .* set by hand"),
    (run_the_model_while_slices_are_newer, "changes to slices in optimizer.param_groups"),
    (write_both_ways, "both at once"),
]


def test_what_slices_cannot_have_is_refused_in_words(tmp_path):
    def work(_rank):
        for refused, words in REFUSED:
            loop = Planned(small_model(torch.bfloat16, num_hidden_layers=1), {"shard": "zero1"})
            loop.backward(FIRST)
            with pytest.raises(LengthwiseError, match=words):
                refused(loop)
        with pytest.raises(LengthwiseError, match="both at once"):  # the last, which would be lost
            loop.session.close()

    in_ranks(work, 2, tmp_path)


def test_parameters_that_a_loop_kept_and_hooks_are_refused_where_the_model_has_others(tmp_path):
    def work(_rank):
        hooked, model = small_model(), small_model()
        hooked.lm_head.weight.register_hook(lambda gradient: gradient * 0.5)
        assert "lm_head.weight: expected no gradient hook" in said(lambda: Planned(hooked, {"shard": "zero3"}))
        kept = list(model.parameters())
        loop = Planned(model, {"shard": "zero3"})
        loop.backward(FIRST)
        assert "gradient of a parameter" in said(lambda: torch.nn.utils.clip_grad_norm_(kept, 1.0))
        assert "norm of a parameter" in said(lambda: [each.norm() for each in kept])
        loop.session.evaluate(FIRST)
        assert "data of a parameter" in said(lambda: loop.model.lm_head.weight.data.mul_(0.5))
        loop.session.close()

    in_ranks(in_double(work), 2, tmp_path)


def test_slices_have_what_a_loop_wrote_into_the_model_and_into_them(tmp_path):
    def work(_rank):
        loop = Planned(small_model(), {"shard": "zero1"})
        with loop.session, torch.no_grad():
            for each in loop.model.parameters():
                each.data.fill_(0.5)
            for each in members(loop):
                each.mul_(0.5)
        return max(float(each.detach().abs().max()) for each in loop.model.parameters())

    assert in_ranks(work, 2, tmp_path) == [0.25] * 2
