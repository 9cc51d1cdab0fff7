"""`train` and `verify` as functions, which the commands of these names call.

Both start one local process per rank, or use the ranks of torchrun if it started this process; every rank runs the same
function. They print nothing: a `Callback` reports.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from lengthwise.comm import World, world_from_environment
from lengthwise.config import RunConfig
from lengthwise.core.errors import ConfigError, PlanError
from lengthwise.core.files import read_plan_text
from lengthwise.core.names import counted
from lengthwise.core.packages import check_trackers
from lengthwise.core.plan import Plan
from lengthwise.core.sizes import read_whole
from lengthwise.planner.service.step_planning import StepPlanning
from lengthwise.program import check_plan
from lengthwise.run.callbacks import Callback, TrainResult
from lengthwise.run.checks import prepare_job
from lengthwise.run.folder import RunFolder
from lengthwise.run.job import Job
from lengthwise.run.launch import on_ranks
from lengthwise.run.main import train_rank
from lengthwise.run.prepared_run import Run, agree_on_data, join_with, read_start
from lengthwise.run.verify import VerifyReport, verify_rank
from lengthwise.run.verify_batch import VerifyBatch, part_of_batch, whole_batch

_MOST_RESTARTS = 1000


def train(
    run: Run,
    *,
    ranks: int | None = 1,
    overrides: Sequence[str] = (),
    overwrite: bool = False,
    resume: bool | Literal["if_any"] = False,
    accept_changes: bool = False,
    max_restarts: int = 0,
    timeout_seconds: float = 600.0,
    callbacks: Sequence[Callback] = (),
) -> TrainResult:
    """Train a model and save it; return the metrics of the last step and the folder.

    Args:
        run: a run file, its values, or a `RunConfig`.
        ranks: number of processes. If None, one per GPU, or 1 without GPUs.
        overrides: texts `key=value` that change a run file.
        overwrite: delete an earlier run in the output folder.
        resume: continue that run from its newest checkpoint, on any number of ranks; "if_any" starts anew if there is
            none. A run that torchrun restarts does this by itself.
        accept_changes: resume although settings or data differ from the checkpoint's; a note names each difference.
        max_restarts: largest number of restarts of the ranks from the newest checkpoint after one died or hung.
        timeout_seconds: longest wait of a rank for another, in seconds.
        callbacks: see `Callback`.

    Raises:
        LengthwiseError: problems of the input, all in one error, or the error that ended the run.
        KeyboardInterrupt: a second Ctrl-C; its argument says what was saved. The first one ends the run after its step.
    """

    def check(config: RunConfig) -> None:
        check_trackers(config.report_to)
        if overwrite and resume:
            got, remedy = "both", "Leave one out: the first deletes the run, the second resumes it."
            raise ConfigError("overwrite", expected="{overwrite} or {resume}", got=got, remedy=remedy)
        if accept_changes and not resume:
            expected, remedy = "{resume} beside {accept_changes}", "Add {resume}, or remove {accept_changes}."
            raise ConfigError("accept_changes", expected=expected, got="no {resume}", remedy=remedy)
        if max_restarts and world_from_environment():
            remedy = "Give --max-restarts to torchrun."
            raise ConfigError("max_restarts", expected="0 under torchrun", got=str(max_restarts), remedy=remedy)
        read_whole("max_restarts", max_restarts, least=0, most=_MOST_RESTARTS)

    start = read_start(run, overrides, ranks=ranks, timeout_seconds=timeout_seconds, check=check)
    work = partial(
        train_rank, start, callbacks=callbacks, overwrite=overwrite, resume=resume, accept_changes=accept_changes
    )
    with RunFolder(start.config.output).saying_what_was_saved():
        return on_ranks(work, start.ranks, gpus=start.gpus, max_restarts=max_restarts, asks_to_stop=True)


def verify(
    run: Run,
    *,
    ranks: int | None = 2,
    overrides: Sequence[str] = (),
    full: bool = False,
    plan: str | Path | None = None,
    timeout_seconds: float = 600.0,
    on_start: Callable[[VerifyBatch], None] = lambda _check: None,
    on_phase: Callable[[str], None] = lambda _phase: None,
) -> VerifyReport | None:
    """Compute a part of the first global batch on `ranks` processes and in one process; return the differences.

    The part takes about a minute. `full` computes the whole batch of the run. `plan` does too, with a plan file in
    place of a new plan. `on_start` is called before the computation. Rank 0 calls `on_phase` with its progress, and
    with "" at the end. Other arguments are those of `train`. Under torchrun ranks other than 0 return None.

    Raises:
        LengthwiseError: problems of the input, or the error that ended a rank.
    """
    start = read_start(run, overrides, ranks=ranks, timeout_seconds=timeout_seconds)

    def work(world: World, note: Callable[[str], None]) -> VerifyReport | None:
        def noted(phase: str) -> None:
            note(phase)
            if not world.rank:
                on_phase(phase)

        def begin(check: VerifyBatch) -> None:
            if not world.rank:
                noted("")
                on_start(check)
                sys.stdout.flush()

        def batch_of(job: Job, planning: StepPlanning) -> VerifyBatch:
            if plan is not None:
                return whole_batch(job, planning, read_plan(Path(plan), job, next(job.batches()).lengths))
            return whole_batch(job, planning) if full else part_of_batch(job, planning)

        read = partial(prepare_job, start, one_batch=True, before_model=world.claim_device)
        notes = list[str]()
        try:
            job, transport = join_with(world, read, timeout_seconds=timeout_seconds, on_phase=noted, say=notes.append)
            agree_on_data(transport, job)
            return verify_rank(job, world, transport, batch_of, on_start=begin, on_phase=noted, notes=notes)
        finally:
            noted("")

    return on_ranks(work, start.ranks, gpus=start.gpus)


def read_plan(path: Path, job: Job, lengths: tuple[int, ...]) -> Plan:
    """Read a plan file; PlanError unless it is a plan for this batch on these ranks that this version can run."""
    where = str(path)
    try:
        text = read_plan_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(where, expected="a plan file", got=str(error), remedy="Give another plan file.") from None
    plan = Plan.from_json(text, where)
    check_plan(plan)
    job.refuse_plan(plan)
    layout = job.config.layout(job.ranks)
    if layout != "zero1" and plan.schedule["kind"] != "waves":
        remedy = "Plan it with `--mode waves`, or remove `shard` from the run file."
        expected, got = f"a plan of kind waves, for `shard: {layout}`", str(plan.schedule["kind"])
        raise PlanError(where, expected=expected, got=got, remedy=remedy)
    if job.config.offload is None and any(microbatch.offload for microbatch in plan.microbatches):
        remedy = "Add `offload` to the run file: {store: disk, path: /scratch}."
        expected, got = "a plan without offload, or `offload` in the run file", "a plan that offloads activations"
        raise PlanError(where, expected=expected, got=got, remedy=remedy)
    if plan.ranks != job.replicas or plan.tokens != lengths:
        expected = f"a plan for {counted(job.replicas, 'rank')} and the first batch's lengths {list(lengths[:8])}..."
        got = f"{counted(plan.ranks, 'rank')} and {list(plan.tokens[:8])}..."
        raise PlanError(where, expected=expected, got=got, remedy="Plan the lengths of the first global batch.")
    return plan
