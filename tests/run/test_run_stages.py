"""`stages` of the run file."""

from testing.small import make_rows, write_model

from run.small_runs import call, write_run
from run.test_run_sharded import LENGTHS


def test_verify_compares_stages_with_one_process(tmp_path, capsys):
    """By the plan that `plan` writes."""
    keys = {"stages": 2, "capacity_tokens": 48, "global_batch": {"sequences": 6}, "device": "cpu"}
    model = write_model(tmp_path / "model", num_hidden_layers=3, tie_word_embeddings=True)
    path, plan = write_run(tmp_path, make_rows(LENGTHS), model=model, **keys), tmp_path / "plan.json"
    assert call("plan", "--config", path, "--out", plan, "--ranks", 5) == 2
    assert call("plan", "--config", path, "--out", plan, "--ranks", 4) == 0
    assert call("verify", path, "--ranks", 4, "--plan", plan) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "stages: 2 with 2 ranks a stage, of layers 0 to 1 | 2" in said
    assert "exercised: rings of 2 ranks" in said
    assert said.endswith("PASS")
