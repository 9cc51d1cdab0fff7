"""Configurations on several ranks: what runs, with which files, and what becomes a row; here on the CPU."""

import contextlib
import json

import pytest
import torch

from gpu import many
from gpu.many import CONFIGURATIONS
from gpu.rows import TITLES, Records, page_of, read_rows
from gpu.setting import sizes_of
from lengthwise.cli import main

TINY = sizes_of("cpu", tiny=True)


def in_this_process(command, log, _limit):
    """Run a command of `lengthwise` here, which imports nothing anew."""
    with log.open("w") as out, contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
        main(command[3:])
    return f"status {ended.value.code}" if ended.value.code else "ok"


def test_a_configuration_is_verified_and_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(many, "run_limited", in_this_process)
    many.many(TINY, Records(tmp_path, "many"), ["optimizer on the host"])
    (row,) = read_rows(tmp_path)
    assert row["verified"] == "PASS"
    assert row["exercised"].startswith("rings of 2 ranks")
    assert row["transfers"] == "gloo; because the run computes on the CPU"
    assert 0 < row["last_loss"] < row["first_loss"]


def test_what_fails_is_a_row_and_the_others_run(tmp_path, monkeypatch):
    """Commands that fail, hang, or give other losses than the first one's; a package that is not there."""
    ends = {"hybrid": "time limit", "optimizer-on-the-host": "status 1"}

    def run(command, log, limit):
        there = log.parent
        log.write_text("transfers: NCCL\nexercised: rings of 2 ranks\ntolerance: PASS\nsome error\n")
        if "torch.distributed.run" in command:
            assert limit == many.COMMAND_LIMIT_SECONDS
            (there / "losses.jsonl").write_text('{"loss": 2.0}\n' * many.STEPS)
        elif log.stem == "train":
            (there / "out").mkdir()
            loss = 2.5 if there.name == "activations-on-the-host" else 2.0
            (there / "out/metrics.jsonl").write_text(f'{{"loss": {loss}}}\n' * many.STEPS)
        return ends.get(there.name, "ok")

    monkeypatch.setattr(many, "run_limited", run)
    monkeypatch.setattr(many.importlib.util, "find_spec", lambda name: None if name == "trl" else name)
    failing = "hybrid, optimizer on the host, activations on the host failed"
    for _ in range(2):  # a second call goes over what the first one has left
        with pytest.raises(SystemExit, match=f"many: {failing}; .*many has the output"):
            many.many(TINY, Records(tmp_path, "many"))
    rows = {row["configuration"]: row for row in read_rows(tmp_path)}
    assert list(rows) == list(CONFIGURATIONS)
    assert rows["hybrid"]["failed"] == "verify, time limit: some error"
    assert rows["optimizer on the host"]["failed"] == "verify, status 1: some error"
    assert rows["activations on the host"]["failed"] == "losses are not those of zero3"
    assert rows["SFTTrainer"]["left_out"] == "no package trl"
    assert "failed" not in rows["stages with rings"]
    assert rows["stages with rings"]["verified"] == "PASS"


@pytest.mark.parametrize(
    ("gpus", "zero3", "hybrid", "trainer"), [(1, 2, 4, 1), (2, 2, 4, 2), (3, 3, 4, 3), (8, 4, 4, 4)]
)
def test_ranks_are_one_a_gpu_unless_a_layout_needs_more(monkeypatch, tmp_path, gpus, zero3, hybrid, trainer):
    asked = {}

    def run(sizes, configuration, ranks, there):
        asked[there.name] = ranks
        return {}, []

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(many, "_run", run)
    many.many(sizes_of("cuda", tiny=True), Records(tmp_path, "many"))
    assert (asked["zero3"], asked["hybrid"], asked["SFTTrainer"]) == (zero3, hybrid, trainer)


def test_on_gpus_activations_go_to_the_hosts_memory(tmp_path):
    for device, store in (("cpu", "disk"), ("cuda", "host")):
        configuration = CONFIGURATIONS["activations on the host"]
        (tmp_path / device).mkdir()
        many.write_run(sizes_of(device, tiny=True), configuration, tmp_path / device)
        assert json.loads((tmp_path / device / "run.yaml").read_text())["offload"]["store"] == store


@pytest.mark.exhaustive
def test_all_configurations_run_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(many, "COMMAND_LIMIT_SECONDS", 300.0)
    many.many(TINY, Records(tmp_path, "many"))
    rows = read_rows(tmp_path)
    assert [row["configuration"] for row in rows] == list(CONFIGURATIONS)
    assert all(row["first_loss"] > row["last_loss"] for row in rows)
    assert f"### {TITLES['many']}\n" in page_of(rows)
