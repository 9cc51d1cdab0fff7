"""`capacity_tokens: auto`: what a microbatch needs is predicted, and what cannot fit is refused."""

import copy
import re
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, MixtralConfig

from lengthwise.attention import choose_kernel
from lengthwise.comm import SoloTransport
from lengthwise.core.plan import RECOMPUTE_KINDS, Piece, Plan
from lengthwise.cost import loss_bytes, shape_from_config
from lengthwise.engine import memory
from lengthwise.engine.activations import Offloading, measure_microbatch
from lengthwise.engine.step import run_plan
from lengthwise.offload import DiskStore
from lengthwise.training import capacity
from support import LiveBytes, build_pair, make_batch, make_plan
from training.small_runs import call, losses, make_rows, read_lines, write_model, write_run

CPU = torch.device("cpu")
LAYERS, LOGITS_AT_ONCE = 5, 1 << 16
SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
}


@pytest.mark.parametrize("kind", RECOMPUTE_KINDS)
@pytest.mark.parametrize(("family", "low", "high"), [("llama", 0.99, 1.1), ("mixtral", 0.9, 1.15)])
def test_the_peak_of_a_microbatch_is_predicted(tmp_path, family, kind, low, high):
    """Routing makes experts hold more or less of it than of the tokens that were measured."""
    model = build_pair(family, copy.deepcopy(FAMILIES[family]))["planned"]
    kernel, shape = choose_kernel(CPU), shape_from_config(FAMILIES[family].to_dict())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    found = measure_microbatch(model, kernel, kind)
    for lengths in ((1500, 100), (60,) * 40):
        tokens, pieces = sum(lengths), [Piece(ranks=(0,), sequences=tuple(range(len(lengths))))]
        plan = make_plan(1, lengths, pieces, layers=LAYERS)
        for offload in (0.0, 1.0):
            store = DiskStore(tmp_path, where="test")
            microbatches = tuple(replace(each, recompute=kind, offload=offload) for each in plan.microbatches)
            batch, there = make_batch(lengths, vocab=300), [*model.parameters(), *(p.grad for p in model.parameters())]
            offloading = Offloading(model, kernel, store)
            offloading.saver(microbatches[0], 100)  # measured before, not beside what is measured here
            with LiveBytes(*there) as live:
                run_plan(
                    model, replace(plan, microbatches=microbatches), batch, SoloTransport(), kernel, name="test",
                    logits_at_once=LOGITS_AT_ONCE, offloading=offloading,
                )  # fmt: skip
            store.close()
            loss = loss_bytes(shape, tokens, narrow=4, wide=4, logits_at_once=LOGITS_AT_ONCE)
            predicted = max(found.peak(tokens), found.saved(tokens) + loss)
            if not offload:
                assert low <= predicted / live.peak_bytes <= high, (lengths, predicted, live.peak_bytes)
            else:
                assert live.peak_bytes < predicted


def run(tmp_path, *, ranks=2, rows=None, status=0, **keys):
    path = write_run(tmp_path, rows or make_rows([90, 60, 30, 12]), capacity_tokens="auto", **keys)
    assert call("train", path, "--ranks", ranks, "--overwrite") == status
    return tmp_path / "out"


def plans_of(output):
    return [Plan.from_json(path.read_text()) for path in sorted((output / "plans").iterdir())]


@pytest.mark.parametrize("recompute", ["none", "layer", "auto"])
def test_auto_trains_to_the_same_losses(tmp_path, capfd, recompute):
    output = run(tmp_path, recompute=recompute, precision="fp64")
    said = capfd.readouterr().out
    assert "microbatches as large as memory holds" in said
    assert re.search(r"capacity of a rank, by the memory that is free: \d+ tokens\n", said), "of any kind as many"
    path = write_run(tmp_path, name="given.yaml", capacity_tokens=200, precision="fp64", output="given")
    assert call("train", path, "--ranks", 2) == 0
    for got, want in zip(losses(output), losses(tmp_path / "given"), strict=True):
        assert got == pytest.approx(want, rel=1e-12)
    assert all(row["peak_memory_bytes"] > 0 for row in read_lines(output / "metrics.jsonl"))


def test_little_memory_makes_more_rings_or_another_recomputation(tmp_path, monkeypatch, capsys):
    """With room for 128 to 300 tokens without recomputation, 700 tokens need more ranks than there are."""
    write_model(tmp_path / "model", num_hidden_layers=8)
    rows = make_rows([700, 60, 30, 12])
    monkeypatch.setattr(capacity, "free_bytes", lambda *_: 12_000_000.0)
    run(tmp_path, rows=rows, status=2, recompute="none")
    refused = capsys.readouterr().err
    assert "error[data] data: expected sequences that all ranks together hold; got 700 tokens; 2 ranks hold" in refused
    assert "recompute: auto" in refused
    plans = plans_of(run(tmp_path, rows=rows, recompute="auto"))
    assert {each.recompute for plan in plans for each in plan.microbatches} & {"layer", "all_but_attention"}


def test_what_offload_lets_a_rank_hold_needs_room_too(tmp_path, monkeypatch, capfd):
    """With 8 layers a rank may hold four times its capacity, and a layer's backward needs four times as much."""
    write_model(tmp_path / "model", num_hidden_layers=8)
    rows = make_rows([300, 60, 30, 12] * 3)
    monkeypatch.setattr(capacity, "free_bytes", lambda *_: 33_200_000.0)  # between what 896 tokens need, and need then
    held = []
    for offload in (None, {"store": "disk", "path": str(tmp_path)}):
        run(tmp_path, rows=rows, global_batch={"sequences": 12}, steps=1, offload=offload)
        held.append(int(capfd.readouterr().out.partition("that is free: ")[2].split()[0]))
    assert held[1] < held[0]


def test_no_memory_is_said_with_the_bytes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(capacity, "free_bytes", lambda *_: 10_000.0)
    run(tmp_path, status=1)
    assert "error[memory] rank 0, start: expected room for 128 tokens" in capsys.readouterr().err


def test_a_plan_made_elsewhere_needs_a_number(tmp_path, capsys):
    path = write_run(tmp_path, make_rows([9]), capacity_tokens="auto")
    assert call("plan", "--config", path, "--ranks", 2, "--out", tmp_path / "plan.json") == 2
    assert "--capacity: expected a number for a plan made here" in capsys.readouterr().err
    arguments = ("--capacity", 64, "--out", tmp_path / "plan.json")
    assert call("plan", "--config", path, "--ranks", 2, *arguments) == 0


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_verify_takes_auto(tmp_path, precision):
    path = write_run(tmp_path, make_rows([90, 60]), capacity_tokens="auto", recompute="auto", precision=precision)
    assert call("verify", path, "--ranks", 2) == 0


def test_free_memory_is_that_of_the_container_and_shared_by_its_ranks(tmp_path, monkeypatch):
    alone, shared = memory.free_bytes(CPU, 1), memory.free_bytes(CPU, 4)
    assert alone > 4 * shared * 0.8 > 0
    monkeypatch.setattr(memory, "_cgroup_bytes", lambda: 1000.0)
    assert memory.free_bytes(CPU, 2) == 500.0
    monkeypatch.setattr(memory, "_cgroup_bytes", lambda: None)
    monkeypatch.setattr(memory, "_available_bytes", lambda: None)
    assert memory.free_bytes(CPU, 1) == 0.0
