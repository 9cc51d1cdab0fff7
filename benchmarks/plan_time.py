"""Plan seconds of this checkout and of another one, batch by batch in turn: is planning faster than it was?

    python benchmarks/plan_time.py --against CHECKOUT [--rows long-256,waves] [--seeds 2] [--repeats 3]

Each checkout plans in a process of its own, with its own package and its own rows of `planners.py` (and `waves`). The
parent asks one and then the other for the same batch, one at a time, so both meet the same machine. Times are process
seconds of one core for a whole `plan_step`: the median over repeats, summed over seeds. The last line is the sum over
all rows. `--seeds 2 --repeats 3` takes four minutes.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

OWN = Path(__file__).resolve().parents[1]
WAVES = "waves"


def cases() -> Iterator[tuple[str, str, Callable[[int], Callable[[], Any]]]]:
    """Yield (name, title, from a seed to what plans its batch) of each row of the checkout that is imported."""
    import planners
    from batches import tokens_batch

    def in_waves(seed: int, source: str, cluster: Any, tokens_a_rank: int, cost: Any) -> Callable[[], Any]:
        tokens = tokens_batch(source, tokens_a_rank * cluster.ranks, seed, cluster)
        plan_step: Any = planners.plan_step
        if "mode" in inspect.signature(plan_step).parameters:  # before there was a record of options
            return partial(plan_step, tokens, cluster, cost, mode=WAVES)
        planner: Any = sys.modules["lengthwise.planner"]
        return partial(plan_step, tokens, cluster, cost, planner.PlanOptions(mode=WAVES))

    def of_row(seed: int, row: Any) -> Callable[[], Any]:
        return partial(planners.plan_step, row.batch(seed), row.cluster, row.cost)

    for row in planners.rows():
        yield row.name, row.title, partial(of_row, row=row)
    usual, few = planners.WAVE_TOKENS, planners.WAVE_TOKENS // 4
    costs = planners.COMPUTE, planners.TERMS
    for (ranks, tokens), source, cost in product(
        ((8, usual), (64, usual), (1024, usual), (1024, few)), ("github", "prolong"), costs
    ):
        title = f"`{WAVES}` {source}: {ranks:,} ranks, {tokens // 1024}K tokens each, {cost.version}"
        cluster = planners.Cluster(ranks=ranks, capacity_tokens=16384)
        yield WAVES, title, partial(in_waves, source=source, cluster=cluster, tokens_a_rank=tokens, cost=cost)


def serve(checkout: Path) -> None:
    """Answer on standard output, a line each: (name, title) of all, then seconds for each (case, seed) asked for."""
    sys.path[:0] = [str(checkout / "src"), str(checkout / "benchmarks")]
    import lengthwise

    assert str(lengthwise.__file__).startswith(str(checkout)), f"{lengthwise.__file__} is not of {checkout}"
    known = list(cases())
    print(json.dumps([(name, title) for name, title, _ in known]), flush=True)
    made: dict[tuple[int, int], Callable[[], Any]] = {}
    for line in sys.stdin:
        case, seed = json.loads(line)
        if (case, seed) not in made:
            made = {(case, seed): known[case][2](seed)}
        start = time.process_time()
        made[case, seed]()
        print(time.process_time() - start, flush=True)


class Checkout:
    """A checkout that plans in a process of its own."""

    def __init__(self, root: Path) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", str(root.resolve())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.cases: list[tuple[str, str]] = [tuple(case) for case in self._answer()]

    def seconds(self, case: int, seed: int) -> float:
        """Plan one batch."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([case, seed]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a checkout's process ended, see above")
        return json.loads(line)


def compare(own: Checkout, other: Checkout, names: list[str], seeds: int, repeats: int) -> Iterator[str]:
    """Yield the lines of the table: plan milliseconds of a batch, mean over seeds."""
    yield "| case | ours ms | other ms | ratio |"
    yield "|---|---|---|---|"
    sums = [0.0, 0.0]
    for case, (name, title) in enumerate(own.cases):
        if name not in names:
            continue
        found = [0.0, 0.0]
        for seed in range(seeds):
            took = [[each.seconds(case, seed) for each in (own, other)] for _ in range(repeats)]
            for side in range(2):
                found[side] += statistics.median(pair[side] for pair in took) / seeds
        sums = [total + seconds for total, seconds in zip(sums, found, strict=True)]
        yield f"| {title} | {1e3 * found[0]:.0f} | {1e3 * found[1]:.0f} | {found[0] / found[1]:.2f} |"
    yield f"| all | {1e3 * sums[0]:.0f} | {1e3 * sums[1]:.0f} | {sums[0] / sums[1]:.3f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="the other checkout")
    parser.add_argument("--rows", help="names of rows (default: all)")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    if arguments.against is None:
        parser.error("give --against, the other checkout")
    own, other = Checkout(OWN), Checkout(arguments.against)
    if own.cases != other.cases:
        raise SystemExit(f"rows differ: {sorted(set(own.cases) ^ set(other.cases))}")
    names = arguments.rows.split(",") if arguments.rows else [name for name, _ in own.cases]
    if unknown := set(names) - {name for name, _ in own.cases}:
        parser.error(f"no rows {', '.join(sorted(unknown))}")
    for line in compare(own, other, names, arguments.seeds, arguments.repeats):
        print(line, flush=True)


if __name__ == "__main__":
    main()
