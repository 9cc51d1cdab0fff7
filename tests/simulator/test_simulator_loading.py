"""Loaders: who reads what, and how much of it a step waits for."""

from dataclasses import replace

import pytest

from lengthwise.core.errors import ConfigError
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import all_terms_cost, named_hardware, named_shape
from lengthwise.simulator import Setting, compare_planners, loading_seconds, waits_seconds

SHAPE, HARDWARE = named_shape("llama-7b"), named_hardware("h100")
PLAN = Plan(
    ranks=5,
    layers=32,
    capacity=10**6,
    tokens=(1000, 300, 20),
    microbatches=(
        Microbatch(pieces=(Piece(ranks=(0, 1, 2), sequences=(0,)),)),
        Microbatch(pieces=(Piece(ranks=(4,), sequences=(1, 2)),)),
    ),
)


def test_local_loaders_read_for_every_process_and_remote_ones_once() -> None:
    options = {"tokens_per_second": 10.0, "ranks_per_node": 2}
    assert loading_seconds(PLAN, "none", **options) == 0.0
    assert loading_seconds(PLAN, "local", **options) == pytest.approx(2 * 1320 / 10)  # two whole batches a node
    assert loading_seconds(PLAN, "local", **options, devices=4) == pytest.approx(4 * 2 * 1320 / 10)
    # On a fixed mesh: ranks 0 and 1 read the first sequence each, rank 2 too, rank 3 nothing, rank 4 the others.
    assert loading_seconds(PLAN, "local", **options, fixed_mesh=True) == pytest.approx(2 * 1000 / 10)
    assert loading_seconds(PLAN, "remote", **options, devices=4) == pytest.approx(1320 / 3 / 10)  # three nodes
    # The same devices as stages are on so many times as many nodes, and each node reads for one stage.
    assert loading_seconds(PLAN, "remote", **options, devices=4, stages=4) == pytest.approx(1320 / 12 / 10)
    assert loading_seconds(PLAN, "local", **options, devices=4, stages=4) == pytest.approx(2 * 1320 / 10)


def test_loaders_are_refused_by_name_and_without_speed() -> None:
    with pytest.raises(ConfigError, match="Did you mean `remote`"):
        loading_seconds(PLAN, "remot", tokens_per_second=1.0, ranks_per_node=1)
    for speed in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="tokens_per_second"):
            loading_seconds(PLAN, "local", tokens_per_second=speed, ranks_per_node=1)


def test_waits_are_what_the_step_before_does_not_hide() -> None:
    assert waits_seconds([3.0, 3.0, 3.0], [1.0, 5.0, 2.5]) == [0.5, 2.0, 0.0]
    assert waits_seconds([4.0], [1.0]) == [3.0]


@pytest.mark.exhaustive
def test_study_waits_for_slow_loaders_only() -> None:
    batches = [[20_000, *[2000] * 60], [9000] * 10]
    slow = replace(HARDWARE, loader_tokens_per_second=1e5)
    setting = Setting(
        shape=SHAPE,
        hardware=slow,
        cost=all_terms_cost(SHAPE, slow),
        cluster=Cluster(ranks=16, capacity_tokens=8192),
        context_tokens=20_000,
    )

    def run(loader: str, hardware=slow):
        changed = replace(setting, loader=loader, hardware=hardware)
        return compare_planners(["static", "lengthwise"], batches, changed, progress=lambda *_: None)

    none, local, remote = (run(loader) for loader in ("none", "local", "remote"))
    for without, with_local, with_remote in zip(none, local, remote, strict=True):
        assert all(step.loader_seconds == 0 for step in without.steps)
        for plain, late in zip(without.steps, with_local.steps, strict=True):
            assert late.step_seconds == pytest.approx(plain.step_seconds + late.loader_seconds)
        assert with_local.mean_seconds > with_remote.mean_seconds >= without.mean_seconds
        assert with_local.mean("idle_ratio") > without.mean("idle_ratio")
    node_batch = 8 * 140_000 / 1e5  # every one of 8 processes reads all, behind the second step
    assert local[1].steps[0].loader_seconds == pytest.approx(node_batch - none[1].steps[1].step_seconds)
    assert local[0].steps[0].loader_seconds < local[1].steps[0].loader_seconds  # groups read their own
    fast = run("local", replace(slow, loader_tokens_per_second=1e12))
    assert [step.step_seconds for step in fast[1].steps] == [step.step_seconds for step in none[1].steps]
