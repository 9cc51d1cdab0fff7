"""A comparison in words: one sentence of at most 200 characters, and a table of 80 columns."""

from dataclasses import replace

import pytest

from lengthwise.core.errors import PlanError
from lengthwise.cost import named_hardware, named_shape
from lengthwise.report.simulation import answer_sentence, answer_table, settings_text, tokens_text
from lengthwise.simulator import OURS, Best, Comparison, Found, RankMesh, Scenario, best_mesh
from lengthwise.simulator.rivals import ONE_RING, PACKED, PADDED, LockStep

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
        (31.0, 30.5, "equal"),
        (40.0, 30.5, "takes 40.0 s (FSDP2, packed): 1.31x as long"),
        (30.0, 40.0, "no gain, Lengthwise takes 1.33x as long"),
        (None, 30.5, "FSDP2 cannot hold"),
        (30.0, None, "Lengthwise cannot hold"),
        (None, None, "no method here can hold"),
    ],
)
def test_sentence_says_what_is_gained(found, other: float | None, ours: float | None, said: str) -> None:
    sentence = answer_sentence(_compared(found, other, ours))
    assert said in sentence
    assert len(sentence) <= 200
    if other and ours:
        wide = answer_sentence(replace(_compared(found, other, ours), kernels={"flash3": 1.02}))
        assert ("to 1.31x as long, by the attention kernel" in wide) == (other == 40.0)
        assert len(wide) <= 200
    large = replace(SCENARIO, hardware=named_hardware("bytescale-gpu"), devices=12_288)
    large = replace(_compared(found, 35_000, 34_000), scenario=large, batches=[[1 << 20] * 384])
    assert len(answer_sentence(large)) <= 200


def test_table_fits_80_columns(found) -> None:
    lines = answer_table(_compared(found, 35.0, 31.0)).splitlines()
    assert "a GPU holds 101,376" in lines[1]
    assert "1.13x  71 GB" in lines[2]
    assert max(map(len, lines)) <= 80


def test_offload_without_which_nothing_fits_is_in_the_sentence_and_the_row(found) -> None:
    offloading = _run(found, OURS, 30.0, "all_but_attention", 8192, 0.5, layout="zero3")
    compared = replace(_compared(found, 40.0, 30.0), layouts=(offloading,) * 2, auto=None)
    assert "30.0 s with Lengthwise and `offload`; " in answer_sentence(compared)
    assert settings_text(offloading.found).endswith("offload")


def test_a_mix_of_kinds_says_which_and_in_how_many_layers(found) -> None:
    mixed = [_run(found, OURS, 30.0, kind, 8192, layout="zero3") for kind in ("elementwise+6/36", "none+34/36")]
    said = ["zero3, recompute norms, MLP in 6", "zero3, recompute norms in 34"]
    assert [settings_text(each.found) for each in mixed] == said
    table = answer_table(replace(_compared(found, 40.0, 30.0), layouts=(mixed[0],) * 2))
    assert max(map(len, table.splitlines())) <= 80


def test_tokens_are_written_as_users_give_them() -> None:
    sizes = {1 << 20: "1M", (1 << 20) + 9000: "1M", 65_536: "64K", 8 << 20: "8M", 500: "500"}
    assert [tokens_text(size) for size in sizes] == [*sizes.values()]
