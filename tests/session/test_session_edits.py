"""What a loop does to gradients and weights beside the session's backward: as in the plain loop, or refused."""

from functools import cache, partial

import pytest
import torch
from loops import in_double, in_ranks, loss_tokens, plain_losses, rows_of, small_model

from lengthwise import Session
from lengthwise.core.errors import LengthwiseError, NumericError
from tiers import more

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
FIRST, SECOND = rows_of([20, 30], 1), rows_of([7, 41, 2], 2)
LAYOUTS = {
    "alone": (1, {}),
    "zero1": (2, {"shard": "zero1"}),
    "host": (2, {"shard": "zero1", "offload_optimizer": True}),
    "zero3": (2, {"shard": "zero3"}),
    "hybrid": (4, {"shard": "hybrid", "ranks_per_node": 2}),
    "stages": (2, {"stages": 2}),
    "replicas": (4, {"stages": 2}),
}


PROGRAMS = []


def program(work):
    """Note what a loop does between the start and its last step."""
    PROGRAMS.append(work)
    return work


def members(loop):
    return [parameter for group in loop.optimizer.param_groups for parameter in group["params"]]


def halve_gradients(loop):
    for parameter in members(loop):
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def clamp_weights(loop):
    with torch.no_grad():
        for parameter in members(loop):
            parameter.clamp_(-0.02, 0.02)


@program
def steps_twice(loop):
    loop.backward(FIRST)
    loop.step()
    loop.step()
    loop.backward(SECOND)


@program
def clip_between_backwards(loop):
    loop.backward(FIRST)
    loop.clip(0.05)
    loop.backward(SECOND)


@program
def clip_scaled(loop):
    loop.backward(FIRST)
    halve_gradients(loop)
    loop.clip(0.05)
    loop.backward(SECOND)


@program
def clamp_gradients(loop):
    loop.backward(FIRST)
    torch.nn.utils.clip_grad_value_(members(loop), 1e-3)
    loop.clip(1e9)


@program
def clear_to_zero(loop):
    loop.backward(FIRST)
    loop.step()
    members(loop)[2].grad = None
    loop.optimizer.zero_grad(set_to_none=False)
    loop.step()


@program
def set_before_a_backward(loop):
    for rows in (FIRST, SECOND):
        for number, parameter in enumerate(members(loop)):
            parameter.grad = torch.full_like(parameter, 0.01 * number)
        loop.backward(rows)
        loop.clip(0.5)
        loop.step()
        loop.optimizer.zero_grad()


@program
def clear_some(loop):
    loop.backward(FIRST)
    members(loop)[1].grad = None
    members(loop)[2].grad = torch.zeros_like(members(loop)[2])
    loop.clip(0.05)
    loop.step()
    loop.backward(SECOND)


@program
def clear_one_of_the_model(loop):
    loop.backward(FIRST)
    for name, parameter in loop.model.named_parameters():
        if "layers.1" in name:
            parameter.grad = None
    loop.step()
    loop.backward(SECOND)


@program
def clamp_between_steps(loop):
    for rows in (FIRST, SECOND):
        loop.backward(rows)
        loop.step()
        loop.optimizer.zero_grad()
        clamp_weights(loop)
    loop.backward(FIRST)


@program
def clamp_in_hooks(loop):
    loop.optimizer.register_step_post_hook(lambda *_: clamp_weights(loop))
    loop.optimizer.register_step_pre_hook(lambda *_: clamp_weights(loop))
    clamp_between_steps(loop)


@program
def evaluate_between(loop):
    loop.backward(FIRST)
    loop.evaluate(SECOND)
    loop.clip(0.05)


@program
def forget_states(loop):
    loop.backward(FIRST)
    loop.step()
    for parameter in members(loop):
        loop.optimizer.state[parameter].pop("exp_avg", None)
        loop.optimizer.state[parameter] = {}
    loop.optimizer.zero_grad()
    loop.backward(SECOND)
    loop.step()
    loop.optimizer.state[members(loop)[2]]["exp_avg"].mul_(0.5)  # 1 is not reached


@program
def clear_the_second_name(loop):
    loop.backward(FIRST)
    for name, parameter in loop.model.named_parameters(remove_duplicate=False):
        if name.startswith("lm_head"):
            parameter.grad = None
    loop.clip(0.05)


@program
def fail_and_go_on(loop):
    loop.fail(FIRST)
    loop.step()
    loop.backward(SECOND)
    loop.clip(0.05)


@program
def go_on_from_its_state(loop):
    loop.backward(FIRST)
    loop.step()
    loop.reload()


class Plain:
    """The loop in one process, of whole rows one after the other."""

    def __init__(self, model):
        self.model, self.optimizer, self.numbers = model, ADAMW(model.parameters()), []

    def step(self):
        self.optimizer.step()

    def backward(self, rows):
        for loss in plain_losses(self.model, rows):
            (loss / loss_tokens(rows)).backward()

    def evaluate(self, rows):
        with torch.no_grad():
            self.numbers.append(sum(loss.item() for loss in plain_losses(self.model, rows)) / loss_tokens(rows))

    def clip(self, limit):
        self.numbers.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit).item())

    def fail(self, rows):
        self.optimizer.zero_grad()

    def reload(self):
        pass

    def weights(self):
        return {name: each.detach() for name, each in self.model.named_parameters()}


class Planned(Plain):
    """The same with a session."""

    def __init__(self, model, options):
        super().__init__(model)
        self.optimizer.register_step_post_hook(self.finds_its_members)  # before the session's own
        self.session = Session(model, self.optimizer, capacity_tokens=64, **options)
        self.members = members(self)

    def finds_its_members(self, *_):
        assert all(now is before for now, before in zip(members(self), self.members, strict=True))

    def backward(self, rows):
        self.session.backward(rows)

    def evaluate(self, rows):
        self.numbers.append(self.session.evaluate(rows).loss)
        if self.session.shard == "zero1" and self.session.engine.pipeline is None:
            with Session(self.model, capacity_tokens=64) as evaluating:
                assert evaluating.evaluate(rows).loss == pytest.approx(self.numbers[-1], rel=1e-12)

    def clip(self, limit):
        self.numbers.append(self.session.clip_grad_norm_(limit))

    def fail(self, rows):
        self.backward(rows)
        with pytest.raises(NumericError, match="loss: expected a finite number; got nan"):
            self.session.backward(rows, loss=lambda outputs, tokens: outputs.logits.sum() * float("nan"))

    def reload(self):
        state = self.session.state_dict()
        for group in self.optimizer.param_groups:
            group["lr"] *= 3
        self.session.load_state_dict(state)

    def weights(self):
        return self.session.state_dict().get("master_weights", {})


def first_model():
    """Return a model with a tied weight, and a parameter that no loss reaches, which decays nowhere."""
    model = small_model(tie_word_embeddings=True)
    model.model.layers[0].unused = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
    return model


def run_program(work, loop):
    """Return weights and numbers after a program."""
    loop.numbers = []
    work(loop)
    loop.step()
    return loop.weights(), loop.numbers


@cache
def plain_results():
    """Return what every program gives in the plain loop."""
    return {work: run_program(work, Plain(first_model())) for work in PROGRAMS}


def differences(expected, options):
    """Return of every program how far weights and numbers are from the plain loop's."""
    planned, found = Planned(first_model(), options), {}
    start = planned.session.state_dict()
    for work in sorted(PROGRAMS, key=lambda each: each is clamp_in_hooks):  # hooks stay
        (weights, numbers), (plain, plain_numbers) = run_program(work, planned), expected[work]
        pairs = [(each, plain[name]) for name, each in weights.items()]
        pairs += [(torch.tensor(a), torch.tensor(b)) for a, b in zip(numbers, plain_numbers, strict=True)]
        found[work.__name__] = max((float((a - b).abs().max()) for a, b in pairs), default=0.0)
        planned.session.load_state_dict(start)
        planned.optimizer.zero_grad()
    planned.session.close()
    return found


@pytest.mark.parametrize("layout", ["zero1", *map(more, ("alone", "host", "zero3", "hybrid", "stages", "replicas"))])
def test_what_a_loop_does_beside_backward_is_as_in_the_plain_loop(layout, tmp_path):
    ranks, options = LAYOUTS[layout]
    expected = in_double(lambda _rank: plain_results())(0)
    for found in in_ranks(in_double(lambda _rank: differences(expected, options)), ranks, tmp_path):
        assert {name: far for name, far in found.items() if far > 1e-10} == {}


def norm_of_slices(loop):
    return sum(parameter.norm() for parameter in members(loop))


def own_backward(loop):
    loop.model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()


def own_backward_before(loop):
    loop.optimizer.zero_grad()
    own_backward(loop)
    loop.backward(FIRST)


def own_backward_alone(loop):
    loop.optimizer.zero_grad()
    own_backward(loop)
    loop.step()


def set_by_name(loop):
    loop.model.lm_head.weight.grad = torch.zeros_like(loop.model.lm_head.weight)
    loop.step()


def norm_in_a_hook(loop):
    handle = loop.optimizer.register_step_post_hook(lambda *_: norm_of_slices(loop))
    try:
        loop.step()
    finally:
        handle.remove()


def norm_in_a_later_hook(loop):
    handle = loop.optimizer.register_step_pre_hook(lambda *_: norm_of_slices(loop))
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


def another_group(loop):
    loop.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    try:
        loop.step()
    finally:
        loop.optimizer.param_groups.pop()


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


def write_data_both_ways(loop):
    clamp_weights(loop)
    loop.model.lm_head.weight.data.mul_(0.5)
    try:
        loop.step()
    finally:
        loop.model.lm_head.weight.data.mul_(2.0)
        loop.session.evaluate(FIRST)


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
    (lambda loop: [parameter.ndim for parameter in members(loop)], "ndim of a slice"),
    (lambda loop: [parameter.grad.softmax(0) for parameter in members(loop)], "softmax of a slice"),
    (lambda loop: [torch.rand_like(parameter) for parameter in members(loop)], "rand_like of a slice"),
    (lambda loop: [torch.equal(parameter, parameter) for parameter in members(loop)], "equal of a slice"),
    (norm_of_slices, "norm of a slice"),
    (norm_in_a_hook, "norm of a slice"),
    (norm_in_a_later_hook, "norm of a slice"),
    (lambda loop: loop.optimizer.step(lambda: loop.backward(FIRST)), "expected no closure"),
    (lambda loop: [parameter.grad.data for parameter in members(loop)], "data of a slice"),
    (other_members, "other parameters in them"),
    (another_group, "other groups"),
    (freeze_a_slice, "a frozen parameter"),
    (other_data, r"lm_head.weight: expected its \.data in place"),
    (write_data_both_ways, "both at once"),
    (own_backward, "backward outside of the session"),
    (own_backward_before, "a gradient of .* from a plain backward"),
    (own_backward_alone, "a gradient of .* from a plain backward"),
    (set_by_name, "a gradient of .* set by hand"),
    (run_the_model_while_slices_are_newer, "changes to slices in optimizer.param_groups"),
    (write_both_ways, "both at once"),
]


@pytest.mark.parametrize("ranks", [more(1), 2])
def test_what_slices_cannot_have_is_refused_in_words(ranks, tmp_path):
    def work(_rank):
        loop = Planned(small_model(torch.bfloat16), {"shard": "zero1"})
        for refused, words in REFUSED:
            loop.backward(FIRST)
            with pytest.raises(LengthwiseError, match=words):
                refused(loop)
            loop.optimizer.zero_grad()
        with pytest.raises(LengthwiseError, match="both at once"):  # the last, which would be lost
            loop.session.close()

    in_ranks(work, ranks, tmp_path)


def other_rate(loop):
    loop.optimizer.param_groups[0]["lr"] = 0.5
    return loop.step


def other_limit(loop):
    return partial(loop.clip, 0.5)


def other_mode(loop):
    loop.model.eval()
    return partial(loop.backward, FIRST)


def other_normalizer(loop):
    return partial(loop.session.backward, FIRST, normalizer=7.0)


def other_loss(loop):
    return partial(loop.session.backward, FIRST, loss=lambda output, tokens: output.logits.square().sum())


def load_weights(loop):
    loop.model.load_state_dict(loop.model.state_dict())
    return loop.step


def scale_slices(loop):
    halve_gradients(loop)
    return partial(loop.backward, FIRST)


def clear_one(loop):
    loop.model.lm_head.weight.grad = None
    return loop.step


def own_gradient(loop):
    loop.model.lm_head.weight.grad = torch.zeros_like(loop.model.lm_head.weight)
    return loop.step


ALONE = [other_rate, other_limit, load_weights, scale_slices, clear_one, own_gradient]
ALONE += [other_mode, other_normalizer, other_loss]


def test_what_one_rank_does_alone_is_named_before_the_next_step(tmp_path):
    def work_of_others(loop, alone):
        again = dict.fromkeys((scale_slices, other_mode, other_normalizer, other_loss), partial(loop.backward, FIRST))
        return {other_limit: partial(loop.clip, 1.0), **again}.get(alone, loop.step)

    def message(alone, rank):
        loop = Planned(small_model(), {"shard": "zero1", "timeout_seconds": 20.0})
        with loop.session:
            loop.backward(FIRST)
            before = {name: each.detach().clone() for name, each in loop.model.named_parameters()}
            goes_on = alone(loop) if rank == 1 else work_of_others(loop, alone)
            with pytest.raises(LengthwiseError) as caught:
                goes_on()
            assert all(torch.equal(each, before[name]) for name, each in loop.model.named_parameters())
            return str(caught.value)

    first, second = in_ranks(lambda rank: [message(alone, rank) for alone in ALONE], 2, tmp_path)
    assert [each for each in first if "rank 1" not in each] == []
    assert [each for each in second if "rank 1" not in each and "lm_head.weight" not in each] == []


@pytest.mark.parametrize("layout", ["zero3", more("stages")])
def test_parameters_that_a_loop_kept_are_refused_where_the_model_has_others(layout, tmp_path):
    ranks, options = LAYOUTS[layout]

    def work(_rank):
        model = small_model()
        kept = list(model.parameters())
        loop = Planned(model, options)
        loop.backward(FIRST)
        with pytest.raises(LengthwiseError, match="gradient of a parameter"):
            torch.nn.utils.clip_grad_norm_(kept, 1.0)
        with pytest.raises(LengthwiseError, match="norm of a parameter"):
            [each.norm() for each in kept]
        loop.session.close()

    in_ranks(in_double(work), ranks, tmp_path)


def test_hooks_of_parameters_that_the_model_would_lose_are_refused(tmp_path):
    def work(_rank):
        model = small_model()
        model.lm_head.weight.register_hook(lambda gradient: gradient * 0.5)
        with pytest.raises(LengthwiseError, match=r"lm_head\.weight: expected no gradient hook"):
            Planned(model, {"shard": "zero3"})

    in_ranks(work, 2, tmp_path)


def test_weights_that_slices_have_when_a_session_closes_stay(tmp_path):
    def work(_rank):
        with (loop := Planned(small_model(), {"shard": "zero1"})).session:
            loop.backward(FIRST)
            loop.step()
            clamp_weights(loop)
        return max(each.detach().abs().max().item() for each in loop.model.parameters())

    assert max(in_ranks(work, 2, tmp_path)) <= 0.02


def test_slices_have_what_a_loop_wrote_by_name_once_the_session_has_run(tmp_path):
    def work(_rank):
        with (loop := Planned(small_model(), {"shard": "zero1"})).session, torch.no_grad():
            for each in loop.model.parameters():
                each.fill_(0.5)
            loop.evaluate(FIRST)
            unlike = [parameter != 0.5 for parameter in members(loop)]
        with torch._C.DisableTorchFunctionSubclass():
            return any(bool(each.any()) for each in unlike)

    assert in_ranks(work, 2, tmp_path) == [False, False]


def test_slices_take_what_a_loop_wrote_by_data_before_it_changes_them(tmp_path):
    def work(_rank):
        with (loop := Planned(small_model(), {"shard": "zero1"})).session, torch.no_grad():
            for each in loop.model.parameters():
                each.data.fill_(0.5)
            for each in members(loop):
                each.mul_(0.5)
            loop.evaluate(FIRST)
        return max(float((each.detach() - 0.25).abs().max()) for each in loop.model.parameters())

    assert in_ranks(work, 2, tmp_path) == [0.0, 0.0]


def test_both_copies_of_a_frozen_tied_weight_are_changed_by_either_name(tmp_path):
    def found(name):
        model = small_model(tie_word_embeddings=True)
        model.lm_head.weight.requires_grad_(False)
        plain = Plain(small_model(tie_word_embeddings=True))
        optimizer = ADAMW([each for each in model.parameters() if each.requires_grad])
        with torch.no_grad():
            plain.model.lm_head.weight.mul_(0.5)
        plain.evaluate(FIRST)
        with Session(model, optimizer, capacity_tokens=64, stages=2) as session:
            holder = model.model.embed_tokens if name == "embed_tokens" else model.lm_head
            with torch.no_grad():
                for each in holder.parameters():
                    each.mul_(0.5)
            return session.evaluate(FIRST).loss - plain.numbers[0]

    def work(_rank):
        return [found(name) for name in ("embed_tokens", "lm_head")]

    for differs in in_ranks(in_double(work), 2, tmp_path):
        assert differs == pytest.approx([0.0, 0.0], abs=1e-12)
