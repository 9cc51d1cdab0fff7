"""A rank of a run from start to end: it joins the ranks, starts readers of data and callbacks, and trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from lengthwise.comm import Transport, World
from lengthwise.planner.service.process import PlannerProcess
from lengthwise.run.actors import serving
from lengthwise.run.building import connect
from lengthwise.run.callbacks import Callback, TrainResult, call_back
from lengthwise.run.feeds import FedRank, feeding
from lengthwise.run.folder import RunFolder
from lengthwise.run.job import Job
from lengthwise.run.launch import StopRequest
from lengthwise.run.loop import train_steps
from lengthwise.run.resume import shared_resume, torchrun_agent
from lengthwise.run.setup import set_up
from lengthwise.run.trackers import Trackers


def train_rank(job: Job, world: World, callbacks: Sequence[Callback], on_phase: Callable[[str], None]) -> TrainResult:
    """Train to the end, or until asked to stop; rank 0 saves the model.

    Raises:
        NumericError: a loss, a gradient or a parameter is not finite; no model is saved.
    """
    with ExitStack() as ending, ExitStack() as stack:
        process = None if world.rank else stack.enter_context(PlannerProcess(forks=world.rendezvous is not None))
        folder = RunFolder(job.config.output, lambda line: call_back(callbacks, "on_note", line))
        hearing = () if world.rank else (folder, *callbacks)
        say, show = partial(call_back, hearing, "on_note"), partial(call_back, hearing, "on_phase")

        def note_phase(phase: str) -> None:
            on_phase(phase)
            show(phase)

        stack.callback(show, "")
        transport = connect(world, job, note_phase, None if world.rank else say)
        transport.phase = "start, what to go on from"
        stop = StopRequest(ends_at_the_second=_is_alone(world), announces=_is_alone(world))
        stack.enter_context(stop.listening())
        trackers = stack.enter_context(Trackers(job, say))
        hearing = () if world.rank else (*hearing, trackers)
        job = replace(job, resume=shared_resume(job.resume, job.config, transport))
        with _serving_rows(job, world, transport, say, ending):
            run = set_up(job, world, transport, process, hearing, stop, folder)
            try:
                result = train_steps(run)
            finally:
                run.close()
        transport.close()
        if job.config.report_to:
            note_phase("the end of the reports to trackers")
        return result


def _is_alone(world: World) -> bool:
    """Return whether this process must end itself: no launcher would, and no torchrun repeats a cluster's signal."""
    return world.world_size == 1 and torchrun_agent() is None


@contextmanager
def _serving_rows(
    job: Job, world: World, transport: Transport, say: Callable[[str], None], ending: ExitStack
) -> Iterator[None]:
    """Start the readers of streamed or remote data for the block, if the run has such data. Collective.

    ending: as in `FedRank`.
    """
    key: Any = job.config.data[0].comes_meanwhile
    if key is None:
        yield
        return
    dataset: Any = job.dataset
    fed = FedRank(
        dataset=dataset, world=world, transport=transport, timeout_seconds=job.timeout_seconds, say=say, ending=ending
    )
    with _SERVING[key](fed):
        yield
    if dataset.skipped:
        say(f"rows left out so far: {dataset.left_out}")


_SERVING = {"streaming": feeding, "remote": serving}
