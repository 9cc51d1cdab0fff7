"""`train` and `verify` as functions, which the commands of these names call.

Both start one local process per rank, or use the ranks of torchrun if it started this process. They print nothing: a
`Callback` reports.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from lengthwise.comm import World
from lengthwise.config import RunConfig
from lengthwise.core.errors import ConfigError, PlanError, RankError, TransferError
from lengthwise.core.faults import only_of_first_start
from lengthwise.core.files import read_plan_text
from lengthwise.core.names import counted
from lengthwise.core.packages import check_trackers
from lengthwise.core.plan import Plan
from lengthwise.core.sizes import read_whole
from lengthwise.program import check_plan
from lengthwise.run.callbacks import Callback, TrainResult, call_back
from lengthwise.run.evaluation import read_best
from lengthwise.run.folder import RunFolder
from lengthwise.run.job import Job
from lengthwise.run.prepared_run import PreparedRun, Run, prepare, run_ranks
from lengthwise.run.rank import train_rank
from lengthwise.run.resume import Resume, find_resume, has_checkpoint, has_model, is_finished, torchrun_agent
from lengthwise.run.stacks import FOLDER as STACKS
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
        max_restarts: how often to restart the ranks of this process from the newest checkpoint after one died or hung.
        timeout_seconds: how long a rank waits for another.
        callbacks: see `Callback`.

    Raises:
        LengthwiseError: problems of the input, all in one error, or the error that ended the run.
        KeyboardInterrupt: a second Ctrl-C; its argument says what was saved. The first one ends the run after its step.
    """
    with ExitStack() as claims:

        def claim(config: RunConfig) -> Resume | None:
            check_trackers(config.report_to)
            if overwrite and resume:
                got, remedy = "both", "Leave one out: the first deletes the run, the second resumes it."
                raise ConfigError("overwrite", expected="{overwrite} or {resume}", got=got, remedy=remedy)
            if accept_changes and not resume:
                expected, remedy = "{resume} beside {accept_changes}", "Add {resume}, or remove {accept_changes}."
                raise ConfigError("accept_changes", expected=expected, got="no {resume}", remedy=remedy)
            folder, deletes, goes_on = RunFolder(config.output), overwrite, bool(resume)
            if resume == "if_any" or folder.is_restart(torchrun_agent()):
                goes_on = has_checkpoint(config)
                deletes = not goes_on and not has_model(config)
            claims.enter_context(folder.claimed(overwrite=deletes, resume=goes_on, inputs=_inputs(config)))
            if not goes_on:
                return None
            found = find_resume(config, accept_changes=accept_changes)
            folder.kept(found)  # refuse damaged files before anything changes
            read_best(config.output)
            return found

        show = partial(call_back, callbacks, "on_phase")
        start = prepare(run, overrides, ranks=ranks, timeout_seconds=timeout_seconds, claim=claim, on_phase=show)
        hearing = callbacks if start.is_first else ()
        _check_restarts(max_restarts, start)
        if (finished := _finished(start)) is not None:
            call_back(hearing, "on_end", finished)
            return finished
        call_back(hearing, "on_start", start.job)
        result = _run_restarting(start, callbacks, hearing, max_restarts, accept_changes=accept_changes)
        call_back(hearing, "on_end", result)
        return result


def _finished(start: PreparedRun) -> TrainResult | None:
    """Return the result of a run that resumes after its last step, or None if steps or the saved model are missing."""
    job, resume = start.job, start.job.resume
    if start.world is not None or resume is None or not is_finished(job.config, resume, job.num_steps):
        return None
    first_loss, last_loss = resume.losses
    return TrainResult(
        steps=resume.step,
        num_tokens=0,
        seconds=0.0,
        first_loss=first_loss,
        last_loss=last_loss,
        metrics=None,
        parameters=sum(math.prod(parameter.shape) for parameter in resume.manifest.parameters),
        stopped_by=None,
        folder=job.config.output,
        skipped=resume.manifest.skipped,
    )


def _check_restarts(max_restarts: int, start: PreparedRun) -> None:
    if max_restarts and start.world is not None:
        remedy = "Give --max-restarts to torchrun."
        raise ConfigError("max_restarts", expected="0 under torchrun", got=str(max_restarts), remedy=remedy)
    read_whole("max_restarts", max_restarts, least=0, most=_MOST_RESTARTS)


def _run_restarting(
    start: PreparedRun, callbacks: Sequence[Callback], hearing: Sequence[Callback], most: int, *, accept_changes: bool
) -> TrainResult:
    """Run the ranks; if one died or hung, restart them from the newest checkpoint, at most `most` times."""
    config = start.job.config
    for restarts in range(1, most + 2):
        job = start.job
        try:
            return run_ranks(
                start,
                lambda world, on_phase, job=job: train_rank(job, world, callbacks, on_phase),
                asks_to_stop=True,
                stacks=config.output / STACKS,
            )
        except (RankError, TransferError) as error:
            if restarts > most:
                raise
            resume = find_resume(config, accept_changes=accept_changes) if has_checkpoint(config) else None
            start = replace(start, job=replace(job, resume=resume))
            only_of_first_start()
            place = "its start" if resume is None else f"step {resume.step}"
            call_back(hearing, "on_note", f"restart {restarts} of {most}, from {place}: {error}")
    raise AssertionError("a run that neither ended nor was given up")


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
    start = prepare(run, overrides, ranks=ranks, timeout_seconds=timeout_seconds, on_phase=on_phase)
    job = start.job
    if plan is not None:
        check = whole_batch(job, read_plan(Path(plan), job, next(job.batches()).lengths))
    else:
        check = whole_batch(job) if full else part_of_batch(job)
    if start.is_first:
        on_start(check)

    def work(world: World, note: Callable[[str], None]) -> VerifyReport | None:
        def noted(phase: str) -> None:
            note(phase)
            if not world.rank:
                on_phase(phase)

        try:
            return verify_rank(check, world, noted)
        finally:
            noted("")

    return run_ranks(start, work)


def read_plan(path: Path, job: Job, lengths: tuple[int, ...]) -> Plan:
    """Read a plan file and check that it is a plan for this batch on these ranks.

    Raises:
        PlanError: it is not, or this version cannot run it.
    """
    try:
        text = read_plan_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(str(path), expected="a plan file", got=str(error), remedy="Give another plan file.") from None
    plan = Plan.from_json(text, str(path))
    check_plan(plan)
    job.refuse_plan(plan)
    if job.shard != "zero1" and plan.schedule["kind"] != "waves":
        where, remedy = str(path), "Plan it with `--mode waves`, or remove `shard` from the run file."
        expected, got = f"a plan of kind waves, for `shard: {job.shard}`", str(plan.schedule["kind"])
        raise PlanError(where, expected=expected, got=got, remedy=remedy)
    if job.config.offload is None and any(microbatch.offload for microbatch in plan.microbatches):
        remedy = "Add `offload` to the run file: {store: disk, path: /scratch}."
        expected, got = "a plan without offload, or `offload` in the run file", "a plan that offloads activations"
        raise PlanError(str(path), expected=expected, got=got, remedy=remedy)
    if plan.ranks != job.replicas or plan.tokens != lengths:
        where = str(path)
        expected = f"a plan for {counted(job.replicas, 'rank')} and the first batch's lengths {list(lengths[:8])}..."
        got = f"{counted(plan.ranks, 'rank')} and {list(plan.tokens[:8])}..."
        raise PlanError(where, expected=expected, got=got, remedy="Plan the lengths of the first global batch.")
    return plan


def _inputs(config: RunConfig) -> list[Path]:
    """Return all paths that the run reads; hub names are not paths."""
    sources = (*config.data, *(config.eval.data if config.eval else ()))
    names = (name for name in (config.model, config.tokenizer_name) if Path(name).is_absolute())
    adapter = [config.lora.adapter] if config.lora and config.lora.adapter else []
    return [*map(Path, names), *adapter, *(source.path for source in sources if source.path is not None)]
