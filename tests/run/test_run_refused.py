"""Settings that cannot be are refused by their keys, in one message, before the first step."""

import pytest
from testing.small import make_rows, write_model

from run.small_runs import call, write_run

DISK = {"store": "disk", "path": "/tmp"}
DECAY = {"schedule": "warmup_stable_decay", "warmup_steps": 3, "schedule_args": {"num_decay_steps": 5}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=3)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"save": {"best": "eval_loss"}}, "save: none -> `eval` beside it"),
        ({"heads": 3}, "a number that divides the model's 4 heads"),
        ({"attention": "cudnn"}, "attention: expected auto or reference on the CPU; got cudnn. Set attention: auto"),
        (
            {"fused_layers": "liger", "precision": "fp32"},
            "a model that Liger can run; got Liger's kernels are for GPUs.",
        ),
        ({"offload": {"store": "host"}}, "offload.store: expected disk on a machine without GPUs"),
        ({"offload": {"store": "disk"}}, "offload.path: none -> `path` beside `store: disk`"),
        ({"offload": {"path": "/tmp"}}, "offload.path: a path -> `path` only beside `store: disk`"),
        ({"offload": {**DISK, "path": "missing"}}, "nothing there -> an existing folder"),
        ({"offload": {**DISK, "path": "/proc"}}, "offload.path: expected a folder that can be written; got /proc"),
        ({"offload": {**DISK, "ratio": True}}, "offload.ratio"),
        ({"offload": DISK, "model": "tiny"}, "offload.ratio: expected a model of more than 2 layers"),
        ({"optimizer": DECAY}, "at most the run's 7 steps for warm-up and decay; got 3 and 5"),
        ({"optimizer": DECAY, "attention": "flash2"}, "attention: expected auto or reference on the CPU; got flash2"),
        ({"report_to": ["wandb", "mlflw"]}, "report_to.1: 'mlflw' (text) -> `mlflow`, of tensorboard, "),
        ({"report_to": ["wandb", "wandb"]}, "report_to: wandb, wandb -> each tracker once"),
        ({"report_to": 3}, "report_to: 3 (a whole number) -> a list"),
        ({"planner": "packed-dp", "capacity_tokens": 20}, "at most 20 tokens"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_is_refused_with_all_others_before_the_first_step(tmp_path, model, capfd, keys, said):
    keys = {"steps": 7, "device": "cpu", "recompute": "layer", **keys}
    path = write_run(tmp_path, make_rows([30, 5]), **{"model": str(model), **keys})
    assert call("train", path, "--ranks", 2) == 2
    err = " ".join(capfd.readouterr().err.split())
    assert said in err
    assert "Traceback" not in err
    assert err.count("error[") == 1 + ({"optimizer", "attention"} <= keys.keys()), "both in one message"
    assert not (tmp_path / "out").exists()
