"""What planning a step ahead takes from the thread that trains: in a thread all of its own time, in a process little.

    python benchmarks/plan_ahead.py [--repeats 7]

The training thread of a GPU launches kernels: many short calls into torch, each of which gives Python's lock away and
takes it again. Here it adds to 8 numbers, over and over, for longer than a plan takes; beside it one plan of each row
of `planners.py` is made by nobody, by a thread, and by the process that training uses, in turn. The figure is how
much later the additions end than alone, in milliseconds (median). Needs two free cores.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import planners
from lengthwise.planner import PlanOptions, plan_step
from lengthwise.steps.planner_process import PlannerProcess
from lengthwise.steps.step_planning import StepPlanning
from pages import Findings, add_out

_ROWS = ("long-1024-terms", "huge-12288")
_LONGER = 2.0  # times that the additions take, of the time of a plan


def additions_seconds(count: int) -> float:
    """Time `count` additions of 8 numbers in place."""
    numbers = torch.ones(8)
    start = time.perf_counter()
    for _ in range(count):
        numbers.add_(1)
    return time.perf_counter() - start


def beside(work: Callable[[], Any], count: int) -> tuple[float, float]:
    """Time `count` additions while another thread runs `work`, and how long that took."""
    took = list[float]()

    def timed() -> None:
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)

    thread = threading.Thread(target=timed)
    thread.start()
    seconds = additions_seconds(count)
    thread.join()
    return seconds, took[0]


def measure(row: planners.Row, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Return, for each planner, the additions' seconds with it and the plan's."""
    tokens = row.batch(0)
    options = {"tokens": tokens, "cluster": row.cluster, "cost": row.cost}
    capacities = {"none": row.cluster.capacity_tokens}
    planning = StepPlanning(ranks=row.cluster.ranks, cost=row.cost, capacities=capacities, options=PlanOptions())
    with PlannerProcess() as process:
        works: dict[str, Callable[[], Any]] = {
            "nobody": lambda: None,
            "a thread": lambda: plan_step(**options).to_json(),
            "a process": lambda: process.plan(planning, tokens),
        }
        for work in works.values():
            work()
        start = time.perf_counter()
        works["a thread"]()
        plan_seconds = time.perf_counter() - start
        count = int(_LONGER * plan_seconds / additions_seconds(10_000) * 10_000)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
        for _ in range(repeats):
            for name, work in works.items():
                found[name].append(beside(work, count))
    return found


def main() -> None:
    """Print the table, and write it into a page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    add_out(parser, "plan_ahead")
    arguments, findings = parser.parse_args(), Findings("plan_ahead")
    torch.set_num_threads(1)
    titles = "| step | planned by | plan, ms | training thread later by, ms | of the plan's time |"
    findings.add([titles, "|---|---|---|---|---|"])
    for name in _ROWS:
        row = [row for row in planners.rows() if row.name == name][-1]
        found = measure(row, arguments.repeats)
        alone = median(seconds for seconds, _ in found["nobody"])
        for planner in ("a thread", "a process"):
            plan_ms = 1e3 * median(plan for _, plan in found[planner])
            later_ms = 1e3 * (median(seconds for seconds, _ in found[planner]) - alone)
            cells = f"{plan_ms:.0f} | {later_ms:.0f} | {later_ms / plan_ms:.2f}"
            findings.add([f"| {row.title} | {planner} | {cells} |"])
    findings.sign("Measured", f"torch {torch.__version__}, medians of {arguments.repeats}")
    findings.write(arguments.out)


if __name__ == "__main__":
    main()
