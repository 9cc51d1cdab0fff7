"""`heads` and `recompute` of the run file: into the plans of a run."""

import json

import pytest
from testing.small import make_rows

from lengthwise.core.files import read_plan_text
from run.small_runs import call, train, write_run
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


@pytest.mark.parametrize(
    ("heads", "ranks", "kind"), [(2, 2, "layer"), more("off", 2, "none"), more(2, 4, "all_but_attention")]
)
def test_heads_and_recompute_are_in_every_plan_of_a_run(tmp_path, heads, kind, ranks):
    keys = {"heads": heads, "recompute": kind, "capacity_tokens": 64 // ranks}
    output = train(write_run(tmp_path, make_rows(LENGTHS), **keys), "--ranks", ranks)
    found = microbatches_of(*(output / "plans").iterdir())
    assert {made for made, _ in found} == {kind}
    assert {split for _, pieces in found for degree, split in pieces if degree % 2 == 0} == {1 if heads == "off" else 2}


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
