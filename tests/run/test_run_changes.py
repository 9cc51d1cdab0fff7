"""`--resume --accept-changes`: other settings than those of the checkpoint, each named; refused without it."""

import pytest
from testing.small import make_rows

import lengthwise
from lengthwise.core.errors import OutputError
from run.small_runs import assert_equal_runs, broken_off, losses, read_lines, told, whole, write_rows
from run.test_run_resume import LENGTHS, run_of

ACCEPTING = ("--resume", "--accept-changes")
CHANGES = ["optimizer.lr=0.01", "optimizer.schedule=linear", "steps=9"]


def test_each_change_is_named_and_the_rest_of_the_run_obeys(broken, capfd):
    said = " ".join(told(capfd, "train", broken, "--ranks", 2, *ACCEPTING, "--set", *CHANGES).split())
    for each in (
        "optimizer.lr: 0.0003 (a number) then, 0.01 (a number) now",
        "optimizer.schedule: 'constant' (text) then",
        "steps: 7 (a whole number) then, 9 (a whole number) now",
    ):
        assert f"changed since the checkpoint: {each}" in said
    lrs = [3e-4] * 4 + [0.01 * (10 - step) / 9 for step in range(5, 10)]
    assert [row["lr"] for row in read_lines(broken.parent / "out/metrics.jsonl")] == pytest.approx(lrs, rel=1e-12)
    lengthwise.train(broken, ranks=1, resume=True, overrides=CHANGES)  # which are now the run's own


def test_a_run_that_ended_can_be_made_longer_and_not_shorter(tmp_path):
    path = run_of(tmp_path)
    wanted = whole(path)
    lengthwise.train(path, overrides=["steps=5"])
    with pytest.raises(OutputError, match="one after 5"):
        lengthwise.train(path, resume=True, accept_changes=True, overrides=["steps=3"])
    assert lengthwise.train(path, resume=True, accept_changes=True).steps == 7
    assert_equal_runs(tmp_path / "out", wanted)


def test_other_data_are_accepted_and_named(broken, capfd):
    write_rows(broken.parent / "train.jsonl", make_rows(LENGTHS, seed=5))
    said = " ".join(told(capfd, "train", broken, "--ranks", 2, *ACCEPTING).split())
    assert "changed since the checkpoint: the tokens of the data" in said
    assert len(losses(broken.parent / "out")) == 7


@pytest.mark.parametrize(("before", "change", "words"), [
    ({"optimizer": {"name": "sgd"}}, "optimizer.momentum=0.5", "states of sgd (none)"),
    ({"lora": {"r": 2}}, "seed=5", "expected seed 0, which may have drawn the frozen weights; got 5"),
])  # fmt: skip
def test_what_the_checkpoint_has_no_state_for_is_refused_all_the_same(tmp_path, capfd, before, change, words):
    path = run_of(tmp_path, **before)
    broken_off(path, 1, after=3)
    assert words in " ".join(told(capfd, "train", path, *ACCEPTING, "--set", change, status=2).split())
