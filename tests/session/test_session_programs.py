"""Random programs of a loop's operations give what the plain loop gives or are refused in words."""

from dataclasses import replace

import pytest
import torch
from testing.loop_programs.judge import Ran, judge, verdicts
from testing.loop_programs.program import Operation, Program, draw_program, is_sound

from tiers import more

PROGRAMS = [draw_program(seed) for seed in range(20)]
BACKWARD = Operation("backward", {"lengths": [3], "seed": 0, "loss": "next token", "normalizer": None})
SCALE = Operation("scale_groups", {"group": None, "factor": 0.5, "how": "in place"})
STEP = Operation("step", {})


WHOLE = slice(None)


@pytest.mark.parametrize(("ranks", "taken"), [(3, slice(1, 4)), *(more(ranks, WHOLE) for ranks in (1, 2, 3))])
def test_random_programs_are_the_plain_loop_or_refused(ranks, taken):
    programs = [each for each in PROGRAMS if each.ranks == ranks][taken]
    found = verdicts(programs)
    for program, verdict in zip(programs, found, strict=True):
        assert verdict.kind != "failed", f"{verdict.why}\n{program}\n{program.to_json()}"
    assert sum(each.kind == "same" for each in found) > len(found) / 2, "few refusals, or programs show nothing"


def judged(operations, *ranks, layout="zero1", plain=()):
    program = Program(ranks=len(ranks), layout=layout, model="tied", optimizer="sgd", operations=tuple(operations))
    weights = {"a": torch.ones(2, dtype=torch.float64)}
    expected = Ran(numbers=[list(each) for each in plain], weights=weights)
    return judge(program, expected, [replace(each, weights=each.weights or weights) for each in ranks])


def test_a_judge_fails_what_differs_and_refusals_of_what_is_promised():
    refused, went_on = Ran(refused="rank 1 has another lr"), Ran(numbers=[[]])
    alone = Operation("alone", {"rank": 1, "what": "lr"})
    write = Operation("write_groups", {"group": None, "how": "clamp"})
    assert judged([BACKWARD], Ran(numbers=[[1.0, 2.0]]), plain=[(1.0, 2.0)]).kind == "same"
    assert judged([BACKWARD], Ran(numbers=[[1.0, 2.1]]), plain=[(1.0, 2.0)]).harm == "numbers"
    assert (
        judged(
            [STEP], Ran(numbers=[[]], weights={"a": torch.full((2,), 1 + 1e-8, dtype=torch.float64)}), plain=[()]
        ).harm
        == "weights"
    )
    assert judged([STEP], refused, refused).harm == "refused"
    assert judged([write, STEP], *[replace(refused, numbers=[[]])] * 2, plain=[(), ()]).kind == "refused"
    assert judged([write, STEP, SCALE], *[replace(refused, numbers=[[], []])] * 2, plain=[(), ()]).harm == "refused"
    assert judged([write], refused, went_on).harm == "ranks differ"
    assert judged([write], Ran(other="ValueError"), refused).harm == "another error"
    assert judged([alone], went_on, went_on).harm == "not refused"
    assert judged([alone], refused, refused).kind == "refused"
    assert judged([alone], *[Ran(refused="ranks differ")] * 2).harm == "refused"


def test_programs_are_sound_and_come_back_from_json():
    drawn = [draw_program(seed, most_ranks=4) for seed in range(300)]
    assert all(is_sound(each) and Program.from_json(each.to_json()) == each for each in drawn)
    assert {each.name for program in drawn for each in program.operations} >= {"alone", "freeze", "reload", "hook"}
