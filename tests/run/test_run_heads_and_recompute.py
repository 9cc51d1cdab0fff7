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


@pytest.mark.parametrize("ranks", [2, more(4)])
def test_heads_and_recompute_are_in_every_plan_of_a_run_and_change_no_loss(tmp_path, ranks):
    def run(heads, kind):
        keys = {"heads": heads, "recompute": kind, "capacity_tokens": 64 // ranks}
        return train(write_run(tmp_path / f"{heads} {kind}", make_rows(LENGTHS), **keys), "--ranks", ranks)

    whole, found = run("off", "none"), []
    assert {heads for _, heads in pieces_of(whole)} == {1}
    for kind in RECOMPUTE_KINDS:
        split = run(2, kind)
        assert {made for made, _ in microbatches_of(*(split / "plans").iterdir())} == {kind}
        assert {heads for degree, heads in pieces_of(split) if degree % 2 == 0} == {2}
        found.append(losses(split))
    assert found[0] == found[1] == found[2] == pytest.approx(losses(whole), rel=1e-12, abs=0)


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
