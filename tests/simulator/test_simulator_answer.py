"""The four ways of the short answer: each at settings that hold its sequences, none worse than its other settings."""

from dataclasses import replace

import pytest

from lengthwise.cost import logits_at_once, named_hardware, named_shape
from lengthwise.cost.shard_choice import Shard
from lengthwise.report.answer import answer_notes
from lengthwise.simulator import Found, Question, RankMesh, WayRow, answer, on_one_mesh
from lengthwise.simulator.answer import compare_layouts
from lengthwise.simulator.rivals import ONE_RING, PACKED, PADDED, LockStep
from lengthwise.simulator.ways import BY_WORK, LAYOUTS, OURS
from tiers import more

SHAPE, H100 = named_shape("qwen3-8b"), named_hardware("h100")
BATCHES = [[30_000, *[2000] * 12, 700], [20_000, *[4000] * 6]]
FEW = Question(shape=SHAPE, hardware=H100, devices=4)
NODE = Question(shape=SHAPE, hardware=H100, devices=8)


def run(
    tokens: list[int], question: Question, layout: Shard, held: int, kind: str, how: LockStep | None = None
) -> Found:
    """Run one batch with FSDP2, or without `how` with Lengthwise."""
    mesh = RankMesh(layout=layout, held=((kind, held),), heads="auto", lock_step=how)
    found = on_one_mesh(mesh, "FSDP2" if how else "lengthwise", [tokens], question).any_mesh
    assert found is not None
    return found


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
    heaviest, held = BATCHES[0], FEW.held("zero3")["layer"]
    others = [
        (PADDED, held, LockStep(size=1)),
        (PACKED, held, LockStep()),
        (PACKED, max(heaviest), LockStep()),
        (ONE_RING, held, LockStep(degree=4)),
        (OURS, held, None),
    ]
    for name, room, how in others:
        other = run(heaviest, FEW, "zero3", room, "layer", how).result
        assert rows[name].step_seconds[0] <= other.mean_seconds * (1 + 1e-9)


@pytest.mark.parametrize("layout", [more("zero1"), "zero3"])
def test_settings_of_ours_that_are_not_tried_are_no_better(layout) -> None:
    """Short sequences, of which a wave without recomputation holds few: many gathers."""
    batch = [500] * 400
    row = compare_layouts([batch], NODE)[LAYOUTS.index(layout)]
    capacities = NODE.held(layout)
    seconds = {kind: run(batch, NODE, layout, held, kind).result.mean_seconds for kind, held in capacities.items()}
    assert len(seconds) > 1
    assert row.step_seconds[0] <= 1.005 * min(seconds.values())


def test_sharded_ranks_of_ours_wait_for_gathers_too() -> None:
    """On links a thousand times slower a step of zero3 takes longer than its computation by far."""
    slow = replace(H100, node_link_bytes_per_second=H100.node_link_bytes_per_second / 1000)
    quick, waiting = (
        run([8000] * 8, replace(NODE, hardware=each), "zero3", 32_768, "layer").result for each in (H100, slow)
    )
    assert waiting.mean_seconds > 10 * quick.mean_seconds


def test_our_row_is_the_layout_that_runs_take_which_is_the_fastest() -> None:
    """Two nodes have three layouts. On one node a hybrid would be zero3."""
    found = answer([[30_000, *[2000] * 16]], Question(shape=SHAPE, hardware=H100, devices=16, kinds=("layer",)))
    assert [row.settings.layout for row in found.layouts if row.settings] == list(LAYOUTS)
    assert found.ours.mean_seconds == min(row.mean_seconds for row in found.layouts)
    assert found.ours.settings is not None
    assert found.ours.settings.layout == found.auto == "zero3"  # zero1 fits, too, and takes longer
    assert any("zero1 " in note and "`shard: auto` takes zero3" in note for note in answer_notes(found))


def test_a_hybrid_recomputes_more_before_it_offloads() -> None:
    """It takes the kind of zero3, in whose waves it gathers, unless that holds the sequences with offload alone."""
    question = Question(shape=SHAPE, hardware=H100, devices=16)
    least, most = (question.held(layout)["none"] for layout in ("hybrid", "zero3"))
    assert least < most
    _, zero3, hybrid = compare_layouts([[8 * (least + most)]], question)
    assert (zero3.settings.recompute, zero3.settings.offloads) == ("none", False)
    assert hybrid.settings.recompute != "none"
    assert not hybrid.settings.offloads


@pytest.mark.parametrize(
    ("model", "attends"), [("granite-4.0-h-1b", False), ("lfm2-350m", False), ("qwen3-0.6b", True)]
)
def test_an_answer_knows_whether_layers_do_anything_but_attend(model: str, attends: bool) -> None:
    question = Question(shape=named_shape(model), hardware=H100, devices=2, kinds=("layer",))
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
    memory = NODE.memory(RankMesh(layout="zero3"))
    on_gpus, on_cpus = (logits_at_once(SHAPE.vocab, on_gpus=each) for each in (True, False))
    assert memory.logits_at_once == on_gpus > on_cpus


def test_answer_says_what_a_gpu_holds_where_a_sequence_is_too_long() -> None:
    found = answer([[200_000, 500]], NODE)
    refusals = {row.name: row.refusal for row in found.rows}
    held = max(NODE.held("zero3").values())
    assert refusals[PADDED] == refusals[PACKED] == f"longest sequence 200,000, a GPU holds {held:,}"
    assert refusals[ONE_RING] == refusals[OURS] == ""


def test_answer_of_a_model_that_fits_nowhere() -> None:
    found = answer([[100]], Question(shape=named_shape("llama-70b"), hardware=H100, devices=2))
    assert found.best_other is None
    assert all("no room beside" in row.refusal for row in found.rows)


def test_an_optimizer_on_the_host_makes_room_in_all_ways_and_takes_time() -> None:
    large = Question(shape=named_shape("qwen3-32b"), hardware=H100, devices=8)
    assert not large.held("zero3")
    assert replace(large, offloads=True).held("zero3")
    on_gpus = Question(shape=SHAPE, hardware=H100, devices=8)
    on_host = replace(on_gpus, offloads=True)
    seconds = 40 * SHAPE.total_params / 8 / (300e9 / 8)  # 40 bytes a parameter, at a device's share of host memory
    for layout, how in (("zero3", LockStep(degree=4)), ("zero1", None), ("zero3", None)):
        ran = [run(BATCHES[0], each, layout, 8192, "layer", how).result.steps[0] for each in (on_gpus, on_host)]
        assert ran[1].step_seconds - ran[0].step_seconds == pytest.approx(seconds)
        assert ran[1].memory_bytes < ran[0].memory_bytes
