"""The largest microbatch before the first step, and what is said when memory runs out: now, not hours in."""

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
from lengthwise.run import memory_check
from lengthwise.run.building import open_session
from lengthwise.run.checks import prepare_job
from lengthwise.run.memory_check import check_memory, largest_pack
from run.small_runs import VOCAB, call, losses, make_rows, train, write_run
from tiers import more

WORLD = World(rank=0, world_size=1)


def job_of(folder, lengths, **keys):
    path = write_run(folder, make_rows(lengths), **keys)
    config = build_config(json.loads(path.read_text()), folder=folder)
    return prepare_job(config, ranks=2, timeout_seconds=10)


@pytest.mark.parametrize(
    ("lengths", "keys", "expected"),
    [
        ([30, 12, 5, 60], {"global_batch": {"sequences": 4}, "capacity_tokens": 50}, (50,)),
        ([30, 12, 5, 60], {"global_batch": {"sequences": 4}, "capacity_tokens": 1000}, (60, 47)),
        ([3, 3, 2], {"global_batch": {"tokens": 8}, "capacity_tokens": 1000}, (3, 3, 2)),
        ([3, 3, 20], {"global_batch": {"tokens": 8}, "capacity_tokens": 1000}, (20,)),
        ([7, 7, 7], {"global_batch": {"tokens": 21}, "capacity_tokens": 21}, (7, 7, 7)),
    ],
)
def test_largest_pack_is_the_capacity_or_the_largest_batch(tmp_path, lengths, keys, expected):
    pack = largest_pack(job_of(tmp_path, lengths, **keys))
    assert pack == expected
    assert sum(pack) <= keys["capacity_tokens"]


@pytest.mark.parametrize("precision", [more("fp64"), more("fp32"), "bf16"])
def test_memory_check_leaves_no_gradient_and_no_other_parameter(tmp_path, precision):
    job = job_of(tmp_path, [30, 12], precision=precision)
    session = open_session(job, WORLD, SoloTransport(), say=str)
    flat = session.optimizer.parameters
    before = flat.values.clone()
    flat.grads.fill_(7)  # whatever was there
    said = check_memory(session.engine, job)
    assert said == "memory check: the largest microbatch, 32 tokens, ran"
    assert torch.equal(flat.values, before)
    assert not flat.grads.any()


def test_memory_check_runs_the_most_sequences_too(tmp_path, monkeypatch):
    """Kernels for packs need memory for every sequence, however short."""
    job, seen = job_of(tmp_path, [20, 3, 4, 2, 5, 1], capacity_tokens=12), []

    def watched(plan, batch, context):
        done = work.run_part(plan, batch, context)
        seen.append((plan.tokens, any(p.grad.any() for p in context.model.parameters())))
        return done

    monkeypatch.setattr(memory_check, "run_part", watched)
    session = open_session(job, WORLD, SoloTransport(), say=str)
    said = check_memory(session.engine, job)
    assert seen == [((12,), True), ((1, 2, 3, 4), True)], "forward and backward"
    assert said == "memory check: the largest microbatch, 12 tokens, ran, so did one of 4 sequences"


@pytest.mark.parametrize("ranks", [more(1), 2])
def test_memory_check_changes_nothing_of_the_training(tmp_path, ranks, capfd):
    rows = make_rows([30, 12, 5, 60])
    found = []
    for name, keys in (("with", {"memory_check": True}), ("default", {})):
        output = train(write_run(tmp_path / name, rows, capacity_tokens=60, **keys), "--ranks", ranks)
        found.append((losses(output), (output / "model/model.safetensors").read_bytes()))
        assert ("memory check: the largest microbatch, 60 tokens" in capfd.readouterr().out) == (name == "with")
    assert found[0] == found[1], "on CPU it is off unless asked for"


def out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...\nmore")


@pytest.mark.parametrize("ranks", [1, 2])
def test_train_that_does_not_fit_says_so_before_the_first_step(tmp_path, monkeypatch, capfd, ranks):
    path = write_run(tmp_path, make_rows([30, 12]), memory_check=True)
    with monkeypatch.context() as patch:
        patch.setattr(parameters, "Parameters", out_of_memory)
        assert call("train", path, "--ranks", ranks) == 1
    err = capfd.readouterr().err
    assert "start: expected the model, its gradients and its optimizer to fit; got" in err
    monkeypatch.setattr(objective, "model_loss", out_of_memory)
    assert call("train", path, "--ranks", ranks) == 1
    err = capfd.readouterr().err
    assert "error[memory] rank 0, memory check before the first step" in err or ranks > 1
    for said in ("memory check", "microbatches of up to 32 tokens to fit", "Tried to allocate 20.00 GiB", "capacity_"):
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
