"""A short run of the random faults, and that one which does harm is told; what counts as a step with a save."""

import random

import pytest

import durability
import trials as random_faults


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    return random_faults.Trials(tmp_path_factory.mktemp("chaos"))


@pytest.fixture(scope="module")
def saved(trials):
    return dict(random_faults.saved_runs(trials))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(2))
def test_a_run_that_is_killed_goes_on_to_the_same_bits(trials, seed):
    assert random_faults.kill(trials, random.Random(seed)) in ("went on to the same bits", "killed too late")


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(3))
def test_damage_is_found_or_does_no_harm(trials, saved, seed):
    random_faults.corrupt(trials, random.Random(seed), saved)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(3))
def test_hostile_input_is_refused_in_words_or_trained(trials, seed):
    assert random_faults.hostile(trials, random.Random(seed)) in ("trained", "refused in words")


def _clock(*steps: tuple[int, float, bool]) -> list[dict[str, object]]:
    return [{"step": step, "end": end, "saves": saves} for step, end, saves in steps]


def test_a_step_has_a_save_where_one_began_before_it_or_was_under_way():
    every = durability.EVERY_STEPS
    clock = _clock((1, 1.0, False), (every, 10.0, True), (every + 1, 13.0, True), (every + 2, 15.0, False))
    clock += _clock((every + 3, 16.0, False), (2 * every, 17.0, True), (2 * every + 1, 19.0, False))
    run = durability.read_run(clock, [0.1, 0.2, 0.3], 12)
    assert run.with_save == [3.0, 2.0, 2.0]
    assert run.without == [1.0, 1.0]
    assert run.costs == [3.0, 1.0]  # steps of 3 s and 2 s in place of 1 s each; then one of 2 s
    assert run.copies == [0.1, 0.2]  # nothing trains beside the last save


@pytest.mark.exhaustive
def test_a_real_run_is_measured():
    run = durability.measured(2, True, hidden=32, layers=1, steps=9)
    assert len(run.with_save) + len(run.without) == 5  # steps 5 to 9
    assert len(run.costs) == len(run.copies) == 2
    assert run.num_bytes > 100_000
