"""The answer of a simulation in words: one sentence of at most 200 characters, and a table of 80 columns."""

from dataclasses import replace

import pytest

from lengthwise.report.answer import answer_notes, answer_sentence, answer_table, settings_text, tokens_text
from lengthwise.simulator import Answer, WayRow
from lengthwise.simulator.rivals import ONE_RING, PACKED, PADDED
from lengthwise.simulator.ways import BY_WORK, OURS, WaySettings

LONGEST = WaySettings(recompute="layer", capacity_tokens=100_000, size=16, by_length=True)
ZERO3 = WaySettings(recompute="all_but_attention", capacity_tokens=8192, layout="zero3")
RING = WaySettings(recompute="layer", capacity_tokens=8192, degree=1024)


def _answer(other: float | None, ours: float | None) -> Answer:
    def row(name: str, settings: WaySettings, seconds: float | None) -> WayRow:
        if seconds is None:
            return WayRow(name=name, refusal="longest sequence 1,048,576, a GPU holds 101,376")
        return WayRow(name=name, settings=settings, step_seconds=(seconds, seconds), memory_bytes=71e9)

    rows = (row(PADDED, LONGEST, None), row(PACKED, LONGEST, other), row(ONE_RING, RING, other and 2 * other))
    return Answer(
        rows=(*rows, row(OURS, ZERO3, ours)), devices=8, hardware="h100", kernel="", batch_tokens=1 << 20,
        longest=1 << 17, auto="zero3",
    )  # fmt: skip


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
def test_sentence_says_what_is_gained(other: float | None, ours: float | None, said: str) -> None:
    sentence = answer_sentence(_answer(other, ours))
    assert sentence.startswith("8 x h100, 1M tokens a step, longest sequence 128K: ")
    assert sentence.endswith(said)
    assert len(sentence) <= 200
    large = replace(_answer(35_000, 34_000), devices=12_288, hardware="bytescale-gpu", batch_tokens=384 << 20)
    assert len(answer_sentence(large)) <= 200


def test_table_fits_80_columns_and_says_why_a_way_does_not_fit() -> None:
    heads, *rows = answer_table(_answer(35.0, 31.0)).splitlines()
    assert heads.split() == ["step", "ratio", "memory", "settings"]
    assert rows[0] == "FSDP2, padded        does not fit: longest 1,048,576, a GPU holds 101,376"
    assert rows[1].endswith(" 1.13x  71 GB  16 a GPU, by length, recompute all")
    assert max(map(len, (heads, *rows))) <= 80


def test_settings_are_named_as_trainers_name_them() -> None:
    assert settings_text(ZERO3) == "zero3, recompute MLP"
    assert settings_text(RING) == "rings of 1024, recompute all"
    assert settings_text(WaySettings(recompute="none", capacity_tokens=33_436, degree=1)) == "packs of 33.4K"


def test_packs_sorted_by_work_count_among_the_best_and_are_said_to_need_a_sampler() -> None:
    found = _answer(40.0, 30.0)
    assert answer_notes(found) == ["Simulated, not measured."]
    *others, ours = found.rows
    by_work = replace(others[1], name=BY_WORK, step_seconds=(33.0, 33.0))
    found = replace(found, rows=(*others, by_work, ours))
    assert "takes 33.0 s (FSDP2, own sampler): 1.10x as long" in answer_sentence(found)
    assert "no trainer does that by itself" in answer_notes(found)[1]


def test_a_ring_of_layers_with_states_is_said_to_be_no_trainers() -> None:
    found = _answer(40.0, 30.0)
    assert not any("states" in note for note in answer_notes(found)), "layers that all attend can be cut"
    (note,) = (note for note in answer_notes(replace(found, only_attends=False)) if "states" in note)
    assert note.startswith(f"{ONE_RING}: priced as if a ring could cut layers with states")
    assert "no trainer on FSDP2 does that" in note
    without = replace(found, rows=found.rows[-1:], only_attends=False)
    assert not any("states" in note for note in answer_notes(without)), "no row is a ring"


def test_offload_without_which_nothing_fits_is_in_the_sentence_and_the_row() -> None:
    *others, ours = _answer(40.0, 30.0).rows
    with_offload = replace(ours, settings=replace(ZERO3, offloads=True))
    found = replace(_answer(40.0, 30.0), rows=(*others, with_offload), layouts=(with_offload,) * 2, auto="")
    assert "30.0 s with Lengthwise and `offload`; " in answer_sentence(found)
    assert settings_text(with_offload.settings) == "zero3, recompute MLP, offload"
    assert "`shard: auto` finds room for none without offload" in answer_notes(found)[1]


def test_tokens_are_written_as_users_give_them() -> None:
    sizes = {1 << 20: "1M", (1 << 20) + 9000: "1M", 65_536: "64K", 8 << 20: "8M", 500: "500"}
    assert [tokens_text(size) for size in sizes] == [*sizes.values()]
