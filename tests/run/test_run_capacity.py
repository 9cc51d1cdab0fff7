"""`capacity_tokens: auto` and offload: what a microbatch needs is predicted; what cannot fit goes or is refused."""

import re

import pytest
import torch
from testing import LiveBytes, make_batch, run_ranks
from testing.peaks import kept_bytes
from testing.small import VOCAB, make_rows, write_model

from lengthwise.comm import World
from lengthwise.core import host_memory
from lengthwise.core.held import held_by_rank
from lengthwise.engine import objective, parameters, shortage
from lengthwise.engine.measuring import SmallPasses
from lengthwise.engine.norm import clip_factor
from lengthwise.run.building import open_session
from lengthwise.run.verify_batch import held_before_measuring
from lengthwise.session import capacity as room
from lengthwise.session.source import PlannedStep
from run.small_runs import call, job_of, plans_of, read_lines, told, train, write_run
from tiers import more

CPU = torch.device("cpu")


def run(tmp_path, *, ranks=2, rows=None, status=0, **keys):
    path = write_run(tmp_path, rows or make_rows([90, 60, 30, 12]), capacity_tokens="auto", **keys)
    assert call("train", path, "--ranks", ranks, "--overwrite") == status
    return tmp_path / "out"


def test_auto_trains_and_says_what_it_found(tmp_path, capfd):
    output = run(tmp_path, recompute="auto", precision="fp64", steps=1)
    said = capfd.readouterr().out
    assert "microbatches as large as memory holds" in said
    assert re.search(r"capacity of a rank: \d+ tokens, all of a global batch; at most \S+B of \S+B that are free", said)
    assert all(row["peak_memory_bytes"] > 0 for row in read_lines(output / "metrics.jsonl"))


@pytest.mark.exhaustive
def test_what_cannot_fit_is_told_what_would_save_it_and_that_does(tmp_path, monkeypatch, capsys):
    """With room for 128 to 300 tokens without recomputation, 700 need more ranks than there are; no pass runs twice."""
    run_pass, done = SmallPasses._run, set()

    def run_once(self, rows, **options):
        key = (self.recompute, self.layout, rows, *options.items())
        assert key not in done, "the rank ends by this, and not with status 2"
        done.add(key)
        return run_pass(self, rows, **options)

    write_model(tmp_path / "model", num_hidden_layers=8)
    rows = make_rows([700, 60, 30, 12])
    monkeypatch.setattr(room, "free_bytes", lambda *_: 12_000_000.0)
    with monkeypatch.context() as patch:
        patch.setattr(SmallPasses, "_run", run_once)
        run(tmp_path, rows=rows, status=2, recompute="none")
    refused = capsys.readouterr().err
    assert "error[data] data: expected sequences that all ranks together hold; got 700 tokens; 2 ranks of" in refused
    assert re.search(r"Use recompute: auto \(a rank holds \d+ tokens with \w+\)", refused)
    assert re.search(r"or \d+ ranks with as much memory each, on further machines", refused)
    plans = plans_of(run(tmp_path, rows=rows, recompute="auto"))
    assert {each.recompute for plan in plans for each in plan.microbatches} != {"none"}


def held_in_a_step(job, lengths):
    """Return (bytes that the fuller of two ranks held in a step, bytes that it keeps, its planning, its plan)."""

    def work(transport):
        with LiveBytes() as live:
            session = open_session(job, World(rank=transport.rank, world_size=2), transport, say=str)
            optimizer, planning = session.optimizer, session.planning.ahead
            for each in ((9,) * len(lengths), lengths):
                plan, live.peak_bytes = planning.plan(each), live.now_bytes
                step = PlannedStep(batch=make_batch(each, vocab=VOCAB), plan=plan, plan_seconds=0.0)
                optimizer.scale_gradients(clip_factor(1.0, session.backward(step).grad_norm))
                optimizer.step(1e-3)
        kept = kept_bytes(session.engine.model, optimizer.parameters, job.config.optimizer)
        return live.peak_bytes, kept, planning, plan

    return max(run_ranks(work, 2), key=lambda each: each[:2])


@pytest.mark.parametrize("virtual", [1, more(2)])
def test_a_step_in_stages_holds_what_the_start_said(tmp_path, monkeypatch, virtual):
    """All tensors of both ranks are counted, of which the first keeps two microbatches. One stage: tests/engine."""
    write_model(tmp_path / "model", num_hidden_layers=4)
    lengths = (700,) * 4
    keys = {"capacity_tokens": "auto", "global_batch": {"sequences": 4}, "precision": "fp32", "recompute": "none"}
    job = job_of(write_run(tmp_path, make_rows(lengths), stages=2, virtual=virtual, **keys), ranks=2)
    monkeypatch.setattr(room, "free_bytes", lambda *_: 11e6)
    measured, kept, planning, plan = held_in_a_step(job, lengths)
    found = planning.measured.memory
    mine = [(each, held_by_rank(plan, each)[0][0]) for each in plan.microbatches]
    said = max(found.peak_bytes(each.recompute, held, each.offload) for each, held in mine)
    assert measured <= kept + found.budget_bytes
    assert 0.95 <= (kept + said) / measured <= 1.05


@pytest.mark.exhaustive
@pytest.mark.parametrize("shard", ["zero1", "zero3"])
def test_a_mix_of_kinds_holds_the_longest_sequence_on_fewer_ranks(tmp_path, monkeypatch, shard):
    """One rank that recomputes nothing holds less than half of it, and all layers need no recomputation for that."""
    write_model(tmp_path / "model", num_hidden_layers=8)
    keys = {"capacity_tokens": "auto", "global_batch": {"sequences": 1}, "precision": "fp32", "shard": shard}
    job = job_of(write_run(tmp_path, make_rows([6500]), **keys), ranks=2)
    monkeypatch.setattr(room, "free_bytes", lambda *_: 55e6)
    measured, kept, planning, plan = held_in_a_step(job, (6500,))
    assert planning.capacities["none"] < 3250
    assert [each.recompute for each in plan.microbatches] == ["none+4/8"]
    assert 0.8 < measured / (kept + planning.measured.memory.budget_bytes) <= 1


def test_no_memory_is_said_with_the_bytes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(room, "free_bytes", lambda *_: 10_000.0)
    run(tmp_path, ranks=1, status=1)
    assert "error[memory] rank 0, start: expected room for 128 tokens" in capsys.readouterr().err


def test_free_memory_is_that_of_the_container_and_shared_by_its_ranks(tmp_path, monkeypatch):
    alone, shared = shortage.free_bytes(CPU, 1), shortage.free_bytes(CPU, 4)
    assert alone > 4 * shared * 0.8 > 0
    monkeypatch.setattr(host_memory, "_cgroup_bytes", lambda: 1000.0)
    assert shortage.free_bytes(CPU, 2) == 500.0
    monkeypatch.setattr(host_memory, "_cgroup_bytes", lambda: None)
    monkeypatch.setattr(host_memory, "_available_bytes", lambda: None)
    assert shortage.free_bytes(CPU, 1) == 0.0


def test_a_batch_of_one_sequence_fits_whatever_its_length(tmp_path):
    """The capacity is a whole global batch at most, in steps of 128 tokens: rounded up."""
    keys = {"capacity_tokens": "auto", "global_batch": {"sequences": 1}, "steps": 1, "loss": "whole"}
    train(write_run(tmp_path, make_rows([130]), **keys))


@pytest.mark.parametrize(("planner", "held"), [("lengthwise", 4096), ("packed-dp", 5000)])
def test_verify_holds_the_longest_sequence_before_anything_is_measured(tmp_path, planner, held):
    path = write_run(tmp_path, make_rows([5000, 12]), planner=planner, capacity_tokens="auto")
    assert held_before_measuring(job_of(path, ranks=2)) == held


def out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...\nmore")


def test_train_that_does_not_fit_says_so_in_one_line(tmp_path, monkeypatch, capfd):
    path = write_run(tmp_path, make_rows([30, 12]))
    in_step = ("step 1, microbatch 1 of", "Tried to allocate 20.00 GiB", "capacity_")
    for place, name, words in (
        (parameters, "Parameters", ("start: expected the model",)),
        (objective, "model_loss", in_step),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, out_of_memory)
            err = told(capfd, "train", path, "--ranks", 2, status=1)
        assert [each for each in ("error[memory]", *words) if each not in err] == []
    assert not (tmp_path / "out/metrics.jsonl").exists()


LONG = [160, 90, 70, 45, 30, 20, 11, 7]
OFFLOADED = {"steps": 2, "capacity_tokens": 60, "global_batch": {"sequences": 4}}


def test_auto_offloads_what_does_not_fit_and_no_more(tmp_path, capsys):
    """160 tokens on 2 ranks of 60: with 3 of 5 layers elsewhere a rank holds 2.5 times as much."""
    write_model(tmp_path / "model", num_hidden_layers=5)
    path = write_run(tmp_path, make_rows(LONG), **OFFLOADED)
    assert "160 tokens" in told(capsys, "train", path, "--ranks", 2, status=2)
    offload = {"store": "disk", "path": str(tmp_path / "scratch")}
    (tmp_path / "scratch").mkdir()
    output = train(write_run(tmp_path, offload=offload, **OFFLOADED), "--ranks", 2)
    plans, rows = plans_of(output), read_lines(output / "metrics.jsonl")
    ratios = [each.offload for plan in plans for each in plan.microbatches]
    assert max(ratios) > 0
    for plan in plans:
        for each in plan.microbatches:
            held, rounding = held_by_rank(plan, each)
            needs = max(held[rank] - rounding[rank] for rank in held) > plan.capacity
            assert needs == (each.offload > 0)
    away = [row for row in rows if row["offloaded_bytes"]]
    assert away
    assert all(0 < row["offload_wait_seconds"] < row["step_seconds"] for row in away)
    assert all(row["offload_wait_seconds"] == 0 for row in rows if not row["offloaded_bytes"])
    assert list((tmp_path / "scratch").iterdir()) == []
