"""What is said when memory runs out."""

import json

import pytest
import torch
from testing import make_batch, make_plan

from lengthwise.attention import FlashCpuKernel
from lengthwise.comm import Mesh, SoloTransport, World
from lengthwise.config import build_config
from lengthwise.core.errors import MemoryShortage
from lengthwise.core.plan import Piece
from lengthwise.engine import objective, parameters
from lengthwise.engine import step as work
from lengthwise.models import build_model
from lengthwise.run.checks import prepare_job
from run.small_runs import VOCAB, call, make_rows, write_run

WORLD = World(rank=0, world_size=1)


def job_of(folder, lengths, **keys):
    path = write_run(folder, make_rows(lengths), **keys)
    config = build_config(json.loads(path.read_text()), folder=folder)
    return prepare_job(config, ranks=2, timeout_seconds=10)


def out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...\nmore")


@pytest.mark.parametrize("ranks", [1, 2])
def test_train_that_does_not_fit_says_so_in_one_line(tmp_path, monkeypatch, capfd, ranks):
    path = write_run(tmp_path, make_rows([30, 12]))
    with monkeypatch.context() as patch:
        patch.setattr(parameters, "Parameters", out_of_memory)
        assert call("train", path, "--ranks", ranks) == 1
    err = capfd.readouterr().err
    assert "start: expected the model, its gradients and its optimizer to fit; got" in err
    monkeypatch.setattr(objective, "model_loss", out_of_memory)
    assert call("train", path, "--ranks", ranks) == 1
    err = capfd.readouterr().err
    for said in ("error[memory]", "step 1, microbatch 1 of", "Tried to allocate 20.00 GiB", "capacity_"):
        assert said in err, said
    assert "Traceback" not in err
    assert not (tmp_path / "out/metrics.jsonl").exists()


def test_a_microbatch_that_does_not_fit_is_named_with_step_and_tokens(monkeypatch, tmp_path):
    job = job_of(tmp_path, [30, 12])
    monkeypatch.setattr(objective, "model_loss", out_of_memory)
    plan = make_plan(1, [30, 12, 5], [Piece(ranks=(0,), sequences=(0,)), Piece(ranks=(0,), sequences=(1, 2))])
    context = work.StepContext(
        build_model(job.model, seed=0), Mesh(SoloTransport(), 1), FlashCpuKernel(), name="step 7"
    )
    with pytest.raises(MemoryShortage) as raised:
        work.run_part(plan, make_batch([30, 12, 5], vocab=VOCAB), context)
    assert raised.value.where == "rank 0, step 7, microbatch 1 of 2 forward"
    assert "up to 30 tokens" in raised.value.expected
