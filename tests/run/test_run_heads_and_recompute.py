"""`heads` and `recompute` of the run file: into the plans of a run, and out of no loss."""

import json

import pytest

from lengthwise.core.files import read_plan_text
from lengthwise.core.plan import RECOMPUTE_KINDS
from run.small_runs import call, losses, make_rows, train, write_run
from tiers import more

pytestmark = pytest.mark.usefixtures("checked_transfers")

LENGTHS = [30, 1, 12, 5, 61, 2, 9, 40]


def microbatches_of(*paths):
    """List (recomputation, [(ranks, heads) of each piece]) of all microbatches of plan files."""
    rows = [row for path in paths for row in json.loads(read_plan_text(path))["microbatches"]]
    return [
        (
            row.get("recompute", "none"),
            [(len(each["ranks"]), each.get("heads", 1)) for each in row.get("pieces", [row])],
        )
        for row in rows
    ]


def pieces_of(output):
    return [piece for _, pieces in microbatches_of(*(output / "plans").iterdir()) for piece in pieces]


@pytest.mark.parametrize("ranks", [more(4), 2])
def test_heads_are_in_the_plans_of_a_run_and_change_no_loss(tmp_path, ranks):
    whole, split = (
        train(
            write_run(tmp_path / str(heads), make_rows(LENGTHS), heads=heads, capacity_tokens=64 // ranks),
            "--ranks",
            ranks,
        )
        for heads in ("off", 2)
    )
    assert {heads for _, heads in pieces_of(whole)} == {1}
    assert {(degree, heads) for degree, heads in pieces_of(split) if degree % 2 == 0} == {
        (degree, 2) for degree, _ in pieces_of(split) if degree % 2 == 0
    }
    assert any(heads == 2 for _, heads in pieces_of(split))
    assert losses(split) == pytest.approx(losses(whole), rel=1e-12, abs=0)


def test_recompute_is_in_every_plan_of_a_run_and_changes_no_loss(tmp_path):
    found = []
    for kind in RECOMPUTE_KINDS:
        output = train(write_run(tmp_path / kind, make_rows(LENGTHS), recompute=kind, heads=2), "--ranks", 2)
        assert {made for made, _ in microbatches_of(*(output / "plans").iterdir())} == {kind}
        assert any(degree == heads == 2 for degree, heads in pieces_of(output))
        found.append(losses(output))
    assert found[0] == found[1] == found[2]


def test_plan_of_a_run_file_has_its_heads_and_recomputation(tmp_path):
    path = write_run(tmp_path, make_rows(LENGTHS), heads=2, recompute="layer")
    for asked, wanted in (((), 2), (("--heads", "off"), 1)):
        assert call("plan", "--config", path, "--ranks", 2, "--out", tmp_path / "plan.json", *asked) == 0
        found = microbatches_of(tmp_path / "plan.json")
        assert {kind for kind, _ in found} == {"layer"}
        assert {heads for _, pieces in found for degree, heads in pieces if degree == 2} == {wanted}


def test_heads_of_more_ranks_than_there_are_split_nothing_and_say_so(tmp_path, capfd):
    train(write_run(tmp_path, make_rows(LENGTHS), heads=4, steps=1), "--ranks", 2)
    assert "heads: 4 has no effect on 2 ranks" in capfd.readouterr().out
