"""Tables of `benchmarks/bytescale_evaluation.py`: every figure follows from the rows, by hand."""

import argparse
import json
from dataclasses import asdict, replace

import pytest

import bytescale_evaluation as evaluation
from bytescale_report import ABLATION, SHOWN, Key, Row, report

ROW = Row(
    "llama-7b",
    "byted",
    "2M",
    "ring",
    "static",
    seconds=[80.0, 120.0],
    bound_seconds=[20.0, 30.0],
    loads_seconds=[{"local": 90.0, "remote": 0.1}, {"local": 100.0, "remote": 0.1}],
)


def _row(key: Key, seconds: float) -> Row:
    changed = {name: getattr(key, name) for name in Key._fields}
    return replace(ROW, **changed, seconds=[seconds, seconds])


def _asked(**changes: str) -> list[Key]:
    named = {"models": "llama-7b", "recipes": "github,byted", "contexts": "256K,2M", "choices": "ring,heads,offload"}
    planners = ",".join(evaluation.PLANNERS)
    return list(evaluation.asked_rows(argparse.Namespace(**named, planners=planners, **changes)))


def test_rows_survive_the_file() -> None:
    assert Row.from_json(json.loads(json.dumps(asdict(ROW)))) == ROW


def test_figures_of_a_row() -> None:
    assert ROW.mean_seconds == 100
    # The first step waits 90 s of loading behind 120 s of work: nothing; the second 100 s behind 80 s.
    assert ROW.loaded_seconds("local") == pytest.approx(100 + 10)
    assert ROW.loaded_seconds("remote") == 100


def test_every_published_planner_is_asked_at_2m_and_the_ablation_once() -> None:
    keys = _asked()
    assert len(keys) == len(set(keys))
    assert sum(key.context == "2M" and key.choice == "ring" for key in keys) == 12
    assert {key.recipe for key in keys if key.choice == "offload"} == {"byted"}
    assert {key.planner for key in keys if key.context == "256K"} == {
        "static",
        "bytescale",
        "lengthwise",
        "power-of-two",
    }


def test_batches_are_dealt_from_one_draw() -> None:
    batches = evaluation.cut_batches("byted", 2, 2**21)
    assert len(batches) == 2
    assert all(sum(batch) == pytest.approx(evaluation.BATCH_TOKENS, rel=0.07) for batch in batches)


def test_report_marks_hits_misses_and_what_was_not_run() -> None:
    seconds = {"static": 80.0, "single-degree": 60.0, "bytescale-naive": 40.0, "bytescale": 10.0, "lengthwise": 5.0}
    keys = [
        Key(m, r, "2M", c, p)
        for m in ("llama-7b", "llama-13b")
        for r in ("github", "byted")
        for c in SHOWN
        for p in seconds
    ]
    keys += [Key("llama-7b", "byted", "2M", "offload", p) for p in seconds]
    ideal = {("llama-7b", "github", "2M"): 4.5, ("llama-13b", "byted", "2M"): 4.0}
    text = "\n".join(report([_row(key, seconds[key.planner]) for key in keys], ideal))
    assert "| llama-7b | 7.89x | 8.00x | yes |" in text
    assert "| llama-13b | 6.88x | 8.00x | yes |" in text
    assert "| llama-70b | 4.28x | - | - |" in text
    assert "the most here: ring 8.00x" in text
    assert "| byted | **mean** | **2.00x** | **2.00x** | **2.00x** | **12.00x** |" in text
    assert all(name in text for name, *_ in ABLATION)
    # Static loads 100 s behind 80 s: with its loader it takes 95 s; the remote one is never waited for.
    assert "| + remote loader | 3.89x | 10.00 s | 8.00x | 9.50x |" in text
    assert "| llama-7b | github | 2M | 2 | 80.00 / 80.00 / 80.00 |" in text
    assert "| llama-7b | github | 2M | 0.056 | 0.450 | 0.900 | 0.900 |" in text
    slow = report([replace(_row(keys[0], 3000.0), planner="lengthwise")], {("llama-7b", "github", "2M"): 4.5})
    assert "| llama-7b | github | 2M | - | - | 0.002 | - |" in slow
