"""The four ways of the short answer: each at settings that hold its sequences, none worse than its other settings."""

from dataclasses import replace

import pytest

from lengthwise.cost import logits_at_once, named_hardware, named_shape
from lengthwise.report.answer import answer_notes
from lengthwise.simulator import Question, WayRow, answer
from lengthwise.simulator.answer import (
    BY_WORK,
    LAYOUTS,
    ONE_RING,
    OURS,
    PACKED,
    PADDED,
    WaySettings,
    compare_layouts,
    run_ours,
    run_rival,
)
from tiers import more

SHAPE, H100 = named_shape("qwen3-8b"), named_hardware("h100")
BATCHES = [[30_000, *[2000] * 12, 700], [20_000, *[4000] * 6]]
FEW = Question(shape=SHAPE, hardware=H100, devices=4)
NODE = Question(shape=SHAPE, hardware=H100, devices=8)


@pytest.fixture(scope="module")
def rows() -> dict[str, WayRow]:
    found = answer(BATCHES, FEW)
    assert found.best_other in found.rows[:-1]
    return {row.name: row for row in found.rows}


def test_answer_has_each_way_at_settings_that_fit(rows) -> None:
    assert list(rows) == [PADDED, PACKED, ONE_RING, BY_WORK, OURS]
    for row in rows.values():
        assert len(row.step_seconds) == 2
        assert 0 < row.memory_bytes <= H100.device_bytes
        ends = {stretch.rank: stretch.end for stretch in row.stretches}
        assert set(ends) <= set(range(4))
        assert max(ends.values()) <= row.step_seconds[0] * (1 + 1e-9)


def test_answer_takes_the_best_settings_of_each_way(rows) -> None:
    heaviest, held = BATCHES[0], FEW.capacities("zero3")["layer"]
    others = [
        (PADDED, WaySettings(recompute="layer", capacity_tokens=held, size=1, by_length=False)),
        (PACKED, WaySettings(recompute="layer", capacity_tokens=held, degree=1)),
        (PACKED, WaySettings(recompute="layer", capacity_tokens=max(heaviest), degree=1)),
        (ONE_RING, WaySettings(recompute="layer", capacity_tokens=held, degree=4)),
    ]
    for name, settings in others:
        assert rows[name].step_seconds[0] <= run_rival(heaviest, settings, FEW).step_seconds
    plain = WaySettings(recompute="layer", capacity_tokens=held, layout="zero3")
    assert rows[OURS].step_seconds[0] <= run_ours(heaviest, plain, FEW).seconds


@pytest.mark.parametrize("layout", [more("zero1"), "zero3"])
def test_settings_of_ours_that_are_not_tried_are_no_better(layout) -> None:
    """Short sequences, of which a wave without recomputation holds few: many gathers."""
    batch = [500] * 400
    row = compare_layouts([batch], NODE)[LAYOUTS.index(layout)]
    capacities = NODE.capacities(layout)
    seconds = {
        kind: run_ours(batch, WaySettings(recompute=kind, capacity_tokens=held, layout=layout), NODE).seconds
        for kind, held in capacities.items()
    }
    assert len(seconds) > 1
    assert row.step_seconds[0] <= 1.005 * min(seconds.values())


def test_sharded_ranks_of_ours_wait_for_gathers_too() -> None:
    """On links a thousand times slower a step of zero3 takes longer than its computation by far."""
    slow = replace(H100, node_link_bytes_per_second=H100.node_link_bytes_per_second / 1000)
    way = WaySettings(recompute="layer", capacity_tokens=32_768, layout="zero3")
    quick, waiting = (run_ours([8000] * 8, way, replace(NODE, hardware=each)).seconds for each in (H100, slow))
    assert waiting > 10 * quick


def test_our_row_is_the_layout_that_runs_take_which_is_the_fastest() -> None:
    """Two nodes have three layouts. On one node a hybrid would be zero3."""
    found = answer([[30_000, *[2000] * 16]], Question(shape=SHAPE, hardware=H100, devices=16, kinds=["layer"]))
    assert [row.settings.layout for row in found.layouts if row.settings] == list(LAYOUTS)
    assert found.ours.mean_seconds == min(row.mean_seconds for row in found.layouts)
    assert found.ours.settings is not None
    assert found.ours.settings.layout == found.auto == "zero3"  # zero1 fits, too, and takes longer
    assert any("zero1 " in note and "`shard: auto` takes zero3" in note for note in answer_notes(found))
    assert NODE.layouts() == ("zero1", "zero3")


@pytest.mark.parametrize(
    ("model", "attends"), [("granite-4.0-h-1b", False), ("lfm2-350m", False), ("qwen3-0.6b", True)]
)
def test_an_answer_knows_whether_layers_do_anything_but_attend(model: str, attends: bool) -> None:
    question = Question(shape=named_shape(model), hardware=H100, devices=2, kinds=["layer"])
    found = answer([[4000, 2000]], question)
    assert found.only_attends is attends
    assert any("could cut layers with states" in note for note in answer_notes(found)) is not attends


def test_our_row_is_what_a_run_takes_without_offload() -> None:
    """Of 128K tokens a rank of eight has 16K, for which zero1 has room with offload alone, which runs must ask for."""
    found = answer([[131_072, *[4000] * 50]], NODE)
    zero1, zero3 = found.layouts
    assert zero1.settings is not None
    assert zero1.settings.offloads
    assert found.auto == "zero3"
    assert found.ours == zero3


def test_simulated_ranks_hold_what_runs_hold() -> None:
    """The loss of a run on GPUs makes 2,048 tokens at once, of large vocabularies more logits than on CPUs."""
    memory = NODE.memory("zero3")
    on_gpus, on_cpus = (logits_at_once(SHAPE.vocab, on_gpus=each) for each in (True, False))
    assert memory.logits_at_once == on_gpus > on_cpus


def test_answer_says_what_a_gpu_holds_where_a_sequence_is_too_long() -> None:
    found = answer([[200_000, 500]], NODE)
    refusals = {row.name: row.refusal for row in found.rows}
    held = max(NODE.capacities("zero3").values())
    assert refusals[PADDED] == refusals[PACKED] == f"longest sequence 200,000, a GPU holds {held:,}"
    assert refusals[ONE_RING] == refusals[OURS] == ""


def test_answer_of_a_model_that_fits_nowhere() -> None:
    found = answer([[100]], Question(shape=named_shape("llama-70b"), hardware=H100, devices=2))
    assert found.best_other is None
    assert all("no room beside" in row.refusal for row in found.rows)


def test_an_optimizer_on_the_host_makes_room_in_all_ways_and_takes_time() -> None:
    large = Question(shape=named_shape("qwen3-32b"), hardware=H100, devices=8)
    assert not large.capacities("zero3")
    assert replace(large, offloads=True).capacities("zero3")
    on_gpus = Question(shape=SHAPE, hardware=H100, devices=8)
    on_host, way = replace(on_gpus, offloads=True), WaySettings(recompute="layer", capacity_tokens=8192, degree=4)
    seconds = 40 * SHAPE.total_params / 8 / (300e9 / 8)  # 40 bytes a parameter, at a device's share of host memory
    rivals = [run_rival(BATCHES[0], way, each).step_seconds for each in (on_gpus, on_host)]
    assert rivals[1] - rivals[0] == pytest.approx(seconds)
    for layout in ("zero1", "zero3"):
        ours = [run_ours(BATCHES[0], replace(way, layout=layout), each) for each in (on_gpus, on_host)]
        assert ours[1].seconds - ours[0].seconds == pytest.approx(seconds)
        assert ours[1].memory_bytes < ours[0].memory_bytes
