"""What `lengthwise plan` is told of costs, modes, speeds and choices, and what it refuses together."""

import pytest
from testing.small import make_rows

from cli.plan_calls import read_plan, refused
from run.small_runs import call, write_run


def test_plan_with_given_costs_needs_no_model_and_is_scored_by_their_formula(tmp_path, lengths):
    """Seventy tokens over two ranks of 40: (q s^2 + l s) / 2, what transfers cost beyond attention, and the launch."""
    cost, out = tmp_path / "cost.json", tmp_path / "plan.json"
    cost.write_text('{"quadratic_seconds": 1, "linear_seconds": 10, "fixed_seconds": 5, "ring_seconds": 100}')
    assert call("plan", "--cost", cost, "--lengths", lengths, "--ranks", 2, "--capacity", 40, "--out", out) == 0
    plan = read_plan(out)
    assert plan.layers == 1
    ring = (70**2 + 10 * 70) / 2 + (100 * 70 - 70**2) / 2 + 5
    assert plan.notes["predicted_seconds"] == pytest.approx(ring + 9**2 + 10 * 9 + 5)


def test_plan_of_a_run_file_with_given_costs(tmp_path, capsys):
    cost, out = tmp_path / "cost.json", tmp_path / "plan.json"
    cost.write_text('{"linear_seconds": 1}')
    for number, (model, layers) in enumerate((("tiny", 2), ("somebody/a-model", 1))):
        run = write_run(tmp_path / str(number), make_rows([30, 12]), model=model)
        assert call("plan", "--cost", cost, "--config", run, "--ranks", 2, "--out", out) == 0
        assert "given/1 linear_seconds=1.0" in capsys.readouterr().out
        assert read_plan(out).layers == layers


def test_plan_of_a_run_file_takes_the_fastest_layout_that_fits(tmp_path, capsys):
    """What a step gathers and sums hides behind 16K tokens a rank, and not behind a few."""
    rest = ("--ranks", 8, "--model-shape", "qwen3-4b", "--hardware", "h100", "--out", tmp_path / "plan.json")
    for length, shard in ((1800, "zero3"), (18, "zero1")):
        rows = make_rows([length] * 72)
        run = write_run(
            tmp_path, rows, model="tiny", precision="auto", capacity_tokens=4096, global_batch={"sequences": 72}
        )
        assert call("plan", "--config", run, *rest) == 0
        assert f"shard {shard}: a step takes" in " ".join(capsys.readouterr().out.split())
        assert ("waves" in read_plan(tmp_path / "plan.json").requires) == (shard == "zero3")


def test_plan_writes_waves_and_pipelines_and_reads_capacities_in_thousands(tmp_path, lengths):
    out = tmp_path / "plan.json"
    rest = ("--lengths", lengths, "--ranks", 2, "--capacity", "1.5K", "--out", out)
    assert call("plan", *rest, "--mode", "waves") == 0
    assert (read_plan(out).schedule, read_plan(out).capacity) == ({"kind": "waves"}, 1536)
    assert call("plan", *rest, "--mode", "pipeline", "--stages", 4, "--virtual", 2) == 0
    plan = read_plan(out)
    assert plan.schedule == {"kind": "pipeline", "stages": 4, "virtual": 2}
    assert plan.requires == ("pipeline",)
    assert plan.notes["cost"] == "all-terms/1 llama-7b h100 pp4"


def test_plan_on_ranks_of_unequal_speed(tmp_path, capfd):
    (tmp_path / "lengths.json").write_text("[60000, 9000, 700, 5000, 12000, 800, 400, 9000]")
    rest = ("--lengths", tmp_path / "lengths.json", "--capacity", 65536, "--out", tmp_path / "plan.json")
    assert call("plan", *rest, "--ranks", 4, "--speeds", "2x1.0,2x0.5") == 0
    plan = read_plan(tmp_path / "plan.json")
    assert plan.notes["speeds"] == [[2, 1.0], [2, 0.5]]
    assert "step time" in capfd.readouterr().out
    unequal = plan.notes["predicted_seconds"]
    assert call("plan", *rest, "--ranks", 4) == 0
    assert read_plan(tmp_path / "plan.json").notes["predicted_seconds"] < unequal


def test_plan_offloads_and_splits_heads_where_asked(tmp_path, capfd):
    lengths, out = tmp_path / "lengths.json", tmp_path / "plan.json"
    lengths.write_text("[106496, 3000]")
    rest = ("--lengths", lengths, "--ranks", 9, "--capacity", 8192, "--out", out)
    assert "needs 13 ranks" in refused(capfd, *rest)
    assert call("plan", *rest, "--offload", "auto", "--heads", "auto") == 0
    assert read_plan(out).microbatches[0].offload > 0


def test_plan_chooses_recomputation_by_what_memory_leaves(tmp_path, lengths):
    out = tmp_path / "plan.json"
    rest = ("--lengths", lengths, "--ranks", 64, "--out", out)
    assert call("plan", *rest, "--recompute", "auto") == 0
    assert read_plan(out).capacity > 1000
    assert call("plan", *rest, "--recompute", "layer", "--capacity", 64) == 0
    assert read_plan(out).microbatches[0].recompute == "layer"
