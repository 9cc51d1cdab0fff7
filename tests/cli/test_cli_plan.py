"""`lengthwise plan`: on any machine, without torch, and just what training would do."""

import json
import os

from testing.small import write_model

from cli.plan_calls import plan_without_torch, read_plan
from lengthwise.core.files import read_plan_text
from lengthwise.core.plan import Plan
from run.small_runs import call, train, write_run


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


def test_plan_of_lengths_and_of_a_recipe(tmp_path, capsys):
    (tmp_path / "list.json").write_text("[20000, 512, 700, 60000, 900, 1]")
    (tmp_path / "recipe.json").write_text(json.dumps({"recipe": "byted", "tokens": 300_000, "seed": 1}))
    for name in ("list", "recipe"):
        out = tmp_path / f"{name}-plan.json"
        lengths = tmp_path / f"{name}.json"
        assert call("plan", "--lengths", lengths, "--ranks", 8, "--capacity", "65536", "--out", out) == 0
        said = capsys.readouterr().out
        assert "(model, not measured)" in said
        assert "\x1b" not in said
        plan = read_plan(out)
        assert (plan.ranks, plan.capacity, plan.layers) == (8, 65536, 32)
        if name == "list":
            assert plan.tokens == (20000, 512, 700, 60000, 900, 1)
        else:
            assert sum(plan.tokens) >= 150_000
    first = (tmp_path / "recipe-plan.json").read_bytes()
    assert call("plan", "--lengths", lengths, "--ranks", 8, "--capacity", "65536", "--out", out) == 0
    assert out.read_bytes() == first


def test_plan_file_may_be_read_by_others(tmp_path, lengths):
    """A plan is handed to a colleague or to another job: it has the mode that the umask gives, as any file."""
    out = tmp_path / "plan.json"
    out.write_text("x" * 100_000)  # an older one, which is replaced whole
    before = os.umask(0o022)
    try:
        assert call("plan", "--lengths", lengths, "--ranks", 2, "--capacity", 64, "--out", out) == 0
    finally:
        os.umask(before)
    assert out.stat().st_mode & 0o777 == 0o644
    assert read_plan(out).tokens == (5, 70, 9)


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
