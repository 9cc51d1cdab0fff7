"""A run file through `train` and through `plan --config`: one layout, one planning."""

import json
from dataclasses import asdict
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from testing.small import make_rows, write_model

from lengthwise.cli.options import PlanChoices
from lengthwise.cli.plan import PlanCommand
from lengthwise.config import build_config
from lengthwise.cost import analytic_cost, named_hardware, named_shape
from lengthwise.run.checks import prepare_job, session_options, stored_model
from lengthwise.run.job import RunStart
from lengthwise.session import open as session_open
from lengthwise.session.open import with_layout
from lengthwise.session.ranks import SessionRanks
from lengthwise.session.settings import check_settings, cost_of, planning_of
from lengthwise.setup.resolve import Machine, model_of_run, resolve
from run.small_runs import write_rows, write_run
from tiers import some

LENGTHS = [90, 41, 30, 12, 8, 5]
LAYOUTS = {
    "zero1": {"shard": "zero1"},
    "zero3": {"shard": "zero3"},
    "hybrid": {"shard": "hybrid", "ranks_per_node": 2},
    "stages": {"stages": 2},
}
OFFLOADS = [None, 0.5, "auto"]
RANKS = 4
CASES = list(product(LAYOUTS, OFFLOADS, ["auto", "off", 2]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("run")
    write_model(found / "model", num_hidden_layers=4)
    write_rows(found / "train.jsonl", make_rows(LENGTHS))
    return found


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    monkeypatch.setattr(session_open, "least", lambda _, numbers: list(numbers))
    monkeypatch.setattr(session_open, "from_first", lambda _, work: work())


def planned_by(settings):
    """What plans a session of these settings, once it has a layout."""
    transport = SimpleNamespace(world_size=RANKS, rank=0, device_ranks=RANKS)
    cost, _ = cost_of(settings, RANKS)
    found = with_layout(settings, SessionRanks(transport=transport, local_ranks=2, say=print), cost)
    return planning_of(SimpleNamespace(transport=transport), None, cost, found, takes_any_loss=True)


def of_run(config, *, device="cpu"):
    job = prepare_job(RunStart(config=config, ranks=RANKS, timeout_seconds=10, gpus=RANKS * (device != "cpu")))
    options = {**session_options(job.config), "device": torch.device(device)}
    known = {"lengths": LENGTHS, "batch_tokens": job.most_tokens}
    return planned_by(check_settings(stored_model(job.config, job.model), job.config.optimizer, options, **known)).ahead


def of_plan(path, **options):
    """What `plan --config` plans with."""
    out = path.with_name("plan.json")
    command = PlanCommand(config=path, ranks=RANKS, out=out, planning=PlanChoices(), **options)
    return command.planning_of(command._read(), LENGTHS, max(LENGTHS), batch=sum(LENGTHS))[0]


def assert_same(planned, trained):
    """Of what `plan` knows by sizes alone, which do not count norms, about the same."""
    found, expected = map(asdict, (planned, trained))
    sized, counted = (each["cost"].pop("traffic") for each in (found, expected))
    ends = [each.cost.step_end_seconds(RANKS) for each in (planned, trained)]
    del found["cost"]["ending"], expected["cost"]["ending"]
    assert found == expected
    assert sized == (counted and pytest.approx(counted, rel=0.05))
    assert ends[0] == pytest.approx(ends[1], rel=0.05)


@pytest.mark.parametrize(("layout", "ratio", "heads"), some(CASES, 0, 13, 26, 29))
def test_a_run_plans_as_plan_does(folder, layout, ratio, heads):
    number = CASES.index((layout, ratio, heads))
    keys = {**LAYOUTS[layout], "heads": heads, "capacity_tokens": 48 + 16 * (number % 5)}
    keys["recompute"] = ("none", "layer", "auto")[number // 2 % 3]
    keys["offload"] = ratio and {"store": "disk", "path": str(folder), "ratio": ratio}
    path = write_run(folder, precision="fp32", **keys)
    config = build_config(json.loads(path.read_text()), folder=folder)
    trained = of_run(config)
    assert trained.options.context_tokens == max(LENGTHS)
    assert_same(of_plan(path), trained)


@pytest.mark.parametrize("keys", [{"lora": {"r": 2}}, {"stages": 2, "optimizer": {"offload": True}}])
def test_a_plan_for_gpus_is_priced_as_a_run_on_them(folder, monkeypatch, keys):
    """Adapters, the precision and an optimizer on the host of stages did not count in plans."""
    path = write_run(folder, **{"precision": "bf16", "capacity_tokens": 64, **keys})
    config = build_config(json.loads(path.read_text()), folder=folder)
    monkeypatch.setattr(session_open, "free_bytes", lambda *_: 80e9)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    planned = of_plan(path, hardware="h100")
    assert_same(planned, of_run(config, device="cuda"))
    assert ("optimizer on hosts" in planned.cost.version) == ("optimizer" in keys)


@pytest.mark.parametrize(
    ("tokens", "recompute", "batch", "shard"),
    [
        (8192, "layer", 8192, "zero1"),
        (8192, "auto", 8192, "zero3"),  # none beside a number
        ("auto", "auto", 1 << 16, "zero1"),
        (1 << 17, "layer", 1 << 17, "zero3"),
        (1 << 17, "layer", 8192, "zero1"),  # no microbatch is larger than the batch
    ],
)
def test_auto_makes_room_for_the_tokens_of_a_microbatch_as_they_are_recomputed(folder, tokens, recompute, batch, shard):
    path = write_run(folder, precision="bf16", shard="auto", capacity_tokens=tokens, recompute=recompute)
    config, shape = build_config(json.loads(path.read_text()), folder=folder), named_shape("llama-3.1-8b")
    cost, machine = analytic_cost(shape, named_hardware("h100")), Machine(ranks=8, here=8, on_gpus=True)
    found = resolve(config, model_of_run(config, shape, on_gpus=True), machine, cost, room_bytes=80e9, batch=batch)
    assert found.settings.shard == found.memory.shard == shard
