"""A comparison in words: one sentence of at most 200 characters, and a table of 80 columns."""

from dataclasses import replace

import pytest

from lengthwise.core.errors import PlanError
from lengthwise.cost import named_hardware, named_shape
from lengthwise.report.simulation import answer_notes, answer_sentence, answer_table, settings_text, tokens_text
from lengthwise.simulator import OURS, Best, Comparison, Found, RankMesh, Scenario, best_mesh
from lengthwise.simulator.rivals import BY_WORK, ONE_RING, PACKED, PADDED, LockStep

SCENARIO = Scenario(shape=named_shape("llama-7b"), hardware=named_hardware("h100"), devices=8)
LONG = PlanError("sequences", expected="", got="longest sequence 1,048,576, a GPU holds 101,376", remedy="")


@pytest.fixture(scope="module")
def found() -> Found:
    """One step that was simulated, whose settings and seconds the tests replace."""
    simulated = best_mesh("lengthwise", [[1000]], replace(SCENARIO, only=RankMesh())).found
    assert simulated is not None
    return simulated


def _run(found: Found, name: str, seconds: float, kind: str, tokens: int, offload: float = 0, **mesh) -> Best:
    """Let a way to train take these seconds in both batches."""
    (step,) = found.steps
    step = replace(step, step_seconds=seconds, recompute=kind, memory_bytes=71e9, most_offload=offload)
    setting = replace(found.setting, mesh=RankMesh(**mesh), capacities={kind: tokens})
    return Best(planner=name, found=replace(found, planner=name, setting=setting, steps=(step, step)))


def _compared(found: Found, other: float | None, ours: float | None) -> Comparison:
    padded, packed, ring, row = (Best(planner=name, refusal=LONG) for name in (PADDED, PACKED, ONE_RING, OURS))
    if other is not None:
        packed = _run(found, PACKED, other, "layer", 100_000, lock_step=LockStep(size=16, by_length=True))
        ring = _run(found, ONE_RING, 2 * other, "layer", 8192, lock_step=LockStep(degree=1024))
    if ours is not None:
        row = _run(found, OURS, ours, "all_but_attention", 8192, layout="zero3")
    rivals, batches = (padded, packed, ring), [[1 << 17] * 8] * 2
    return Comparison(scenario=SCENARIO, batches=batches, rivals=rivals, layouts=(row, row), auto="zero3")


@pytest.mark.parametrize(
    ("other", "ours", "said"),
    [
        (31.0, 30.5, "takes 31.0 s (FSDP2, packed): equal within the model's 5 %."),
        (
            40.0,
            30.5,
            "30.5 s with Lengthwise; the best otherwise takes 40.0 s (FSDP2, packed): 1.31x as long.",
        ),
        (30.0, 40.0, "no gain, Lengthwise takes 1.33x as long."),
        (None, 30.5, "30.5 s with Lengthwise; FSDP2 cannot hold these sequences here."),
        (30.0, None, "Lengthwise cannot hold these sequences; FSDP2, packed takes 30.0 s."),
        (None, None, "no method here can hold these sequences; the table gives the reasons."),
    ],
)
def test_sentence_says_what_is_gained(found, other: float | None, ours: float | None, said: str) -> None:
    sentence = answer_sentence(_compared(found, other, ours))
    assert sentence.startswith("8 x h100, 1M tokens a step, longest sequence 128K: ")
    assert sentence.endswith(said)
    assert len(sentence) <= 200
    large = replace(SCENARIO, hardware=named_hardware("bytescale-gpu"), devices=12_288)
    large = replace(_compared(found, 35_000, 34_000), scenario=large, batches=[[1 << 20] * 384])
    assert len(answer_sentence(large)) <= 200


def test_table_fits_80_columns_and_says_why_a_way_does_not_fit(found) -> None:
    heads, *rows = answer_table(_compared(found, 35.0, 31.0)).splitlines()
    assert heads.split() == ["step", "ratio", "memory", "settings"]
    assert rows[0] == "FSDP2, padded        does not fit: longest 1,048,576, a GPU holds 101,376"
    assert rows[1].endswith(" 1.13x  71 GB  16 a GPU, by length, recompute all")
    assert rows[2].endswith("rings of 1024, recompute all")
    assert rows[3].endswith("zero3, recompute MLP")
    assert max(map(len, (heads, *rows))) <= 80
    packed = _run(found, PACKED, 1.0, "none", 33_436, lock_step=LockStep()).found
    assert settings_text(packed) == "packs of 33.4K"


def test_packs_sorted_by_work_count_among_the_best_and_are_said_to_need_a_sampler(found) -> None:
    compared = _compared(found, 40.0, 30.0)
    assert not any("sampler" in note for note in answer_notes(compared))
    by_work = _run(found, BY_WORK, 33.0, "none", 8192, lock_step=LockStep(by_work=True))
    compared = replace(compared, rivals=(*compared.rivals, by_work))
    assert "takes 33.0 s (FSDP2, own sampler): 1.10x as long" in answer_sentence(compared)
    assert "no trainer does that by itself" in answer_notes(compared)[1]


def test_a_ring_of_layers_with_states_is_said_to_be_no_trainers(found) -> None:
    compared = _compared(found, 40.0, 30.0)
    assert not any("states" in note for note in answer_notes(compared)), "layers that all attend can be cut"
    compared = replace(compared, scenario=replace(SCENARIO, shape=named_shape("granite-4.0-h-1b")))
    (note,) = (note for note in answer_notes(compared) if "states" in note)
    assert note.startswith(f"{ONE_RING}: priced as if a ring could cut layers with states")
    assert "no trainer on FSDP2 does that" in note
    without = replace(compared, rivals=())
    assert not any("states" in note for note in answer_notes(without)), "no row is a ring"


def test_offload_without_which_nothing_fits_is_in_the_sentence_and_the_row(found) -> None:
    offloading = _run(found, OURS, 30.0, "all_but_attention", 8192, 0.5, layout="zero3")
    compared = replace(_compared(found, 40.0, 30.0), layouts=(offloading,) * 2, auto=None)
    assert "30.0 s with Lengthwise and `offload`; " in answer_sentence(compared)
    assert settings_text(offloading.found) == "zero3, recompute MLP, offload"
    assert "`shard: auto` finds room for none without offload" in answer_notes(compared)[1]


def test_tokens_are_written_as_users_give_them() -> None:
    sizes = {1 << 20: "1M", (1 << 20) + 9000: "1M", 65_536: "64K", 8 << 20: "8M", 500: "500"}
    assert [tokens_text(size) for size in sizes] == [*sizes.values()]
