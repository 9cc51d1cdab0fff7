"""A short run of the random faults, and that one which does harm is told."""

import json
import os
import random

import pytest

import chaos
from lengthwise.training import checkpoints
from tiers import some


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    return chaos.Trials(tmp_path_factory.mktemp("chaos"))


@pytest.fixture(scope="module")
def saved(trials):
    return dict(chaos.saved_runs(trials))


@pytest.mark.parametrize("seed", some(range(2)))
def test_a_run_that_is_killed_goes_on_to_the_same_bits(trials, seed):
    assert chaos.kill(trials, random.Random(seed)) in ("went on to the same bits", "killed too late")


@pytest.mark.exhaustive
def test_a_rank_that_is_stopped_is_named(trials):
    assert chaos.stop(trials, random.Random(0)) in ("named in time, went on to the same bits", "stopped too late")


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(6))
def test_damage_is_found_or_does_no_harm(trials, saved, seed):
    chaos.corrupt(trials, random.Random(seed), saved)


@pytest.mark.parametrize("seed", some(range(6)))
def test_hostile_input_is_refused_in_words_or_trained(trials, seed):
    assert chaos.hostile(trials, random.Random(seed)) in ("trained", "refused in words")


@pytest.mark.exhaustive
def test_damage_that_nobody_looks_for_is_told(trials, saved, monkeypatch):
    """A flipped bit of a moment, where digests are not checked: the run ends with other bits."""

    def flip_a_moment(path, _draw):
        path = next(iter(sorted(path.parent.glob("rank-*"))))
        content = bytearray(path.read_bytes())
        content[len(content) // 2 + 6] ^= 1 << 4
        path.write_bytes(content)

    monkeypatch.setattr(chaos, "DAMAGES", (flip_a_moment,))
    assert chaos.corrupt(trials, random.Random(0), saved) == "refused by name, nothing trained"
    monkeypatch.setattr(checkpoints, "broken", lambda *_, **__: None)
    with pytest.raises(chaos.Failure, match="other bits"):
        chaos.corrupt(trials, random.Random(0), saved)


def test_bits_that_differ_are_told(trials):
    trials.clear()
    trials.must_end(1)
    ledger = trials.output / "ledger.jsonl"
    rows = [json.loads(line) for line in ledger.read_text().splitlines()]
    rows[3]["sequences"].reverse()
    ledger.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(chaos.Failure, match="other bits"):
        trials.check_end(1)


@pytest.mark.exhaustive
def test_a_traceback_and_a_process_that_is_left_are_told(tmp_path, monkeypatch):
    def prints(_arguments):
        raise RuntimeError("not told in words")

    def leaves(_arguments):
        if not os.fork():
            os.closerange(0, 3)
            chaos.time.sleep(30)

    for main, told in ((prints, "traceback"), (leaves, "processes were left")):
        monkeypatch.setattr(chaos, "lengthwise", main)
        with pytest.raises(chaos.Failure, match=told):
            chaos.Started(tmp_path).end()
