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


@pytest.mark.exhaustive
def test_a_real_run_is_measured():
    run = durability.measured(2, True, hidden=32, layers=1, steps=9)
    assert len(run.with_save) + len(run.without) == 5  # steps 5 to 9
    assert len(run.costs) == len(run.copies) == 2
    assert run.num_bytes > 100_000
