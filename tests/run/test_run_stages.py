"""`stages` of the run file: the numbers and the model of one rank, refusals, and a stage that dies."""

import shutil
from dataclasses import replace

import pytest
from testing import run_ranks, tiny_family_config
from testing.small import make_rows, write_model
from transformers import AutoModelForCausalLM

from lengthwise.comm import SoloTransport, World
from lengthwise.core.measurements import Term
from lengthwise.models import find_model
from lengthwise.profiler.rank_profiler import ProfileSettings, profile
from lengthwise.run.building import open_session
from lengthwise.run.launch import threads_of_each
from lengthwise.session import open as session_open
from run.small_runs import call, job_of, read_lines, write_run
from run.test_run_sharded import LENGTHS, largest_difference, outcome, trained, words
from tiers import more

KEYS = {"capacity_tokens": 96, "steps": 3, "global_batch": {"sequences": 6}, "device": "cpu"}


def run_file(folder, *, layers=3, tied=False, **keys):
    model = write_model(folder / "model", num_hidden_layers=layers, tie_word_embeddings=tied)
    return write_run(folder, make_rows(LENGTHS), model=model, **{**KEYS, **keys})


@pytest.mark.parametrize("precision", ["fp64", more("bf16")])
def test_verify_compares_stages_with_one_process(tmp_path, capsys, precision):
    """By the plan that `plan` writes."""
    path, plan = (
        run_file(tmp_path, tied=True, stages=2, precision=precision, capacity_tokens=48),
        tmp_path / "plan.json",
    )
    assert call("plan", "--config", path, "--out", plan, "--ranks", 5) == 2
    assert call("plan", "--config", path, "--out", plan, "--ranks", 4) == 0
    assert call("verify", path, "--ranks", 4, "--plan", plan) == 0
    said = words(capsys.readouterr().out)
    assert "stages: 2 with 2 ranks a stage, of layers 0 to 1 | 2" in said
    assert "exercised: rings of 2 ranks" in said
    assert said.endswith("PASS")


def test_layers_are_cut_by_the_rows_of_the_data(tmp_path, monkeypatch):
    job, seen, cut = job_of(run_file(tmp_path, stages=2), ranks=2), [], session_open.cut_stages
    monkeypatch.setattr(session_open, "cut_stages", lambda *given, **how: seen.append(given[3]) or cut(*given, **how))

    def work(transport):
        open_session(job, World(rank=transport.rank, world_size=2), transport, say=str)
        return sorted(seen[0])

    assert run_ranks(work, 2)[0] == sorted(LENGTHS)


def test_routers_are_counted_through_the_stages(tmp_path, request):
    config = tiny_family_config("qwen3_moe", {"vocab_size": 64, "output_router_logits": True})
    folder = tmp_path / "moe"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    path = write_run(tmp_path, make_rows(LENGTHS), model=folder, **KEYS)
    one, whole = trained(path, "one", ranks=1)
    request.getfixturevalue("checked_transfers")
    found, model = trained(path, "staged", "--set", "stages=2", ranks=4)
    assert found == pytest.approx(one, rel=1e-12)
    assert largest_difference(model, whole) < 1e-12
    balance = [
        [row["router_loss"] for row in read_lines(tmp_path / each / "metrics.jsonl")] for each in ("one", "staged")
    ]
    assert balance[1] == pytest.approx(balance[0], rel=1e-6)


@pytest.mark.parametrize(("ranks", "keys", "said"), [
    (3, {"stages": 2}, "ranks: expected a multiple of the 2 stages; got 3"),
    (8, {"stages": 4}, "stages: expected stages x virtual of at most the 3 layers; got 4 x 1"),
    (2, {"virtual": 2}, "virtual: 2 -> 1 beside `stages: 1`"),
    (
        4,
        {"stages": 2, "capacity_tokens": 16, "offload": {"store": "disk", "path": ".", "ratio": 1.0}},
        "got 90 tokens; 2 replicas of 24 each (given). Use capacity_tokens: 30 or auto",
    ),
])  # fmt: skip
def test_what_stages_do_not_run_is_refused_before_any_rank_starts(tmp_path, capsys, ranks, keys, said):
    path = run_file(tmp_path, **keys)
    assert call("train", path, "--ranks", ranks) != 0
    assert said in words(capsys.readouterr().err)


def test_adapters_in_stages_drop_in_a_recomputation_what_the_forward_dropped(tmp_path):
    """After each stage has measured what fits."""
    lora = {"r": 2, "lora_dropout": 0.2, "target_modules": ["q_proj", "down_proj"]}
    path = run_file(tmp_path, tied=True, lora=lora)
    how = ("--set", "stages=2", "capacity_tokens=auto")
    found, model = trained(path, "none", *how, "recompute=none", ranks=4)
    again, same = trained(path, "layer", *how, "recompute=layer", ranks=4)
    assert again == pytest.approx(found, rel=1e-12)
    assert largest_difference(model, same) < 1e-12


def write_measurements(folder, *, ranks, head_seconds):
    """Measure the model of a run, and let its head take so many seconds a token."""
    settings = ProfileSettings(seconds=0.3, longest_tokens=128, precision="fp64", clock="wall", hardware="cpu")
    found = profile(find_model(str(folder / "model")), World(rank=0, world_size=1), SoloTransport(), settings)
    assert {"embedding_seconds", "head_seconds"} <= set(found.fit.terms)
    terms = {**found.fit.terms, "head_seconds": Term(value=head_seconds, relative_error=None)}
    found = replace(
        found, fit=replace(found.fit, terms=terms), place=replace(found.place, threads=threads_of_each(ranks))
    )
    (folder / "measurements.json").write_text(found.to_json())


def test_layers_are_cut_by_what_was_measured_and_a_run_goes_on_at_another_cut(tmp_path, capfd):
    path = run_file(tmp_path, layers=4, tied=True, checkpoint={"every_steps": 2, "background": False})
    losses, whole = trained(path, "one", ranks=1)
    write_measurements(tmp_path, ranks=4, head_seconds=1.0)
    cut = ("--ranks", 4, "--set", "stages=2", "output=staged", f"measurements={tmp_path / 'measurements.json'}")
    assert call("train", path, *cut) == 0
    assert "of layers 0 to 2 | 3" in words(capfd.readouterr().out)
    shutil.rmtree(tmp_path / "staged/checkpoints/step-000003")
    assert call("train", path, *cut[:-1], "--resume") == 0
    assert "of layers 0 to 1 | 2 to 3" in words(capfd.readouterr().out)
    found, model = outcome(tmp_path / "staged")
    assert found == pytest.approx(losses, rel=1e-11)
    assert largest_difference(model, whole) < 1e-12
