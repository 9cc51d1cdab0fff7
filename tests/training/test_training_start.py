"""A run's start: all that rank 0 alone reads is on every rank."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from support import tiny_family_config
from training.small_runs import losses, train, write_run


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
    for ranks in (1, 3):
        keys = {"precision": "fp64", "capacity_tokens": 70, "steps": 3, "global_batch": {"sequences": 6}}
        path = write_run(tmp_path / f"{ranks}", rows, model=tmp_path / "model", **keys)
        found.append(losses(train(path, "--ranks", ranks)))
    assert found[1] == pytest.approx(found[0], rel=1e-9)  # AdamW enlarges what rounding does
