"""`stages` of the run file: verify, and where the layers are cut."""

import shutil
from dataclasses import replace

import pytest
from testing.small import make_rows, write_model

from lengthwise.comm import SoloTransport, World
from lengthwise.core.measurements import Term
from lengthwise.models import find_model
from lengthwise.profiler.rank_profiler import ProfileSettings, profile
from lengthwise.run.launch import threads_of_each
from run.small_runs import call, write_run
from run.test_run_sharded import LENGTHS

KEYS = {"capacity_tokens": 96, "steps": 3, "global_batch": {"sequences": 6}, "device": "cpu"}


def words(said):
    return " ".join(said.split())


def run_file(folder, *, layers=3, tied=False, **keys):
    model = write_model(folder / "model", num_hidden_layers=layers, tie_word_embeddings=tied)
    return write_run(folder, make_rows(LENGTHS), model=model, **{**KEYS, **keys})


def test_verify_compares_stages_with_one_process(tmp_path, capsys):
    """By the plan that `plan` writes."""
    path, plan = run_file(tmp_path, tied=True, stages=2, capacity_tokens=48), tmp_path / "plan.json"
    assert call("plan", "--config", path, "--out", plan, "--ranks", 5) == 2
    assert call("plan", "--config", path, "--out", plan, "--ranks", 4) == 0
    assert call("verify", path, "--ranks", 4, "--plan", plan) == 0
    said = words(capsys.readouterr().out)
    assert "stages: 2 with 2 ranks a stage, of layers 0 to 1 | 2" in said
    assert "exercised: rings of 2 ranks" in said
    assert said.endswith("PASS")


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


@pytest.mark.exhaustive
def test_layers_are_cut_by_what_was_measured_and_a_run_goes_on_at_another_cut(tmp_path, capfd):
    path = run_file(tmp_path, layers=4, tied=True, checkpoint={"every_steps": 2, "background": False})
    write_measurements(tmp_path, ranks=4, head_seconds=1.0)
    cut = ("--ranks", 4, "--set", "stages=2", "output=staged", f"measurements={tmp_path / 'measurements.json'}")
    assert call("train", path, *cut) == 0
    assert "of layers 0 to 2 | 3" in words(capfd.readouterr().out)
    shutil.rmtree(tmp_path / "staged/checkpoints/step-000003")
    assert call("train", path, *cut[:-1], "--resume") == 0
    assert "of layers 0 to 1 | 2 to 3" in words(capfd.readouterr().out)
