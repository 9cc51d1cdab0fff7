"""`lora` of the run file: verify, train and go on."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from testing.small import make_rows

from lengthwise.models import stored_model
from run.small_runs import call, losses, train, write_run
from tiers import more

pytest.importorskip("peft", minversion="0.21")

# peft itself asks transformers for a property that is going out of use.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

LENGTHS = [30, 1, 12, 5, 61, 2, 9, 40]
LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def run_file(folder, *, lora=LORA, **keys):
    return write_run(folder, make_rows(LENGTHS), lora=lora, **keys)


@pytest.mark.parametrize(("scale", "status"), [(1.0, 0), more(1.0001, 1)])
def test_lora_verifies_and_notices_adapters_that_are_scaled_otherwise(tmp_path, capsys, monkeypatch, scale, status):
    """Both sides are built from one config; here the planned one is scaled a little more, on all ranks alike."""
    build = stored_model.build_adapted

    def scaled(*arguments, **options):
        model = build(*arguments, **options)
        for module in model.modules():
            if hasattr(module, "scaling") and isinstance(module.scaling, dict):
                module.scaling["default"] *= scale
        return model

    monkeypatch.setattr(stored_model, "build_adapted", scaled)
    path = run_file(tmp_path, recompute="layer", global_batch={"sequences": 8})
    assert call("verify", path, "--ranks", 2) == status
    out = capsys.readouterr().out
    assert "gradients: 12 tensors" in out
    assert ("PASS" in out, "FAIL" in out) == (not status, bool(status))


def test_lora_goes_on_from_the_adapter_that_it_saved(tmp_path):
    first = train(run_file(tmp_path, capacity_tokens=64, steps=2))
    assert json.loads((first / "model/adapter_config.json").read_text())["inference_mode"]
    keys = {"steps": 1, "capacity_tokens": 64, "optimizer": {"lr": 0.0}, "output": "more"}
    train(run_file(tmp_path, lora={"adapter": "out/model"}, **keys))
    saved, more = (load_file(tmp_path / name / "model/adapter_model.safetensors") for name in ("out", "more"))
    assert more.keys() == saved.keys()
    assert all(torch.equal(more[name], each) for name, each in saved.items())
    assert losses(tmp_path / "more")[0] < losses(first)[0]
    assert call("train", tmp_path / "run.yaml", "--ranks", 2, "--overwrite", "--set", "output=out") == 2


@pytest.mark.exhaustive
def test_qlora_verifies_trains_and_resumes(tmp_path):
    """The ranks other than 0 get the quantized base from it."""
    pytest.importorskip("bitsandbytes")
    keys = {"quantization": "nf4", "precision": "fp32", "capacity_tokens": 48}
    assert call("verify", run_file(tmp_path, global_batch={"sequences": 8}, **keys), "--ranks", 2) == 0
    whole = run_file(tmp_path, **keys, steps=2, checkpoint={"every_steps": 1}, output="whole")
    assert call("train", whole, "--ranks", 2) == 0
    checkpoint = tmp_path / "whole/checkpoints/step-000001"
    base = sum(each.stat().st_size for each in (tmp_path / "model").glob("*.safetensors"))
    assert sum(each.stat().st_size for each in checkpoint.iterdir()) < base
    shutil.rmtree(tmp_path / "whole/checkpoints/step-000002")
    assert call("train", whole, "--ranks", 2, "--resume") == 0
