"""`lengthwise verify`: compare planned steps with one process, on the user's model and data."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from lengthwise.cli.machine import memory_bytes
from lengthwise.cli.train import RunOptions, read_settings
from lengthwise.core.names import counted
from lengthwise.report.figures import count, seconds
from lengthwise.report.plans import degrees
from lengthwise.report.progress import LiveLine, PhaseLine
from lengthwise.run.rounding import FACTOR, SUMS_TOLERANCE

if TYPE_CHECKING:
    from lengthwise.core.plan import Plan
    from lengthwise.run.rounding import Rounding
    from lengthwise.run.verify import VerifyReport
    from lengthwise.run.verify_batch import VerifyBatch


_START_SECONDS = 10.0  # of processes that import torch and build the model, about


@dataclass(frozen=True, kw_only=True)
class Verify(RunOptions):
    """Compare the loss and every gradient of N processes with those of one process, on your model and data, in about a
    minute.

    The command runs a few sequences of the first global batch. It shortens long ones, sets a capacity at which packs
    and a ring occur, and prints these changes. The one process runs the plain Hugging Face model, one sequence at a
    time. Each difference is relative: the L2 norm of a tensor's difference over the tensor's norm, or over 1e-3 of the
    median tensor's norm if that is larger. The command exits with 1 if a difference is above 1e-12 in fp64 or 1e-5 in
    fp32. In bf16 it exits with 1 if a difference is above 2e-3 + twice the difference of plain bf16 from fp32, if the
    same plan in fp32 differs by more than 1e-5, or if the sums of gradients are not those of fp32.
    """

    full: tyro.conf.FlagCreatePairsOff[bool] = False
    """Run the whole first global batch unchanged; the command first prints how long this may take."""
    plan: Annotated[Path | None, tyro.conf.arg(metavar="PLAN.json", help_behavior_hint="")] = None
    """Like --full, with this plan file of any planner; its lengths must be those of the first batch."""

    def run(self) -> int:
        config = read_settings(self.config, self.set, self.ranks)

        from lengthwise.run.api import verify

        phases = PhaseLine(LiveLine(sys.stdout))
        try:
            found = verify(
                config,
                ranks=self.ranks,
                full=self.full,
                plan=self.plan,
                timeout_seconds=self.timeout_seconds,
                on_start=print_expectations,
                on_phase=phases.note,
            )
        finally:
            phases.close()
        if found is None:  # a torchrun rank other than 0
            return 0
        print("\n".join(verification_lines(found)))
        return 0 if found.passed else 1


def print_expectations(check: VerifyBatch) -> None:
    """Print what will be compared, the differences from the run, and a rough estimate of the time."""
    job, tokens = check.job, sum(check.plan.tokens)
    print(
        f"verify: {len(check.plan.tokens)} sequences, {count(tokens)} tokens, {job.config.precision}, "
        f"{counted(job.ranks, 'rank')} against one process"
    )
    if check.changes:
        print(f"for this check: {', '.join(check.changes)}; --full runs the first batch unchanged")
    if check.seconds < _START_SECONDS:
        print("expected: mostly the start of the ranks; the passes themselves are short")
    else:
        print(f"expected: about {seconds(check.seconds)}, a rough guess for {job.hardware}, and the start of ranks")
    memory = memory_bytes()
    if not job.gpus and memory is not None and check.num_bytes > memory:
        print(
            f"warning: this machine has {count(memory)}B of memory, and this may need {count(check.num_bytes)}B. If a "
            "rank is killed, try fewer --ranks, fewer layers, or --set precision=fp32."
        )
    sys.stdout.flush()


def verification_lines(found: VerifyReport) -> list[str]:
    """Return the lines of a report: what was compared, and the differences."""
    rounding = found.rounding
    rings = sum(1 for m in found.plan.microbatches for p in m.pieces if p.degree > 1)
    worst = sorted(found.gradients.items(), key=lambda item: -item[1] / found.allowed(item[0]))[:5]
    width = max(len(name) for name, _ in worst)
    router = []  # with a balance loss
    if found.reference_router_loss:
        router.append(
            f"router loss: {found.router_loss:.9f}, one process {found.reference_router_loss:.9f}, "
            f"difference {found.router_loss_difference:.2e}{_beside(rounding, rounding and rounding.router_loss)}"
        )
    return [
        *found.notes,
        f"plan: {counted(len(found.plan.microbatches), 'microbatch')}, {counted(rings, 'ring')}, "
        f"{count(found.plan.ring_tokens)} tokens in rings",
        _exercised(found.plan, found.shared_keys) + _images(found.images),
        *([] if found.uncut is None else [f"warning: no sequence was cut, so rings were not compared. {found.uncut}"]),
        f"loss: {found.loss:.9f}, one process {found.reference_loss:.9f}, difference {found.loss_difference:.2e}"
        f"{_beside(rounding, rounding and rounding.loss)}",
        *router,
        f"gradients: {len(found.gradients)} tensors; the largest differences:",
        *(
            f"  {name:<{width}}  {difference:.2e}{_beside(rounding, rounding and rounding.gradients[name])}"
            for name, difference in worst
        ),
        *_beside_rounding(found),
        f"{_tolerance(found)}: {_verdict(found.plan) if found.passed else 'FAIL'}",
    ]


def _beside_rounding(found: VerifyReport) -> list[str]:
    lines, exact = [], found.in_fp32
    if exact is not None:
        lines.append(
            f"the same plan in fp32: loss difference {exact.loss_difference:.2e}, largest gradient difference "
            f"{exact.worst_gradient:.2e}; {_tolerance(exact)}"
        )
    if found.sums:
        lines.append(
            f"sums of gradients: largest difference {max(found.sums.values()):.2e}; tolerance {SUMS_TOLERANCE:g}"
        )
    return lines


def _beside(rounding: Rounding | None, difference: float | None) -> str:
    return "" if rounding is None else f", plain {rounding.precision} {difference:.2e}"


def _tolerance(found: VerifyReport) -> str:
    if found.rounding is None:
        return f"tolerance {found.tolerance:g}"
    kernels, precision = " and ".join(found.rounding.kernels), found.rounding.precision
    tolerance = f"tolerance {FACTOR:g} x plain {precision} (attention {kernels}) + {found.tolerance:g}"
    return f"all against {found.rounding.exact}; {tolerance}"


def _verdict(plan: Plan) -> str:
    if any(degree > 1 for degree in degrees(plan)):
        return "PASS"
    return f"PASS (no ring: {'one rank' if plan.ranks == 1 else 'every sequence was on one rank'})"


def _images(images: tuple[int, int] | None) -> str:
    if images is None:
        return ""
    return f", {counted(images[0], 'image')}, {images[1]} of them in rings" if images[0] else ", no image"


def _exercised(plan: Plan, shared_keys: tuple[int, ...]) -> str:
    rings = ", ".join(str(degree) for degree in degrees(plan) if degree > 1)
    ratios = [microbatch.offload for microbatch in plan.microbatches if microbatch.offload]
    offload = f", offload of {min(ratios):.2g} to {max(ratios):.2g} of a microbatch" if ratios else ""
    if not rings:
        return f"exercised: packs on one rank{offload}, no ring"
    groups = sorted({piece.heads for m in plan.microbatches for piece in m.pieces} - {1})
    split = f", heads split in groups of {', '.join(map(str, groups))}" if groups else ", no heads split"
    if groups:
        several = f", key heads on several ranks in groups of {', '.join(map(str, shared_keys))}"
        split += several if shared_keys else ", each key head on one rank"
    return f"exercised: rings of {rings} ranks{split}{', packs on one rank' * (1 in degrees(plan))}{offload}"
