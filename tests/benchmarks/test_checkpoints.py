"""What the checkpoint benchmark counts as a step with a save, and what a small real run of it finds."""

import pytest

import checkpoints


def _clock(*steps: tuple[int, float, bool]) -> list[dict[str, object]]:
    return [{"step": step, "end": end, "saves": saves} for step, end, saves in steps]


def _saves(*seconds: float) -> list[dict[str, object]]:
    return [{"what": what, "seconds": each, "cpu": each / 2} for each in seconds for what in ("copy", "write")]


def test_a_step_has_a_save_where_one_began_before_it_or_was_under_way():
    every = checkpoints.EVERY_STEPS
    clock = _clock((1, 1.0, False), (every, 10.0, True), (every + 1, 13.0, True), (every + 2, 15.0, False))
    clock += _clock((every + 3, 16.0, False), (2 * every, 17.0, True), (2 * every + 1, 19.0, False))
    run = checkpoints.read_run(clock, _saves(0.1, 0.2, 0.3), 12)
    assert run.with_save == [3.0, 2.0, 2.0]
    assert run.without == [1.0, 1.0]
    assert run.costs == [3.0, 1.0]  # steps of 3 s and 2 s in place of 1 s each; then one of 2 s
    assert run.copies == [0.1, 0.2]  # nothing trains beside the last save
    assert run.cpu == [0.05, 0.1]


def test_steps_that_all_have_a_save_are_refused():
    with pytest.raises(SystemExit, match="always under way"):
        checkpoints.read_run(_clock((4, 1.0, True), (5, 2.0, True)), [], 1)


def test_the_aim_is_judged_by_what_saves_cost():
    def of(cost):
        lists = {"with_save": [1.0], "copies": [0.01], "writes": [0.5], "cpu": [0.2], "costs": [cost]}
        return checkpoints.Run(without=[1.0], num_bytes=100_000_000, **lists)

    assert "4.0% of a step (aim below 5%: met), 1.0% while it is copied" in checkpoints.verdict(2, [of(0.04)])
    assert "digests 100 MB/s" in checkpoints.verdict(2, [of(0.04)])
    assert "(aim below 5%: **missed**)" in checkpoints.verdict(1, [of(0.06)])
    rows = list(checkpoints.restarts({"it": [(1.0, 4.0), (2.0, 21.0)]}))
    assert rows[-1] == "| it | 2 | 1.5 | 12.5 | 21.0 | 20 s: **missed** |"


@pytest.mark.exhaustive
def test_a_real_run_is_measured():
    run = checkpoints.measured(2, True, hidden=32, layers=1, steps=9)
    assert len(run.with_save) + len(run.without) == 5  # steps 5 to 9
    assert len(run.costs) == len(run.copies) == len(run.writes) == 2
    assert run.num_bytes > 100_000


@pytest.mark.exhaustive
def test_a_real_kill_is_measured():
    new, first = checkpoints.seconds_after_kill((), hidden=32, layers=1)
    assert 0 < new < first < checkpoints.LONGEST_SECONDS
