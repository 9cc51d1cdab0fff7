"""`recompute` of the run file: into every plan, and out of no number."""

import json

import pytest

from lengthwise.core.files import read_plan_text
from lengthwise.core.plan import RECOMPUTE_KINDS
from run.small_runs import call, losses, make_rows, train, write_run
from tiers import more

LENGTHS = [30, 1, 12, 5, 61, 2, 9, 40]


def kinds_of(plan):
    return [microbatch.get("recompute", "none") for microbatch in plan["microbatches"]]


@pytest.mark.parametrize("heads", [more("off"), 2])
def test_recompute_is_in_every_plan_of_a_run_and_changes_no_loss(tmp_path, heads):
    found = {}
    for kind in RECOMPUTE_KINDS:
        output = train(write_run(tmp_path / kind, make_rows(LENGTHS), recompute=kind, heads=heads), "--ranks", 2)
        plans = [json.loads(read_plan_text(path)) for path in sorted((output / "plans").iterdir())]
        assert len(plans) == 3
        assert all(kinds_of(plan) == [kind] * len(plan["microbatches"]) for plan in plans)
        pieces = [piece for plan in plans for m in plan["microbatches"] for piece in m.get("pieces", [m])]
        assert any(len(piece["ranks"]) > 1 for piece in pieces)
        assert any("heads" in piece for piece in pieces) == (heads == 2)
        found[kind] = losses(output)
    assert found["layer"] == found["none"]
    assert found["all_but_attention"] == found["none"]


@pytest.mark.parametrize("kind", ["layer", more("all_but_attention")])
def test_recompute_holds_under_verify_and_is_planned(tmp_path, capsys, kind):
    path = write_run(tmp_path, make_rows(LENGTHS), recompute=kind, global_batch={"sequences": 8})
    assert call("verify", path, "--ranks", 2) == 0
    assert "PASS" in capsys.readouterr().out
    made = tmp_path / "plan.json"
    assert call("plan", "--config", path, "--ranks", 2, "--out", made) == 0
    assert set(kinds_of(json.loads(made.read_text()))) == {kind}


def test_recompute_of_an_unknown_kind_is_told_with_the_nearest(tmp_path, capfd):
    path = write_run(tmp_path, make_rows(LENGTHS), recompute="layers")
    assert call("train", path, "--ranks", 2) == 2
    error = capfd.readouterr().err
    assert "recompute" in error
    assert "Did you mean `layer`?" in error
