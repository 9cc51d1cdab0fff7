"""The search of meshes: no worse than any mesh of its space, alike for all planners."""

from dataclasses import replace
from itertools import product

import pytest

from lengthwise.core.errors import ConfigError, LengthwiseError
from lengthwise.core.plan import RECOMPUTE_KINDS
from lengthwise.cost import named_hardware, named_shape
from lengthwise.data.recipes import draw_lengths
from lengthwise.simulator import RankMesh, Scenario, best_mesh, refuse_unheld
from lengthwise.simulator.found import TooLarge, run_batches

SHAPE, HARDWARE = named_shape("llama-7b"), named_hardware("h100")
SCENARIO = Scenario(shape=SHAPE, hardware=HARDWARE, devices=16, context_tokens=2**16, kinds=("none", "layer"))
NO_OFFLOAD = RankMesh(heads="auto")


@pytest.mark.parametrize("planner", ["static", "lengthwise"])
def test_search_ends_no_later_than_every_mesh(planner: str) -> None:
    """All and a quarter of the capacity, with and without offload."""
    scenario = replace(SCENARIO, devices=8)
    batches = [draw_lengths("github", 2**18, 0, 2**16)]
    found = best_mesh(planner, batches, scenario)
    for share, offload in product((1, 1 / 4), ("off", "auto")):
        mesh = RankMesh(capacity_share=share, heads="auto", offload=offload)
        other = best_mesh(planner, batches, replace(scenario, only=mesh)).found
        if other is None:
            continue  # sequences that it does not hold
        assert found.found.mean_seconds <= 1.01 * other.mean_seconds, mesh
    assert found.tried <= 28


def test_offload_is_tried_where_only_it_holds_the_sequences() -> None:
    batches = [[60_000, 2000, 3000]]
    scenario = replace(SCENARIO, devices=8, kinds=("none",), context_tokens=60_000)
    assert best_mesh("lengthwise", batches, replace(scenario, base=NO_OFFLOAD)).found is None
    found = best_mesh("lengthwise", batches, scenario).found
    assert found.steps[0].most_offload > 0


def test_a_smaller_capacity_is_found_where_it_ends_sooner() -> None:
    """ByteScale cuts a sequence over the fewest ranks that hold it: with all capacity the longest takes two."""
    scenario = replace(SCENARIO, kinds=("layer",), base=NO_OFFLOAD)
    batches = [[60_000] + [500] * 300]
    found = best_mesh("bytescale", batches, scenario).found
    whole = best_mesh("bytescale", batches, replace(scenario, only=NO_OFFLOAD)).found
    assert found.mesh.capacity_share < 1
    assert found.mean_seconds < 0.8 * whole.mean_seconds


def test_capacities_are_shares_of_what_fits_or_as_given() -> None:
    whole, half = (SCENARIO.setting(RankMesh(capacity_share=share)).capacities for share in (1.0, 0.5))
    assert half == {kind: held // 2 // 128 * 128 for kind, held in whole.items()}
    most = whole["none"]
    assert whole["layer"] > most
    for given, expected in ((1000, {"none": 1000, "layer": 1000}), (most + 1, {"layer": most + 1})):
        assert replace(SCENARIO, capacity_tokens=given).setting(RankMesh()).capacities == expected
    more = whole["layer"] + 1
    too_much = replace(SCENARIO, capacity_tokens=more)
    with pytest.raises(ConfigError, match=f"at most {more - 1} tokens"):
        too_much.setting(RankMesh())
    assert replace(too_much, takes_capacity=True).setting(RankMesh()).capacities == {"none": more, "layer": more}
    with pytest.raises(ConfigError, match="room for 128 tokens"):
        replace(SCENARIO, shape=named_shape("llama-70b")).setting(RankMesh())


def test_a_plan_that_needs_more_memory_than_a_device_has_is_no_rival() -> None:
    """A layer computed again cannot be offloaded: a whole sequence beside it may need more than a device has."""
    scenario = replace(SCENARIO, kinds=RECOMPUTE_KINDS)
    batches = [[2**17, 2**17, *[3000] * 30]]
    whole = SCENARIO.base
    assert best_mesh("packed-dp", batches, replace(scenario, only=whole)).found is None
    taken = best_mesh("packed-dp", batches, replace(scenario, only=whole, capacity_tokens=40_000, takes_capacity=True))
    assert taken.found.steps[0].memory_bytes > HARDWARE.device_bytes
    found = best_mesh("packed-dp", batches, scenario).found
    assert found.mesh.capacity_share < 1
    assert found.steps[0].memory_bytes <= HARDWARE.device_bytes
    longer = best_mesh("packed-dp", [[2**18, 3000]], scenario)
    assert longer.found is None
    assert "memory of a device" in str(longer.refusal)


def test_where_offload_needs_too_much_memory_the_plan_does_without() -> None:
    scenario = replace(SCENARIO, kinds=RECOMPUTE_KINDS)
    mesh = SCENARIO.base
    setting = scenario.setting(mesh)

    def step_on(device_bytes):
        small = replace(setting, hardware=replace(HARDWARE, device_bytes=device_bytes))
        return run_batches("lengthwise", [[2**17, 2**17, *[3000] * 30]], small).steps[0]

    most = step_on(HARDWARE.device_bytes)
    assert most.most_offload > 0
    less = step_on(most.memory_bytes - 1)
    assert less.memory_bytes < most.memory_bytes
    assert less.most_offload == 0
    assert less.step_seconds >= most.step_seconds
    with pytest.raises(TooLarge, match=r"1\.0 GB"):
        step_on(1e9)


def test_nobody_holds_the_sequences_is_an_error_and_somebody_is_not() -> None:
    scenario = replace(SCENARIO, devices=8, kinds=("none",), base=NO_OFFLOAD, capacity_tokens=2048)
    scenario = replace(scenario, takes_capacity=True)
    with pytest.raises(LengthwiseError, match="20000"):
        refuse_unheld([best_mesh(planner, [[20_000, 7]], scenario) for planner in ("static", "lengthwise")])
    alone = best_mesh("static", [[20_000, 7]], scenario)
    assert alone.found is None
    assert alone.tried == 1
    assert "20000" in str(alone.refusal)
