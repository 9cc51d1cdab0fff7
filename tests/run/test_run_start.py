"""A run's start: all that rank 0 alone reads is on every rank."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from testing import tiny_family_config
from testing.small import make_rows, write_model
from transformers import AutoModelForCausalLM

from run.small_runs import losses, told, train, write_run


def test_a_model_whose_buffers_are_weights_trains_alike_on_any_ranks(tmp_path):
    """DeepSeek's routers add a saved bias: with another one a rank would choose other experts, and say nothing."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(tiny_family_config("deepseek_v3"))
    biases = [each for name, each in model.named_buffers() if name.endswith("e_score_correction_bias")]
    for bias in biases:
        bias.copy_(torch.linspace(-2, 2, bias.numel()))
    assert biases
    model.save_pretrained(tmp_path / "model")
    lengths = (30, 12, 5, 61, 2, 9)
    rows = [{"input_ids": [(7 * place + length) % 48 for place in range(length)]} for length in lengths]
    found = []
    for ranks in (1, 2):
        keys = {"precision": "fp64", "capacity_tokens": 70, "steps": 2, "global_batch": {"sequences": 6}}
        path = write_run(tmp_path / f"{ranks}", rows, model=tmp_path / "model", **keys)
        found.append(losses(train(path, "--ranks", ranks)))
    assert found[1] == pytest.approx(found[0], rel=1e-9)  # AdamW enlarges what rounding does


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
