"""Runs of models with dropout: they draw by the plan, the same in a recomputation and when they are gone on with."""

import pytest
import torch
from testing import tiny_family_config
from testing.small import make_rows
from transformers import GPT2LMHeadModel

import lengthwise
from run.small_runs import assert_equal_runs, broken_off, call, losses, told, whole, write_run
from run.test_run_resume import LENGTHS, run_of

pytestmark = pytest.mark.usefixtures("checked_transfers")


KEYS = {"optimizer": {"lr": 1e-2, "eps": 1e-3}, "global_batch": {"sequences": 4}, "steps": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder, dropout = tmp_path_factory.mktemp("gpt2"), {"resid_pdrop": 0.2, "embd_pdrop": 0.1}
    config = tiny_family_config("gpt2", {"vocab_size": 64, "n_positions": 256, **dropout})
    with torch.random.fork_rng():
        torch.manual_seed(3)
        GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.mark.exhaustive
def test_rings_and_recomputed_layers_draw_the_same(tmp_path, model):
    found = []
    for kind in ("none", "all_but_attention"):
        path = write_run(tmp_path, make_rows(LENGTHS), model=model, recompute=kind, capacity_tokens=40, **KEYS)
        assert call("train", path, "--ranks", 3, "--overwrite") == 0
        found.append(losses(tmp_path / "out"))
    assert found[1] == pytest.approx(found[0], rel=1e-12)


def test_a_run_that_goes_on_draws_as_if_nothing_had_been(tmp_path, model):
    keys = {"steps": 4, "model": model, "recompute": "all_but_attention", "optimizer": KEYS["optimizer"]}
    path = run_of(tmp_path, **keys)
    wanted = whole(path)
    broken_off(path, 1, after=3)
    lengthwise.train(path, resume=True)
    assert_equal_runs(tmp_path / "out", wanted)


@pytest.mark.exhaustive
def test_a_model_with_dropout_verifies_without_it(tmp_path, capsys, model):
    keys = {"global_batch": {"sequences": 7}, "capacity_tokens": 30, "seed": 3}
    path = write_run(tmp_path, make_rows(LENGTHS), model=model, **keys)
    out = told(capsys, "verify", path, "--ranks", 3)
    assert "PASS" in out
    assert "dropout is off in this comparison" in out
