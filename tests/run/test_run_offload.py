"""Offload as a user asks for it: the same bits, longer sequences, and what is wrong said before a run."""

import pytest
from testing.small import make_rows, write_model

from lengthwise.core.held import held_by_rank
from run.small_runs import call, losses, plans_of, read_lines, write_run

LENGTHS = [160, 90, 70, 45, 30, 20, 11, 7]
KEYS = {"steps": 3, "capacity_tokens": 60, "global_batch": {"sequences": 4}}


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model", num_hidden_layers=5)


def run(tmp_path, output, ranks, *, rows=None, **keys):
    (tmp_path / "scratch").mkdir(exist_ok=True)
    path = write_run(tmp_path, rows or make_rows(LENGTHS), output=output, **{**KEYS, **keys})
    assert call("train", path, "--ranks", ranks) == 0
    return tmp_path / output


@pytest.mark.exhaustive
def test_train_with_offload_gives_the_same_bits(tmp_path, model):
    plans, keys = [], {"recompute": "all_but_attention", "steps": 2}
    for ratio in ("off", 1.0):  # on ranks that hold so much that both plans are the same
        offload = {"ratio": ratio, "store": "disk", "path": str(tmp_path / "scratch")}
        output = run(tmp_path, f"ratio {ratio}", 2, capacity_tokens=400, offload=offload, planner="static", **keys)
        plans.append(plans_of(output))
    kept, away = (tmp_path / f"ratio {ratio}" for ratio in ("off", 1.0))
    for one, other in zip(*plans, strict=True):
        assert [each.pieces for each in one.microbatches] == [each.pieces for each in other.microbatches]
        assert {each.offload for each in other.microbatches} == {1.0}
    assert losses(kept) == losses(away)
    assert (kept / "model/model.safetensors").read_bytes() == (away / "model/model.safetensors").read_bytes()
    for row in read_lines(kept / "metrics.jsonl"):
        assert (row["offloaded_bytes"], row["offload_wait_seconds"]) == (0, 0)
    for row in read_lines(away / "metrics.jsonl"):
        assert row["offloaded_bytes"] > 0
        assert 0 < row["offload_wait_seconds"] < row["step_seconds"]
        assert row["exposed_ring_seconds"] == 0  # on ranks of this capacity there is no ring
        assert row["peak_memory_bytes"] > 10_000_000  # a process with torch
    assert list((tmp_path / "scratch").iterdir()) == []


def test_auto_offloads_what_does_not_fit_and_no_more(tmp_path, model, capsys):
    """160 tokens on 2 ranks of 60: with 3 of 5 layers elsewhere a rank holds 2.5 times as much."""
    path = write_run(tmp_path, make_rows(LENGTHS), **KEYS)
    assert call("train", path, "--ranks", 2) == 2
    assert "160 tokens" in capsys.readouterr().err
    offload = {"store": "disk", "path": str(tmp_path / "scratch")}
    output = run(tmp_path, "out", 2, offload=offload, precision="fp64")
    plans, rows = plans_of(output), read_lines(output / "metrics.jsonl")
    ratios = [each.offload for plan in plans for each in plan.microbatches]
    assert max(ratios) > 0
    for plan in plans:
        for each in plan.microbatches:
            held, rounding = held_by_rank(plan, each)
            needs = max(held[rank] - rounding[rank] for rank in held) > plan.capacity
            assert needs == (each.offload > 0)
    away = [row for row in rows if row["offloaded_bytes"]]
    assert away
    assert all(0 < row["offload_wait_seconds"] < row["step_seconds"] for row in away)
    assert list((tmp_path / "scratch").iterdir()) == []
