"""The overhead's protocol: what a run's ratio is, that all runs count, and that a busy machine is refused or said."""

import os
from pathlib import Path

import pytest

import overhead


def _run(**seconds: list[float]) -> overhead.Run:
    loops = {name.replace("_", " "): each for name, each in seconds.items()}
    return overhead.Run(seconds=loops, parameters=1, tokens=1, loads=(0.0, 1.0), others_cores=0.0)


def test_overhead_ratio_is_the_median_of_pairs() -> None:
    assert _run(one_by_one=[1.0, 2.0, 4.0], lengthwise=[1.5, 2.2, 4.0]).ratio == pytest.approx(1.1)
    assert _run(one_by_one=[1.0, 2.0, 4.0], lengthwise=[2.0, 2.0, 4.0]).ratio == pytest.approx(1.0)


def test_overhead_counts_every_run() -> None:
    lines = list(overhead.table(iter([_run(one_by_one=[1.0], lengthwise=[r]) for r in (1.0, 1.01, 1.06)])))
    assert sum(line.startswith("| tiny") for line in lines) == 3
    assert "All 3 runs: mean 1.023 (aim 1.02: **missed**), median 1.010, 1.000 to 1.060; in 0" in lines[-1]
    assert "mean 1.020 (aim 1.02: met)" in overhead.verdict([1.0, 1.04], 0)


def test_overhead_loops_take_turns_and_the_first_round_warms_up() -> None:
    ran: list[str] = []
    seconds = overhead.interleaved_seconds({"a": lambda: ran.append("a"), "b": lambda: ran.append("b")}, 3)
    assert ran == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert {name: len(each) for name, each in seconds.items()} == {"a": 3, "b": 3}


def test_overhead_refuses_a_busy_machine(monkeypatch) -> None:
    loads = iter([1.3, 1.2, 1.2, 1.0])
    monkeypatch.setattr(os, "getloadavg", lambda: (next(loads), 0.0, 0.0))
    with pytest.raises(SystemExit, match=r"at most 1; got 1\.30"):
        overhead.wait_for_quiet(seconds=-1)
    overhead.wait_for_quiet(seconds=60, pause_seconds=0)
    assert next(loads, None) is None


def test_overhead_counts_busy_cores_without_idle_and_waiting(tmp_path: Path) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    stat = tmp_path / "stat"
    stat.write_text(f"cpu  {ticks} 0 {ticks} {50 * ticks} {7 * ticks} 0 {ticks} 0 0 0\ncpu0 1 2 3\n")
    assert overhead.busy_seconds(stat) == pytest.approx(3.0)
