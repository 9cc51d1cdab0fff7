"""Offload as a user asks for it: where a sequence does not fit, and no more; its bits are in tests/engine."""

from testing.small import make_rows, write_model

from lengthwise.core.held import held_by_rank
from run.small_runs import plans_of, read_lines, told, train, write_run

LENGTHS = [160, 90, 70, 45, 30, 20, 11, 7]
KEYS = {"steps": 2, "capacity_tokens": 60, "global_batch": {"sequences": 4}}


def test_auto_offloads_what_does_not_fit_and_no_more(tmp_path, capsys):
    """160 tokens on 2 ranks of 60: with 3 of 5 layers elsewhere a rank holds 2.5 times as much."""
    write_model(tmp_path / "model", num_hidden_layers=5)
    path = write_run(tmp_path, make_rows(LENGTHS), **KEYS)
    assert "160 tokens" in told(capsys, "train", path, "--ranks", 2, status=2)
    offload = {"store": "disk", "path": str(tmp_path / "scratch")}
    (tmp_path / "scratch").mkdir()
    output = train(write_run(tmp_path, offload=offload, **KEYS), "--ranks", 2)
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
    assert all(row["offload_wait_seconds"] == 0 for row in rows if not row["offloaded_bytes"])
    assert list((tmp_path / "scratch").iterdir()) == []
