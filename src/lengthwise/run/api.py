"""`train` and `verify` as functions: what the commands of these names call.

Both start local processes, one a rank, or take the ranks of torchrun where it started this process. They print
nothing: a `Callback` follows it.
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
from lengthwise.run.check import Check, part_of_batch, whole_batch
from lengthwise.run.evaluation import read_best
from lengthwise.run.folder import RunFolder
from lengthwise.run.job import Job
from lengthwise.run.rank import train_rank
from lengthwise.run.resume import Resume, find_resume, has_checkpoint, has_model, is_finished, torchrun_agent
from lengthwise.run.stacks import FOLDER as STACKS
from lengthwise.run.start import Run, Start, prepare, run_ranks
from lengthwise.run.verify import VerifyReport, verify_rank

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
        ranks: processes; None: one a GPU, else 1.
        overrides: texts `key=value` for a run file.
        overwrite: delete an earlier run in the output folder.
        resume: go on with that run from its newest checkpoint, on any number of ranks; "if_any": or start where it has
            none. A run that torchrun starts again does the latter by itself.
        accept_changes: resume although settings or data differ from those of the checkpoint; each difference is a note.
        max_restarts: how often to start the ranks of this process again, from the newest checkpoint, where one died or
            hung.
        timeout_seconds: how long a rank waits for another.
        callbacks: what is called with each step; see `Callback`.

    Raises:
        LengthwiseError: a problem with the input, all of them in one error; or what ended the run.
        KeyboardInterrupt: a second Ctrl-C; its argument says what was saved. The first one ends the run after its step.
    """
    with ExitStack() as claims:

        def claim(config: RunConfig) -> Resume | None:
            check_trackers(config.report_to)
            if overwrite and resume:
                got, remedy = "both", "Leave one out: the first deletes the run, the second resumes it."
                raise ConfigError("overwrite", expected="{overwrite} or {resume}", got=got, remedy=remedy)
            if accept_changes and not resume:
                expected, remedy = "{resume} beside {accept_changes}", "Add {resume}, or leave it out."
                raise ConfigError("accept_changes", expected=expected, got="it alone", remedy=remedy)
            folder, deletes, goes_on = RunFolder(config.output), overwrite, bool(resume)
            if resume == "if_any" or folder.is_restart(torchrun_agent()):
                goes_on = has_checkpoint(config)
                deletes = not goes_on and not has_model(config)
            claims.enter_context(folder.claimed(overwrite=deletes, resume=goes_on, inputs=_inputs(config)))
            if not goes_on:
                return None
            found = find_resume(config, accept_changes=accept_changes)
            folder.kept(found)  # what is damaged is refused before anything changes
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


def _finished(start: Start) -> TrainResult | None:
    """Return the result of a run that resumes after its last step; None: it has steps, or its model, to make."""
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


def _check_restarts(max_restarts: int, start: Start) -> None:
    if max_restarts and start.world is not None:
        remedy = "Give --max-restarts to torchrun."
        raise ConfigError("max_restarts", expected="0 under torchrun", got=str(max_restarts), remedy=remedy)
    read_whole("max_restarts", max_restarts, least=0, most=_MOST_RESTARTS)


def _run_restarting(
    start: Start, callbacks: Sequence[Callback], hearing: Sequence[Callback], most: int, *, accept_changes: bool
) -> TrainResult:
    """Run the ranks; where one died or hung, start them again, at most so often, from the newest checkpoint."""
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
    on_start: Callable[[Check], None] = lambda _check: None,
    on_phase: Callable[[str], None] = lambda _phase: None,
) -> VerifyReport | None:
    """Compute a part of the first global batch on `ranks` processes and in one; return how far apart they are.

    The part takes about a minute (see `run.check`). `full`: the whole batch, as the run has it. `plan`: the same, with
    a plan file in place of a plan made here. `on_start` is called before anything is computed, `on_phase` as it goes
    on, by rank 0, "" at the end. Other arguments are those of `train`. None on the ranks of torchrun but the first.

    Raises:
        LengthwiseError: a problem with the input, or what ended a rank.
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
        PlanError: it is not, or it has what this version cannot run.
    """
    try:
        text = read_plan_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(str(path), expected="a plan file", got=str(error), remedy="Give another plan file.") from None
    plan = Plan.from_json(text, str(path))
    check_plan(plan)
    job.refuse_plan(plan)
    if job.shard != "zero1" and plan.schedule["kind"] != "waves":
        where, remedy = str(path), "Plan it with `--mode waves`, or take `shard` out of the run file."
        expected, got = f"a plan of kind waves, for `shard: {job.shard}`", str(plan.schedule["kind"])
        raise PlanError(where, expected=expected, got=got, remedy=remedy)
    if job.config.offload is None and any(microbatch.offload for microbatch in plan.microbatches):
        remedy = "Add `offload` to the run file: {store: disk, path: /scratch}."
        raise PlanError(str(path), expected="a plan without offload, or a place for it", got="none", remedy=remedy)
    if plan.ranks != job.replicas or plan.tokens != lengths:
        where = str(path)
        expected = f"a plan for {counted(job.replicas, 'rank')} and the first batch's lengths {list(lengths[:8])}..."
        got = f"{counted(plan.ranks, 'rank')} and {list(plan.tokens[:8])}..."
        raise PlanError(where, expected=expected, got=got, remedy="Make it from the lengths of the first global batch.")
    return plan


def _inputs(config: RunConfig) -> list[Path]:
    """Everything on disk that the run reads; a hub name is no path of ours."""
    sources = (*config.data, *(config.eval.data if config.eval else ()))
    names = (name for name in (config.model, config.tokenizer_name) if Path(name).is_absolute())
    adapter = [config.lora.adapter] if config.lora and config.lora.adapter else []
    return [*map(Path, names), *adapter, *(source.path for source in sources if source.path is not None)]
