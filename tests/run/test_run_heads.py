"""`heads` of the run file: into the plans of a run, and out of no loss."""

import json

import pytest

from lengthwise.core.files import read_plan_text
from run.small_runs import call, losses, make_rows, train, write_run
from tiers import more

pytestmark = pytest.mark.usefixtures("checked_transfers")

LENGTHS = [30, 1, 12, 5, 61, 2, 9, 40]


def pieces_of(*paths):
    """List (ranks, heads) of the pieces of plan files."""
    plans = [json.loads(read_plan_text(path)) for path in paths]
    rows = [piece for plan in plans for m in plan["microbatches"] for piece in m.get("pieces", [m])]
    return [(len(row["ranks"]), row.get("heads", 1)) for row in rows]


def pieces_run(output):
    return pieces_of(*(output / "plans").iterdir())


@pytest.mark.parametrize("ranks", [more(4), 2])
def test_heads_are_in_the_plans_of_a_run_and_change_no_loss(tmp_path, ranks):
    found = {}
    for heads in ("off", 2):
        path = write_run(tmp_path / str(heads), make_rows(LENGTHS), heads=heads, capacity_tokens=64 // ranks)
        output = train(path, "--ranks", ranks)
        split = {(degree, each) for degree, each in pieces_run(output) if each > 1}
        rings = {degree for degree, _ in pieces_run(output)} - {1}
        asked = 1 if heads == "off" else heads
        assert split == {(degree, asked) for degree in rings if degree % asked == 0 and asked > 1}
        assert split or heads == "off" or heads > ranks
        found[heads] = losses(output)
    assert found[2] == pytest.approx(found["off"], rel=1e-12, abs=0)


@pytest.mark.exhaustive
def test_heads_auto_are_the_planners_and_change_no_loss(tmp_path):
    runs = [
        train(write_run(tmp_path / heads, make_rows(LENGTHS), heads=heads, capacity_tokens=16), "--ranks", 4)
        for heads in ("off", "auto")
    ]
    assert all(heads == 1 for _, heads in pieces_run(runs[0]))
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-12, abs=0)


def test_plan_of_a_run_file_has_its_heads(tmp_path):
    path, made = write_run(tmp_path, make_rows(LENGTHS), heads=2), tmp_path / "plan.json"
    for asked, heads in (((), {2}), (("--heads", "off"), {1})):
        assert call("plan", "--config", path, "--ranks", 2, "--out", made, *asked) == 0
        assert {each for degree, each in pieces_of(made) if degree == 2} == heads


def test_verify_says_which_splits_it_exercised(tmp_path, capsys):
    path, made = write_run(tmp_path, make_rows(LENGTHS), global_batch={"sequences": 8}), tmp_path / "plan.json"
    assert call("plan", "--config", path, "--ranks", 4, "--capacity", 16, "--heads", 2, "--out", made) == 0
    assert call("verify", path, "--ranks", 4, "--plan", made, "--set", "heads=off") == 0
    out = capsys.readouterr().out
    assert "heads split in groups of 2" in out
    assert "PASS" in out


def test_a_split_that_the_model_does_not_allow_is_refused_before_any_process_starts(tmp_path, capfd):
    path, made = write_run(tmp_path, make_rows(LENGTHS), global_batch={"sequences": 8}), tmp_path / "plan.json"
    assert call("plan", "--config", path, "--ranks", 3, "--capacity", 22, "--heads", "off", "--out", made) == 0
    plan = json.loads(made.read_text())
    ring = next(m for m in plan["microbatches"] if len(m.get("ranks", ())) == 3)
    ring["heads"], plan["requires"] = 3, ["heads"]
    made.write_text(json.dumps(plan))
    assert call("verify", path, "--ranks", 3, "--plan", made) == 2
    assert "a divisor of the model's 4 attention heads; got 3" in capfd.readouterr().err


@pytest.mark.parametrize("heads", [0, "on", 1.5, 3, 8])
def test_heads_of_another_kind_are_told(tmp_path, capfd, heads):
    assert call("train", write_run(tmp_path, make_rows(LENGTHS), heads=heads), "--ranks", 2) == 2
    said = capfd.readouterr().err
    assert "heads" in said
    assert ("a number that divides the model's 4 heads" in said) == (heads in (3, 8))


def test_heads_of_more_ranks_than_there_are_split_nothing_and_say_so(tmp_path, capfd):
    train(write_run(tmp_path, make_rows(LENGTHS), heads=4, steps=1), "--ranks", 2)
    assert "heads: 4 has no effect on 2 ranks" in capfd.readouterr().out
