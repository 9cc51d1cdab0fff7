"""A rank of a run from start to end: it reads model and data, joins the ranks, starts callbacks, and trains."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lengthwise.comm import Transport, World, from_first
from lengthwise.config import RunConfig
from lengthwise.core.errors import Collector
from lengthwise.planner.service.process import PlannerProcess
from lengthwise.run.callbacks import Callback, TrainResult, call_back
from lengthwise.run.checks import prepare_job
from lengthwise.run.evaluation import read_best
from lengthwise.run.folder import RunFolder
from lengthwise.run.job import Job, RunStart
from lengthwise.run.launch import StopRequest
from lengthwise.run.loop import train_steps
from lengthwise.run.node_feed import FeedRank, node_feed
from lengthwise.run.prepared_run import agree_on_data, join_with
from lengthwise.run.ray_feed import ray_feed
from lengthwise.run.resume import (
    Resume,
    find_resume,
    has_checkpoint,
    has_model,
    is_finished,
    shared_resume,
    torchrun_agent,
)
from lengthwise.run.setup import set_up
from lengthwise.run.trackers import Trackers


def train_rank(
    start: RunStart,
    world: World,
    on_phase: Callable[[str], None],
    *,
    callbacks: Sequence[Callback],
    overwrite: bool,
    resume: bool | Literal["if_any"],
    accept_changes: bool,
) -> TrainResult:
    """Read model and data, join the other ranks, and train to the end or until asked to stop; rank 0 saves the model.

    All problems of output, model and data are one error, the same on all ranks. After a NumericError no model is saved.
    """
    config = start.config
    with ExitStack() as cleanup, ExitStack() as stack:
        process = None if world.rank else stack.enter_context(PlannerProcess(forks=world.rendezvous is not None))
        folder = RunFolder(config.output, lambda line: call_back(callbacks, "on_note", line))
        listeners = () if world.rank else (folder, *callbacks)
        say, show = partial(call_back, listeners, "on_note"), partial(call_back, listeners, "on_phase")

        def note_phase(phase: str) -> None:
            on_phase(phase)
            show(phase)

        def read() -> Job:
            problems, found = Collector(), None
            if not world.rank:
                options = {"overwrite": overwrite, "resume": resume, "accept_changes": accept_changes}
                found = problems.attempt(lambda: _claim(config, stack, **options))
            job = problems.attempt(lambda: prepare_job(start, resume=found, before_model=world.claim_device))
            problems.raise_all()
            assert job is not None, "a job that was not made must have been a problem"
            return job

        stack.callback(show, "")
        said = list[str]()
        job, transport = join_with(
            world, read, timeout_seconds=start.timeout_seconds, on_phase=note_phase, say=said.append
        )
        agree_on_data(transport, job)
        transport.phase = "start, what to go on from"
        stop = StopRequest(ends_at_the_second=_is_alone(world), announces=_is_alone(world))
        cleanup.enter_context(stop.listening())  # first, so that a signal while the rest ends still saves
        job = replace(job, resume=shared_resume(job.resume, config, transport))
        show("")
        if (finished := _finished(job, transport)) is not None:
            call_back(listeners, "on_end", finished)
            transport.close()
            return finished
        call_back(listeners, "on_start", job)
        for line in (*_restarted(world, job), *said):
            say(line)
        trackers = stack.enter_context(Trackers(job, say))
        listeners = () if world.rank else (*listeners, trackers)
        with _serving_rows(job, world, transport, say, cleanup):
            run = set_up(job, world, transport, process, listeners, stop, folder)
            try:
                result = train_steps(run)
            finally:
                run.close()
        transport.close()
        call_back(listeners, "on_end", result)
        if config.report_to:
            note_phase("the end of the reports to trackers")
        return result


def _claim(
    config: RunConfig, stack: ExitStack, *, overwrite: bool, resume: bool | Literal["if_any"], accept_changes: bool
) -> Resume | None:
    """Claim the output folder until `stack` ends; return the checkpoint to resume from, or None to begin anew."""
    folder, goes_on = RunFolder(config.output), bool(resume)
    if resume == "if_any" or folder.is_restart(torchrun_agent()):
        goes_on = has_checkpoint(config)
        overwrite = not goes_on and not has_model(config)
    stack.enter_context(folder.claimed(overwrite=overwrite, resume=goes_on, inputs=_inputs(config)))
    if not goes_on:
        return None
    found = find_resume(config, accept_changes=accept_changes)
    folder.kept(found)  # refuses damaged files before anything changes
    read_best(config.output)
    return found


def _inputs(config: RunConfig) -> list[Path]:
    """Return all paths that the run reads; hub names are not paths."""
    sources = (*config.data, *(config.eval.data if config.eval else ()))
    names = (name for name in (config.model, config.tokenizer_name) if Path(name).is_absolute())
    adapter = [config.lora.adapter] if config.lora and config.lora.adapter else []
    return [*map(Path, names), *adapter, *(source.path for source in sources if source.path is not None)]


def _finished(job: Job, transport: Transport) -> TrainResult | None:
    """Return the result of a run whose steps and model are complete, else None. Collective."""
    resume = job.resume
    if resume is None or not from_first(transport, lambda: is_finished(job.config, resume, job.num_steps)):
        return None
    first_loss, last_loss = resume.losses
    return TrainResult(
        steps=resume.step,
        first_loss=first_loss,
        last_loss=last_loss,
        parameters=sum(math.prod(parameter.shape) for parameter in resume.manifest.parameters),
        folder=job.config.output,
        skipped=resume.manifest.skipped,
    )


def _restarted(world: World, job: Job) -> list[str]:
    """Return a line with the reason why local ranks were restarted, if they were."""
    if not world.ended:
        return []
    number, most = (os.environ[f"TORCHELASTIC_{each}"] for each in ("RESTART_COUNT", "MAX_RESTARTS"))
    place = "its start" if job.resume is None else f"step {job.resume.step}"
    return [f"restart {number} of {most}, from {place}: {world.ended}"]


def _is_alone(world: World) -> bool:
    """Return whether this process must end itself: it has no launcher, and no torchrun repeats a cluster's signal."""
    return world.world_size == 1 and torchrun_agent() is None


@contextmanager
def _serving_rows(
    job: Job, world: World, transport: Transport, say: Callable[[str], None], cleanup: ExitStack
) -> Iterator[None]:
    """Start the feeds of streamed or remote data for the block, if the run has such data. Collective."""
    key: Any = job.config.data[0].comes_meanwhile
    if key is None:
        yield
        return
    dataset: Any = job.dataset
    rank = FeedRank(
        dataset=dataset, world=world, transport=transport, timeout_seconds=job.timeout_seconds, say=say, cleanup=cleanup
    )
    with _FEEDS[key](rank):
        yield
    if dataset.skipped:
        say(f"rows left out so far: {dataset.left_out}")


_FEEDS = {"streaming": node_feed, "remote": ray_feed}
