"""Ways to train, compared: each at settings that hold its sequences, none worse than its others; FSDP2 by hand."""

from dataclasses import replace

import pytest

from lengthwise.core.plan import WithImages
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape, sharded_traffic, step_memory
from lengthwise.planner import PlanOptions
from lengthwise.planner.prefixes import plan_apart
from lengthwise.program import check_plan
from lengthwise.report.branches import branches_json, branches_notes
from lengthwise.report.page import degrees_of
from lengthwise.report.simulation import answer_notes
from lengthwise.simulator import (
    LAYOUTS,
    OURS,
    Branches,
    Found,
    RankMesh,
    Scenario,
    best_mesh,
    compare,
    compare_layouts,
    simulate_plan,
    stretches,
)
from lengthwise.simulator.layouts import layout_seconds
from lengthwise.simulator.rivals import BY_WORK, ONE_RING, PACKED, PADDED, PADDED_RINGS, LockStep, lock_steps, packed

SHAPE, H100 = named_shape("qwen3-8b"), named_hardware("h100")
BATCHES = [[30_000, *[2000] * 12, 700], [20_000, *[4000] * 6]]
FEW = Scenario(shape=SHAPE, hardware=H100, devices=4)
NODE = Scenario(shape=SHAPE, hardware=H100, devices=8)


def run(tokens, scenario, layout, held, kind, how=None) -> Found:
    """Run one batch with FSDP2, or without `how` with Lengthwise."""
    mesh = RankMesh(layout=layout, held=((kind, held),), heads="auto", lock_step=how)
    found = best_mesh("FSDP2" if how else "lengthwise", [tokens], replace(scenario, only=mesh)).found
    assert found is not None
    return found


def test_comparison_has_each_way_at_settings_that_fit() -> None:
    compared = compare(BATCHES, FEW)
    assert compared.best_other in compared.rows[:-1]
    rows = {row.planner: row.found for row in compared.rows if row.found}
    # With powers of two the model is whole: no room.
    assert list(rows) == [PADDED, PACKED, PADDED_RINGS, ONE_RING, BY_WORK, OURS]
    rings = rows[PADDED_RINGS]
    degrees = {piece.degree for each in rings.first_plan.microbatches for piece in each.pieces}
    assert degrees == {rings.mesh.lock_step.degree}
    for found in rows.values():
        assert len(found.step_seconds) == 2
        assert 0 < found.most("memory_bytes") <= H100.device_bytes
        ends = [each.end for rank in range(4) for each in stretches(found.first_plan, found.first, rank)]
        assert max(ends) <= found.step_seconds[0] * (1 + 1e-9)


def test_the_gain_with_another_kernel_is_that_of_a_comparison_with_it() -> None:
    """Where ours keeps its mesh: FlashAttention-3 alone is as fast as the kernels of h100."""
    known = compare(BATCHES[:1], FEW)
    other = compare(BATCHES[:1], replace(FEW, hardware=H100.with_kernel("flash3")))
    ratio = other.best_other.found.mean_seconds / other.apart.found.mean_seconds
    assert known.kernels == {"flash3": pytest.approx(ratio, rel=0.01)}
    assert other.kernels == {}


def test_a_rival_takes_the_best_of_all_its_settings() -> None:
    """Each of them simulated: those that the search skips by the prediction of their plan are no better."""
    name, compared, (batch, _) = BY_WORK, compare(BATCHES[:1], FEW), BATCHES
    (taken,) = (row.found for row in compared.rivals if row.planner == name)
    tries = list(lock_steps(name, [batch], 4, FEW.held("zero3"), layers=FEW.shape.layers))
    seconds = [run(batch, FEW, "zero3", held, kind, how).mean_seconds for kind, held, how in tries]
    assert len(set(seconds)) > 2
    assert taken.mean_seconds == min(seconds)


def test_a_rival_may_mix_kinds_of_recomputation_too() -> None:
    """Where one kind does not hold the longest sequence, alone or over the ranks of a ring."""
    capacities = {"none": 5760, "elementwise": 14_336, "all_but_attention": 59_904}
    tries = [(kind, how.degree) for kind, _, how in lock_steps(BY_WORK, [[16_384] * 8], 8, capacities, layers=36)]
    assert {each for each in tries if "+" in each[0]} == {("elementwise+6/36", 1), ("none+18/36", 2)}


def test_prompts_are_computed_once_where_that_pays_and_by_ours_alone() -> None:
    """On the mesh of whole sequences, which all others run as if they shared nothing."""
    scenario, batch = Scenario(shape=named_shape("qwen3-0.6b"), hardware=H100, devices=2, kinds=("layer",)), [3000] * 16
    apart = compare([batch], scenario)
    found = compare([batch], replace(scenario, branches=Branches(completions=8, prompt_tokens=2000)))
    assert [row.found.steps for row in found.rivals] == [row.found.steps for row in apart.rivals]
    assert found.apart.found.mesh == found.ours.found.mesh == apart.ours.found.mesh
    assert found.apart.found.step_seconds == apart.ours.found.step_seconds
    assert {length for length, _ in degrees_of(found.ours.found)} == {batch[0]}
    figures, (note,) = branches_json(found), branches_notes(found)
    assert "Prompts computed once: 58.3 % fewer tokens" in note
    assert (figures["steps_sharing"], figures["saved_tokens_ratio"]) == (1, pytest.approx(14 * 1999 / sum(batch)))
    times = apart.ours.found.mean_seconds / found.ours.found.mean_seconds
    assert figures["saved_seconds_ratio"] == [pytest.approx(1 - 1 / times, rel=0.01)]
    assert times > 1
    assert branches_notes(apart) == []


def test_completions_of_a_prompt_follow_each_other_longest_first() -> None:
    """The last prompt has fewer; a prompt's last token is of each completion."""
    shared = Branches(completions=2, prompt_tokens=20).shared([30, 40, 50, 25, 60])
    assert (shared.order, shared.common) == ((1, 0, 2, 3, 4), (0, 19, 0, 19, 0))


def test_our_row_is_the_layout_that_runs_take_which_is_the_fastest_by_the_same_seconds() -> None:
    """Two nodes have three layouts. On one node a hybrid would be zero3. To the bit: `shard: auto` uses them, too."""
    batch, scenario = [30_000, *[2000] * 16], Scenario(shape=SHAPE, hardware=H100, devices=16, kinds=("layer",))
    found = compare([batch], scenario)
    estimated = layout_seconds(batch, scenario.cost_of(RankMesh()), H100.device_bytes, kinds=scenario.kinds)
    assert all(row.found.step_seconds[0] == estimated(row.found.setting.memory) for row in found.layouts)
    assert [row.found.mesh.layout for row in found.layouts] == list(LAYOUTS)
    assert found.ours.found.mean_seconds == min(row.found.mean_seconds for row in found.layouts)
    assert found.ours.found.mesh.layout == found.auto == "zero3"  # zero1 fits, too, and takes longer
    assert any("zero1 " in note and "`shard: auto` takes zero3" in note for note in answer_notes(found))


def test_a_hybrid_recomputes_more_before_it_offloads() -> None:
    """It takes the kind of zero3, in whose waves it gathers, unless that holds the sequences with offload alone."""
    scenario = Scenario(shape=SHAPE, hardware=H100, devices=16)
    least, most = (scenario.held(layout)["none"] for layout in ("hybrid", "zero3"))
    assert least < most
    rows = compare_layouts([[8 * (least + most)]], scenario)
    (zero3,), (hybrid,) = (row.found.steps for row in rows[1:])
    assert (zero3.recompute, zero3.most_offload) == ("none", 0)
    assert hybrid.recompute != "none"
    assert not hybrid.most_offload


def test_our_row_is_what_a_run_takes_without_offload() -> None:
    """Of 128K tokens a rank of eight has 16K, for which zero1 has room with offload alone, which runs must ask for."""
    found = compare([[131_072, *[4000] * 50]], NODE)
    zero1, zero3 = found.layouts
    assert zero1.found.most("most_offload") > 0
    assert found.auto == "zero3"
    assert found.ours == zero3


def test_comparison_says_what_a_gpu_holds_where_a_sequence_is_too_long() -> None:
    found = compare([[200_000, 500]], NODE)
    refusals = {row.planner: row.refusal and row.refusal.got for row in found.rows}
    held = max(NODE.held("zero3").values())
    assert refusals[PADDED] == refusals[PACKED] == f"longest sequence 200,000, a GPU holds {held:,}"
    assert refusals[ONE_RING] == refusals[OURS] is None


def test_an_optimizer_on_the_host_makes_room_in_all_ways_and_takes_time() -> None:
    large, on_host = replace(NODE, shape=named_shape("qwen3-32b")), replace(NODE, offloads=True)
    assert not large.held("zero3")
    assert replace(large, offloads=True).held("zero3")
    seconds = 40 * SHAPE.total_params / 8 / (300e9 / 8)  # 40 bytes a parameter, at a device's share of host memory
    for layout, how in (("zero3", LockStep(degree=4)), ("zero1", None), ("zero3", None)):
        ran = [run(BATCHES[0], each, layout, 8192, "layer", how).steps[0] for each in (NODE, on_host)]
        assert ran[1].step_seconds - ran[0].step_seconds == pytest.approx(seconds)
        assert ran[1].memory_bytes < ran[0].memory_bytes


def test_traffic_is_bytes_over_links() -> None:
    """Of 8 devices in a node each receives 7/8 of a layer, in bf16, and sends 7/8 of its gradients in fp32."""
    shape, hardware = named_shape("llama-3.1-8b"), named_hardware("h100")
    memory = replace(step_memory(shape, hardware, 8), shard="zero3")
    traffic = sharded_traffic(memory, all_terms_cost(shape, hardware))
    layer = 4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336
    assert traffic.gather_seconds == pytest.approx(2 * layer * 7 / 8 / 370e9)
    assert traffic.reduce_seconds == pytest.approx(4 * layer * 7 / 8 / 370e9)
    assert traffic.rest_gather_seconds == pytest.approx(2 * 2 * 4096 * 128256 * 7 / 8 / 370e9)
    adapters = sharded_traffic(replace(memory, trained=layer), all_terms_cost(shape, hardware))
    assert adapters.gather_seconds == traffic.gather_seconds
    assert adapters.reduce_seconds == pytest.approx(traffic.reduce_seconds / 32)
    assert adapters.rest_reduce_seconds == 0


def test_lock_step_waits_for_the_slowest_of_every_microbatch_which_is_cut_over_the_same_ranks() -> None:
    """Three on two devices: 4 and 10 side by side, then 6 alone; each costs half a second more. Then rings of two."""
    cost, whole, rings = Cost(linear_seconds=1.0, fixed_seconds=0.5), LockStep(size=1), LockStep(size=1, degree=2)
    alone, together = [(0, 4.5), (0, 10.5), (10.5, 17)], [(0, 2.5), (0, 2.5), (0, 5.5), (0, 5.5)]
    for how, tokens, ranks, expected, held in ((whole, [4, 10, 6], 2, alone, 10), (rings, [10, 4], 5, together, 5)):
        plan = how(tokens, Cluster(ranks=ranks, capacity_tokens=10), cost, PlanOptions(recompute="none"))
        check_plan(plan)
        took = simulate_plan(plan, cost)
        assert sorted(took.start.tolist()) == pytest.approx([start for start, _ in expected])
        assert sorted(took.end.tolist()) == pytest.approx([end for _, end in expected])
        assert plan.notes["predicted_seconds"] == pytest.approx(took.step_seconds)
        assert took.step_seconds == pytest.approx(expected[-1][1])
        assert took.held_tokens.max() == held


def test_all_ways_to_train_count_the_work_on_images() -> None:
    """Of four rows two have images of thrice their work; microbatches of a row on two ranks wait for each other."""
    cost, cluster = Cost(linear_seconds=1.0), Cluster(ranks=2, capacity_tokens=1200)
    batch = WithImages([1000, 900, 800, 1000], [[(0, 3000.0)], [], [(0, 2000.0), (9, 1000.0)], []])

    def seconds(how: LockStep) -> float:
        plan = plan_apart(batch, 1200, cost, lambda own, costs: how(own, cluster, costs, PlanOptions()), batch.images)
        assert sum(each.total for each in plan.images) == 6000
        return simulate_plan(plan, cost).step_seconds

    assert seconds(LockStep(size=1)) == pytest.approx(4000 + 3800, rel=0.01)
    assert seconds(LockStep(by_work=True)) == pytest.approx(4000 + 1000, rel=0.01)
    scenario = Scenario(shape=named_shape("qwen3-0.6b"), hardware=H100, devices=2, kinds=("layer",))
    plain, seen = (compare([each], scenario) for each in (list(batch), batch))
    for before, after in zip(plain.rows, seen.rows, strict=True):
        assert after.found.mean_seconds > before.found.mean_seconds, after.planner
        assert after.found.mean("ideal_seconds") > 2 * before.found.mean("ideal_seconds")


def test_padding_fills_up_to_the_longest_of_a_microbatch_and_packing_keeps_sequences_whole() -> None:
    cluster, options = Cluster(ranks=1, capacity_tokens=99), PlanOptions()
    for by_length, expected in ((False, (9, 9, 5, 5, 2)), (True, (9, 9, 3, 3, 1))):
        plan = LockStep(size=2, by_length=by_length)([3, 9, 5, 1, 2], cluster, Cost(linear_seconds=1.0), options)
        assert plan.tokens == expected
    packs = packed(range(1, 9), 9)
    assert sorted(length for pack in packs for length in pack) == [*range(1, 9)]
    assert [sum(pack) for pack in packs] == [9, 9, 9, 9]
    assert sorted(map(sum, packed([9, 9, 1], 9))) == [1, 9, 9]
