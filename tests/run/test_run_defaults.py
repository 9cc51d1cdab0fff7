"""Defaults that depend on the model and the device, and what the header of a run says of them."""

import pytest
from testing.small import make_rows, write_model

from lengthwise.config import load_config
from lengthwise.run.checks import settle
from run.small_runs import call, write_run


def settled(folder, *, gpus=0, **keys):
    path = write_run(folder, make_rows([4]), precision=None, **keys)
    path.write_text(path.read_text().replace('"schedule": "constant", "warmup_steps": 0, "lr": 0.0003', ""))
    return settle(load_config(path), gpus=gpus)


def test_loaded_weights_are_fine_tuned_and_fresh_ones_trained(tmp_path):
    config, why = settled(tmp_path)
    assert (config.precision, config.optimizer.lr) == ("fp32", 2e-5)
    assert (config.optimizer.schedule, config.optimizer.warmup_steps) == ("cosine", 0.03)
    assert set(why) == {"precision", "lr", "schedule", "warmup_steps"}
    assert settled(tmp_path, gpus=1)[0].precision == "bf16"
    for keys in (
        {"model": "tiny"},
        {"weights": "fresh"},
        {"model": str(write_model(tmp_path / "bare", weights=False))},
    ):
        fresh, _ = settled(tmp_path, **keys)
        assert (fresh.optimizer.lr, fresh.optimizer.schedule, fresh.optimizer.warmup_steps) == (3e-4, "constant", 0)
    assert settle(config, gpus=1) == (config, {})


def test_adapters_begin_at_ten_times_the_rate_and_the_reason_says_so(tmp_path):
    config, why = settled(tmp_path, lora={"r": 2})
    assert (config.optimizer.lr, config.optimizer.schedule) == (2e-4, "cosine")
    assert set(map(why.get, ("lr", "schedule", "warmup_steps"))) == {"the default for LoRA"}, "said once"


@pytest.mark.parametrize(("given", "warmup"), [({"schedule": "constant"}, 0), ({"schedule": "linear"}, 0.03)])
def test_what_the_run_file_says_stays_and_constant_has_no_warm_up(tmp_path, given, warmup):
    path = write_run(tmp_path, make_rows([4]), precision=None)
    path.write_text(path.read_text().replace('"warmup_steps": 0, ', "").replace("constant", given["schedule"]))
    config, why = settle(load_config(path), gpus=1)
    assert (config.optimizer.schedule, config.optimizer.warmup_steps) == (given["schedule"], warmup)
    assert (config.optimizer.lr, "lr" in why) == (3e-4, False)


def test_the_header_says_what_was_chosen_and_the_run_writes_it_down(tmp_path, capsys):
    path = write_run(tmp_path, make_rows([4] * 4), precision=None, steps=2, capacity_tokens=64)
    path.write_text(path.read_text().replace('"schedule": "constant", "warmup_steps": 0, "lr": 0.0003', ""))
    assert call("train", path, "--ranks", 1) == 0
    assert "the default for loaded weights" in capsys.readouterr().out
    assert load_config(tmp_path / "out" / "config.yaml").optimizer.warmup_steps == 0.03
