"""What a loop does to gradients and weights beside the session's backward: as in the plain loop, or refused."""

from functools import partial

import pytest
import torch
from loops import in_double, in_ranks
from testing.small import rows_of, small_model

from lengthwise import Session
from lengthwise.core.errors import LengthwiseError

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
FIRST = rows_of([9, 12], 1)


def members(loop):
    return [parameter for group in loop.optimizer.param_groups for parameter in group["params"]]


def clamp_weights(loop):
    with torch.no_grad():
        for parameter in members(loop):
            parameter.clamp_(-0.02, 0.02)


class Planned:
    """A loop with a session, whose optimizer keeps its parameters."""

    def __init__(self, model, options):
        self.model, self.optimizer = model, ADAMW(model.parameters())
        self.optimizer.register_step_post_hook(self.finds_its_members)  # before the session's own
        self.session = Session(model, self.optimizer, capacity_tokens=64, **options)
        self.members, self.step, self.backward = members(self), self.optimizer.step, self.session.backward

    def finds_its_members(self, *_):
        assert all(now is before for now, before in zip(members(self), self.members, strict=True))


def own_backward(loop):
    loop.model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()


def set_by_name(loop):
    loop.model.lm_head.weight.grad = torch.zeros_like(loop.model.lm_head.weight)
    loop.step()


def norm_in_a_hook(loop):
    handle = loop.optimizer.register_step_pre_hook(lambda *_: members(loop)[0].norm())
    try:
        loop.step()
    finally:
        handle.remove()


def other_members(loop):
    group = loop.optimizer.param_groups[0]
    try:
        kept = [*group["params"]]
        del group["params"][0]
        loop.step()
    finally:
        group["params"] = kept


def freeze_a_slice(loop):
    members(loop)[0].requires_grad = False
    try:
        loop.backward(FIRST)
    finally:
        members(loop)[0].requires_grad = True


def other_data(loop):
    weight = loop.model.lm_head.weight
    before = weight.data
    weight.data = weight.data * 0.5
    try:
        loop.step()
    finally:
        weight.data = before


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
        loop = Planned(small_model(torch.bfloat16, num_hidden_layers=1), {"shard": "zero1"})
        for refused, words in REFUSED:
            loop.backward(FIRST)
            with pytest.raises(LengthwiseError, match=words):
                refused(loop)
            loop.optimizer.zero_grad()
        with pytest.raises(LengthwiseError, match="both at once"):  # the last, which would be lost
            loop.session.close()

    in_ranks(work, 2, tmp_path)


def test_parameters_that_a_loop_kept_and_hooks_are_refused_where_the_model_has_others(tmp_path):
    def work(_rank):
        model = small_model()
        model.lm_head.weight.register_hook(lambda gradient: gradient * 0.5)
        with pytest.raises(LengthwiseError, match=r"lm_head\.weight: expected no gradient hook"):
            Planned(model, {"shard": "zero3"})
        model = small_model()
        kept = list(model.parameters())
        loop = Planned(model, {"shard": "zero3"})
        loop.backward(FIRST)
        with pytest.raises(LengthwiseError, match="gradient of a parameter"):
            torch.nn.utils.clip_grad_norm_(kept, 1.0)
        with pytest.raises(LengthwiseError, match="norm of a parameter"):
            [each.norm() for each in kept]
        loop.session.close()

    in_ranks(in_double(work), 2, tmp_path)


@pytest.mark.exhaustive
def test_slices_and_the_model_have_what_a_loop_wrote_into_either(tmp_path):
    """By name; by `.data` and then into slices; into slices alone before the session closes."""

    def by_name(loop):
        for each in loop.model.parameters():
            each.fill_(0.5)
        loop.session.evaluate(FIRST)
        unlike = [parameter != 0.5 for parameter in members(loop)]
        with torch._C.DisableTorchFunctionSubclass():
            assert not any(each.any() for each in unlike)

    def by_data(loop):
        for each in loop.model.parameters():
            each.data.fill_(0.5)
        for each in members(loop):
            each.mul_(0.5)
        loop.session.evaluate(FIRST)

    def work(_rank):
        found = []
        for write in (by_name, by_data, clamp_weights):
            with (loop := Planned(small_model(), {"shard": "zero1"})).session, torch.no_grad():
                write(loop)
            found.append(max(float(each.detach().abs().max()) for each in loop.model.parameters()))
        return found

    assert in_ranks(work, 2, tmp_path) == [[0.5, 0.25, 0.02]] * 2
