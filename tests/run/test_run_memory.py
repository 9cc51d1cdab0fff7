"""What is said when memory runs out."""

import torch
from testing.small import make_rows

from lengthwise.engine import objective, parameters
from run.small_runs import call, write_run


def out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...\nmore")


def test_train_that_does_not_fit_says_so_in_one_line(tmp_path, monkeypatch, capfd):
    path = write_run(tmp_path, make_rows([30, 12]))
    with monkeypatch.context() as patch:
        patch.setattr(parameters, "Parameters", out_of_memory)
        assert call("train", path, "--ranks", 2) == 1
    err = capfd.readouterr().err
    assert "start: expected the model, its gradients and its optimizer to fit; got" in err
    monkeypatch.setattr(objective, "model_loss", out_of_memory)
    assert call("train", path, "--ranks", 2) == 1
    err = capfd.readouterr().err
    for said in ("error[memory]", "step 1, microbatch 1 of", "Tried to allocate 20.00 GiB", "capacity_"):
        assert said in err, said
    assert "Traceback" not in err
    assert not (tmp_path / "out/metrics.jsonl").exists()
