"""`heads` and `recompute` of the run file: into the plans of a run."""

import pytest
from testing.small import make_rows

from lengthwise.core.files import read_plan_text
from lengthwise.core.plan import Plan
from run.small_runs import train, write_run
from tiers import more

pytestmark = pytest.mark.usefixtures("checked_transfers")

LENGTHS = [30, 1, 12, 5, 61, 2, 9, 40]


@pytest.mark.parametrize(
    ("heads", "ranks", "kind"), [(2, 2, "layer"), more("off", 2, "none"), more(2, 4, "all_but_attention")]
)
def test_heads_and_recompute_are_in_every_plan_of_a_run(tmp_path, heads, kind, ranks):
    keys = {"heads": heads, "recompute": kind, "capacity_tokens": 64 // ranks}
    output = train(write_run(tmp_path, make_rows(LENGTHS), **keys), "--ranks", ranks)
    found = [
        each for path in (output / "plans").iterdir() for each in Plan.from_json(read_plan_text(path)).microbatches
    ]
    assert {each.recompute for each in found} == {kind}
    pieces = [piece for each in found for piece in each.pieces if piece.degree % 2 == 0]
    assert {each.heads for each in pieces} == {1 if heads == "off" else 2}


def test_heads_of_more_ranks_than_there_are_split_nothing_and_say_so(tmp_path, capfd):
    train(write_run(tmp_path, make_rows(LENGTHS), heads=4, steps=1), "--ranks", 2)
    assert "heads: 4 has no effect on 2 ranks" in capfd.readouterr().out
