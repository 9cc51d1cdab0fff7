"""Settings and models that cannot be are refused by their keys, in one message, before the first step."""

import json
import sys

import pytest
from safetensors.torch import load_file, save_file
from testing.small import make_rows, write_model

from run.small_runs import told, write_run

DISK = {"store": "disk", "path": "/tmp"}
DECAY = {"schedule": "warmup_stable_decay", "warmup_steps": 3, "schedule_args": {"num_decay_steps": 5}}
FULL = {"stages": 2, "capacity_tokens": 16, "offload": {"store": "disk", "path": ".", "ratio": 1.0}}
# ranks, keys of a run of 7 steps and sequences of 90 and 5 tokens; what is said
REFUSED = [
    (1, {"save": {"best": "eval_loss"}}, "save: none -> `eval` beside it"),
    (2, {"heads": 3}, "a number that divides the model's 4 heads"),
    (1, {"offload": {"path": "/tmp"}}, "offload.path: a path -> `path` only beside `store: disk`"),
    (1, {"offload": {"store": "disk"}}, "offload.path: none -> `path` beside `store: disk`"),
    (1, {"offload": {"store": "host"}}, "offload.store: expected disk on a machine without GPUs"),
    (1, {"offload": {**DISK, "path": "/proc"}}, "offload.path: expected a folder that can be written; got /proc"),
    (1, {"offload": {**DISK, "ratio": True}}, "offload.ratio"),
    (2, {"offload": DISK, "model": "tiny"}, "offload.ratio: expected a model of more than 2 layers"),
    (1, {"optimizer": DECAY}, "at most the run's 7 steps for warm-up and decay; got 3 and 5"),
    (1, {"optimizer": DECAY, "attention": "flash2"}, "attention: expected auto or reference on the CPU; got flash2"),
    (2, {"fused_layers": "liger", "precision": "fp32"}, "got Liger's kernels are for GPUs."),
    (1, {"report_to": ["wandb", "mlflw"]}, "report_to.1: 'mlflw' (text) -> `mlflow`, of tensorboard, "),
    (2, {"planner": "packed-dp", "capacity_tokens": 20}, "at most 20 tokens"),
    (1, {"measurements": "nothing.json"}, "nothing there -> auto, off or an existing file"),
    (3, {"stages": 2, "capacity_tokens": 128}, "ranks: expected a multiple of the 2 stages; got 3"),
    (4, {"stages": 4}, "stages: expected stages x virtual of at most the 3 layers; got 4 x 1"),
    (1, {"virtual": 2}, "virtual: 2 -> 1 beside `stages: 1`"),
    (4, FULL, "got 90 tokens; 2 replicas of 24 each (given). Use capacity_tokens: 30 or auto"),
    (3, {"shard": "hybrid", "ranks_per_node": 2}, "ranks_per_node: expected a number that divides 3 ranks; got 2"),
    (1, {"quantization": "nf4", "precision": "fp32"}, "quantized weights do not train"),
    (1, {"lora": {"r": 0}}, "lora.r: 0 (a whole number) -> at least 1"),
    (1, {"lora": {"target_modules": ["q_pro"]}}, "Did you mean `q_proj`?"),
    (1, {"lora": {"modules_to_save": ["lm_head"]}}, "lora.modules_to_save"),
    (1, {"lora": {"bias": "all"}}, "lora.bias"),
    (1, {"lora": {"adapter": "/tmp", "r": 4}}, "lora.adapter: r -> no r or"),
    (1, {"lora": {"adapter": "."}}, "adapter_config.json"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=3)


@pytest.mark.parametrize(("ranks", "keys", "said"), REFUSED, ids=str)
def test_a_setting_that_cannot_be_is_refused_with_all_others_before_the_first_step(
    tmp_path, model, capfd, ranks, keys, said
):
    keys = {"steps": 7, "device": "cpu", "recompute": "layer", "capacity_tokens": 96, **keys}
    path = write_run(tmp_path, make_rows([90, 5]), **{"model": str(model), **keys})
    err = " ".join(told(capfd, "train", path, "--ranks", ranks, status=2).split())
    assert said in err
    assert err.count("error[") == 1 + ({"optimizer", "attention"} <= keys.keys()), "both in one message"
    assert not (tmp_path / "out").exists()


def test_lora_without_peft_is_one_line_that_says_what_to_install(tmp_path, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    err = told(capfd, "verify", write_run(tmp_path, make_rows([5]), lora={"r": 2}), "--ranks", 2, status=2)
    assert err.count("\n") == 1
    assert "pip install 'peft" in err


def lose_a_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors.popitem()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def enlarge(folder):
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "vocab_size": 2**40}))


@pytest.mark.parametrize(
    ("change", "keys", "said"),
    [(lose_a_tensor, {}, "1 missing"), (enlarge, {"weights": "fresh"}, "a model whose parameters fit into")],
    ids=["weights that are not whole", "more than the machine holds"],
)
def test_what_a_model_has_wrong_is_told_once_before_the_first_step(tmp_path, capfd, change, keys, said):
    change(write_model(tmp_path / "model"))
    err = told(capfd, "train", write_run(tmp_path, make_rows([9, 12]), **keys), "--ranks", 2, status=2)
    assert said in err
    assert err.startswith("error[config] model ")
    assert (err.count("\n"), "Traceback" in err) == (1, False)
