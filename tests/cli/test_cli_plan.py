"""`lengthwise plan`: on any machine, without torch, just what training would do; costs, modes, speeds, choices."""

import json
import os
import subprocess
import sys

import pytest
from testing.small import make_rows, write_model

from cli.calls import read_plan
from lengthwise.core.files import read_plan_text
from lengthwise.core.plan import Plan
from run.small_runs import call, told, train, write_run

WITHOUT = """
import sys

HIDDEN = {"torch", "transformers", "safetensors", "tokenizers"}

class Hiding:  # as on a machine where they are not installed
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, *more):
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, *more)

sys.meta_path[:] = map(Hiding, sys.meta_path)
from lengthwise.cli import main
main(sys.argv[1:])
"""


def plan_without_torch(*arguments):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT, "plan", *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_plan_of_a_run_file_is_the_plan_of_the_first_step_of_training(tmp_path):
    texts = [{"text": "x" * n} for n in (30, 1, 12, 5, 61, 2)]
    write_model(tmp_path / "model", vocab_size=256)
    path = write_run(tmp_path, texts, model=tmp_path / "model", tokenizer="bytes", global_batch={"sequences": 6})
    said = plan_without_torch("--config", path, "--ranks", 2, "--out", tmp_path / "plan.json")
    assert "6 sequences" in said
    made = read_plan(tmp_path / "plan.json")
    output = train(path, "--ranks", 2, "--set", "steps=1")
    run = Plan.from_json(read_plan_text(output / "plans/step-000001.json.gz"))
    assert (made.tokens, made.microbatches, made.capacity) == (run.tokens, run.microbatches, run.capacity)
    assert (made.ranks, made.layers) == (2, 2)


SHORT = [5, 70, 9]


@pytest.fixture
def planned(tmp_path, capsys):
    """Return what plans lengths with options of the command, and reads the plan back."""

    def plan(lengths, options):
        (tmp_path / "lengths.json").write_text(json.dumps(lengths))
        asked = ("plan", "--lengths", tmp_path / "lengths.json", "--out", tmp_path / "plan.json", *options.split())
        said = told(capsys, *asked)
        assert "(model, not measured)" in said
        assert "\x1b" not in said
        return read_plan(tmp_path / "plan.json")

    return plan


def test_plan_of_lengths_and_of_a_recipe(planned, tmp_path):
    listed = [20000, 512, 700, 60000, 900, 1]
    plan = planned(listed, "--ranks 8 --capacity 65536")
    assert (plan.ranks, plan.capacity, plan.layers, plan.tokens) == (8, 65536, 32, tuple(listed))
    written = set()
    for _ in range(2):
        plan = planned({"recipe": "byted", "tokens": 300_000, "seed": 1}, "--ranks 8 --capacity 65536")
        written.add((tmp_path / "plan.json").read_bytes())
    assert sum(plan.tokens) >= 150_000
    assert len(written) == 1


def test_plan_file_may_be_read_by_others(planned, tmp_path):
    """A plan is handed to a colleague or to another job: it has the mode that the umask gives, as any file."""
    (tmp_path / "plan.json").write_text("x" * 100_000)  # an older one, which is replaced whole
    before = os.umask(0o022)
    try:
        assert planned(SHORT, "--ranks 2 --capacity 64").tokens == (5, 70, 9)
    finally:
        os.umask(before)
    assert (tmp_path / "plan.json").stat().st_mode & 0o777 == 0o644


def test_plan_takes_a_models_folder_for_its_shape_and_makes_the_folders_of_its_output(tmp_path, lengths, capsys):
    """Names of files are printed as they are, though they look like markup."""
    write_model(tmp_path / "my-model", vocab_size=256)
    out = tmp_path / "deep/[bold]plan[/red] :smile:.json"
    rest = ("--lengths", lengths, "--ranks", 1, "--capacity", 128, "--out", out)
    assert call("plan", *rest, "--model-shape", tmp_path / "my-model") == 0
    said = capsys.readouterr().out.replace("\n", "")
    assert read_plan(out).layers == 2
    assert f"written to {out}" in said
    assert "3 sequences, 84 tokens, longest 70; 1 rank of 128 tokens" in said


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
        asked = ("plan", "--cost", cost, "--config", run, "--ranks", 2, "--out", out)
        assert "given/1 linear_seconds=1.0" in told(capsys, *asked)
        assert read_plan(out).layers == layers


def test_plan_of_a_run_file_takes_the_fastest_layout_that_fits(tmp_path, capsys):
    """What a step gathers and sums hides behind 16K tokens a rank, and not behind a few."""
    rest = ("--ranks", 8, "--model-shape", "qwen3-4b", "--hardware", "h100", "--out", tmp_path / "plan.json")
    for length, shard in ((1800, "zero3"), (18, "zero1")):
        rows = make_rows([length] * 72)
        run = write_run(
            tmp_path, rows, model="tiny", precision="auto", capacity_tokens=4096, global_batch={"sequences": 72}
        )
        assert f"shard {shard}: a step takes" in " ".join(told(capsys, "plan", "--config", run, *rest).split())
        assert ("waves" in read_plan(tmp_path / "plan.json").requires) == (shard == "zero3")


def test_plan_writes_waves_and_pipelines_and_reads_capacities_in_thousands(planned):
    waves = planned(SHORT, "--ranks 2 --capacity 1.5K --mode waves")
    assert (waves.schedule, waves.capacity) == ({"kind": "waves"}, 1536)
    stages = planned(SHORT, "--ranks 2 --capacity 1.5K --mode pipeline --stages 4 --virtual 2")
    assert stages.schedule == {"kind": "pipeline", "stages": 4, "virtual": 2}
    assert stages.requires == ("pipeline",)
    assert stages.notes["cost"] == "all-terms/1 llama-7b h100 pp4"


def test_plan_offloads_splits_heads_recomputes_and_knows_speeds_where_asked(planned):
    assert planned(SHORT, "--ranks 4 --capacity 64 --speeds 2x1.0,2x0.5").notes["speeds"] == [[2, 1.0], [2, 0.5]]
    long = planned([106496, 3000], "--ranks 9 --capacity 8192 --offload auto --heads auto")
    assert long.microbatches[0].offload > 0
    assert planned(SHORT, "--ranks 64 --recompute auto").capacity > 1000
    assert planned(SHORT, "--ranks 64 --recompute layer --capacity 64").microbatches[0].recompute == "layer"
