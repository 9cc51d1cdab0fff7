"""What `benchmarks/end_to_end.py` decides before and after it trains: ways and their options, rates, ratios."""

import pytest

from end_to_end import ratios, refuse_unequal, waiting_share
from rivals import PACKED, TimedStep


def step(way: str, repeat: int, seconds: float, loss: float = 1.0, batch: int = 0) -> TimedStep:
    values = {"way": way, "repeat": repeat, "batch": batch, "seconds": seconds, "loss": loss}
    return TimedStep(work_seconds=seconds / 2, waited=(1.0, 0.0), **values)


def test_ratios_are_of_all_batches_of_a_repeat_and_leave_out_the_first_round() -> None:
    steps = [step("lengthwise", 0, 9.0), step(PACKED, 0, 1.0)]
    for repeat, slow in ((1, 3.0), (2, 2.0), (3, 2.5)):
        steps += [step("lengthwise", repeat, 1.0, batch=0), step("lengthwise", repeat, 1.0, batch=1)]
        steps += [step(PACKED, repeat, slow, batch=0), step(PACKED, repeat, 1.0, batch=1)]
    found = ratios(steps, lambda each: each.seconds)[PACKED]
    assert (found.least, found.median, found.most) == (1.5, 1.75, 2.0)
    assert ratios(steps, lambda each: each.seconds)["lengthwise"].median == 1.0
    assert waiting_share(steps, PACKED) == pytest.approx(6 / (2 * (3 + 2 + 2.5 + 3)))


def test_unequal_losses_end_the_benchmark() -> None:
    same = [step("lengthwise", 1, 1.0, loss=2.0), step(PACKED, 1, 1.0, loss=2.000001)]
    refuse_unequal(same)
    with pytest.raises(SystemExit, match="same losses"):
        refuse_unequal([*same, step("static", 1, 1.0, loss=2.0001)])
