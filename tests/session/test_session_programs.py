"""Random programs of a loop's operations give what the plain loop gives or are refused in words."""

import pytest
from testing.loop_programs.judge import verdicts
from testing.loop_programs.program import ALONE, Operation, Program, draw_program

from tiers import more

PROGRAMS = [draw_program(seed) for seed in range(20)]


def op(name, /, **arguments):
    return Operation(name, arguments)


def rows(*lengths, seed=0):
    return {"lengths": list(lengths), "seed": seed}


def backward(*lengths, seed=0):
    return op("backward", **rows(*lengths, seed=seed), loss="next token", normalizer=None)


BACKWARD, FIRST, SECOND = backward(3), backward(20, 30, 9, seed=1), backward(7, 41, 2, seed=2)
SCALE, STEP, CLIP = op("scale_groups", group=None, factor=0.5, how="in place"), op("step"), op("clip", limit=0.05)
ZERO, CLAMP = op("zero_grad", to_none=True), op("write_groups", group=None, how="clamp")
HOOKS = [op("hook", when=when, what="weights") for when in ("post", "pre")]


def gradients(group, value):
    return op("set_gradients_of_groups", group=group, value=value)


def cleared(name):
    return op("set_gradients_named", name=name, value=None)


WRITTEN = {
    "steps twice": [FIRST, STEP, STEP, SECOND],
    "clips between backwards": [FIRST, CLIP, SECOND],
    "clips what it scaled": [FIRST, SCALE, CLIP, SECOND],
    "clamps gradients": [FIRST, op("clip_values_of_groups", group=None, limit=1e-3), CLIP],
    "clears to zero": [FIRST, STEP, gradients(0, None), op("zero_grad", to_none=False), STEP],
    "sets gradients before backwards": [gradients(0, 0.01), gradients(1, 0.03), FIRST, CLIP, STEP, ZERO, SECOND],
    "clears some": [FIRST, gradients(0, None), gradients(1, 0.0), CLIP, STEP, SECOND],
    "clears some by name": [FIRST, cleared("layers.1"), STEP, SECOND],
    "clears all by name": [STEP, FIRST, cleared(""), STEP, SECOND, ZERO, STEP],
    "clears a second name": [FIRST, cleared("lm_head"), CLIP],
    "clamps weights between steps": [FIRST, STEP, ZERO, CLAMP, SECOND, STEP, ZERO, CLAMP, FIRST],
    "clamps weights in hooks": [*HOOKS, FIRST, STEP, ZERO, CLAMP, SECOND],
    "evaluates between": [FIRST, op("evaluate", **rows(7, 41)), CLIP],
    "forgets states": [FIRST, STEP, op("forget_states"), ZERO, SECOND],
    "fails and goes on": [FIRST, op("fail"), STEP, SECOND, CLIP],
    "goes on from its state": [FIRST, STEP, op("reload"), SECOND],
}
LAYOUTS = {"zero1 on the host": 2, "zero3": 2, "hybrid of 2": 4, "stages": 2, "stages of 2 replicas": 4}


def program(operations, ranks=2, layout="zero1", model="tied", optimizer="adamw"):
    return Program(ranks=ranks, layout=layout, model=model, optimizer=optimizer, operations=tuple(operations))


BY_DEFAULT = "clips what it scaled", "clears some", "clamps weights between steps"


@pytest.mark.parametrize(
    ("layout", "ranks", "names"),
    [("zero1", 2, BY_DEFAULT), *(more(*each, tuple(WRITTEN)) for each in (("zero1", 2), *LAYOUTS.items()))],
)
def test_what_a_loop_does_beside_backward_is_as_in_the_plain_loop(layout, ranks, names):
    found = verdicts([program([*WRITTEN[each], STEP], ranks, layout) for each in names])
    assert {name: each for name, each in zip(names, found, strict=True) if each.kind != "same"} == {}


@pytest.mark.parametrize("kinds", [("lr",), more((*ALONE, "mode", "normalizer", "loss", "own gradient"))])
def test_what_one_rank_does_alone_is_named_before_the_next_step(kinds):
    after = [FIRST, CLIP, STEP, FIRST, STEP]
    found = verdicts([program([FIRST, op("alone", rank=1, what=what), *after]) for what in kinds])
    assert {what: each for what, each in zip(kinds, found, strict=True) if each.kind != "refused"} == {}


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_random_programs_are_the_plain_loop_or_refused(ranks):
    programs = [each for each in PROGRAMS if each.ranks == ranks]
    found = verdicts(programs)
    for program, verdict in zip(programs, found, strict=True):
        assert verdict.kind != "failed", f"{verdict.why}\n{program}\n{program.to_json()}"
    assert sum(each.kind == "same" for each in found) > len(found) / 2, "few refusals, or programs show nothing"
