"""Forecasts of `lengthwise simulate` against step times that others published: how true its seconds are.

    python benchmarks/forecasts.py --out docs/benchmarks/forecasts.md

Every run below is a public one, with its source. None of them set a constant of `cost/hardware.json`: attention's
speeds are of the kernels' own benchmarks, the efficiency of all else is of another report. Seconds are those of the
rows that `simulate` prints (`simulator.rivals`); memory is by the same formula. No GPU, a few seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from lengthwise.cost import named_hardware, named_shape
from lengthwise.report.figures import percent
from lengthwise.simulator import RankMesh, Scenario, best_mesh
from lengthwise.simulator.rivals import LockStep
from pages import Findings, parse_options

PR = "[trl#6845](https://github.com/huggingface/trl/pull/6845)"
CUDNN = "[transformers#48324](https://github.com/huggingface/transformers/pull/48324)"
TITAN_PAGE = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
TITAN = f"[torchtitan, Dec 2024]({TITAN_PAGE})"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published run: microbatches of one step, each of so many sequences of so many tokens, and what it took."""

    what: str
    source: str
    model: str
    tokens: int
    gpus: int
    seconds: float
    degree: int
    sequences: int = 1
    microbatches: int = 1
    kernel: str = "cudnn"
    recompute: str = "layer"
    gigabytes: float | None = None

    @property
    def long(self) -> bool:
        """Whether it is one of the rings of TRL."""
        return self.degree > 1


M = 1 << 20
QWEN = "Qwen/Qwen3-"
RUNS = [
    Run(what="ring of 8", source=PR, model=QWEN + "0.6B", tokens=M, gpus=8, degree=8, seconds=137, gigabytes=27.9),
    Run(what="ring of 8", source=PR, model=QWEN + "8B", tokens=M, gpus=8, degree=8, seconds=364, gigabytes=56.2),
    Run(what="ring of 8", source=PR, model=QWEN + "30B-A3B", tokens=M, gpus=8, degree=8, seconds=483, gigabytes=46),
    Run(what="ring of 8", source=PR, model=QWEN + "32B", tokens=M, gpus=8, degree=8, seconds=1295, gigabytes=60.8),
    Run(what="ring of 8", source=PR, model=QWEN + "0.6B", tokens=4 * M, gpus=8, degree=8, seconds=2135, gigabytes=73.7),
    Run(what="ring of 16, 2 nodes", source=PR, model=QWEN + "8B", tokens=2 * M, gpus=16, degree=16, seconds=696),
    Run(what="ring of 32, 4 nodes", source=PR, model=QWEN + "8B", tokens=4 * M, gpus=32, degree=32, seconds=1346),
    Run(
        what="ring of 8, flash2", source=CUDNN, model=QWEN + "8B", tokens=M, gpus=8, degree=8, seconds=606,
        kernel="flash2",
    ),
    *(
        Run(
            what=f"FSDP{compiled}, selective checkpointing, priced as {kind}", source=TITAN, gpus=8, degree=1,
            model="meta-llama/Llama-3.1-8B", tokens=8192, sequences=2, microbatches=8, seconds=16 * 8192 / (8 * speed),
            kernel="flash2", recompute=kind,
        )
        for compiled, speed in (("", 5762), (" and torch.compile", 6667))
        for kind in ("none", "layer")
    ),
]  # fmt: skip


def forecast(run: Run) -> tuple[float, float]:
    """Return the seconds of a step and the peak bytes of a GPU."""
    hardware = named_hardware("h100").with_kernel(run.kernel)
    how = LockStep(size=run.sequences, degree=run.degree)
    mesh = RankMesh(layout="zero3", held=((run.recompute, run.tokens * run.sequences),), lock_step=how)
    batch = [run.tokens] * (run.sequences * run.microbatches)
    scenario = Scenario(shape=named_shape(run.model), hardware=hardware, devices=run.gpus, only=mesh)
    found = best_mesh("FSDP2", [batch], scenario).found
    assert found is not None, "nothing is refused that is not asked to fit"
    return found.mean_seconds, found.most("memory_bytes")


def main() -> None:
    """Print the table, and write it into its page."""
    options = parse_options(__doc__)
    found = Findings("forecasts")
    found.add(lines())
    errors = [abs(forecast(run)[0] / run.seconds - 1) for run in RUNS if run.long]
    mean = percent(sum(errors) / len(errors))
    about = f"rings of TRL: {len(errors)} runs, mean error {mean}, largest {percent(max(errors))}"
    found.sign("Simulated", about, options.out)


def lines() -> list[str]:
    """Write one line a run."""
    rows = ["| run | model | tokens | GPUs | published | forecast | error | memory: published, formula | source |"]
    rows.append("|---|---|---|---|---|---|---|---|---|")
    for run in RUNS:
        seconds, peak = forecast(run)
        held = f"{run.gigabytes:.1f}, {peak / 1e9:.1f} GB" if run.gigabytes else "-"
        rows.append(
            f"| {run.what} | {run.model.rpartition('/')[2]} | {run.tokens:,} | {run.gpus} | {run.seconds:.4g} s | "
            f"{seconds:.4g} s | {100 * (seconds / run.seconds - 1):+.1f} % | {held} | {run.source} |"
        )
    return rows


if __name__ == "__main__":
    main()
