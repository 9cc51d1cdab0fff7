"""A rank of a run before its first step: open the session, restore a checkpoint, measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from lengthwise.comm import Transport, World
from lengthwise.core.errors import ConfigError, DataError
from lengthwise.core.faults import fault
from lengthwise.core.measurements import Measurements
from lengthwise.core.names import counted
from lengthwise.cost.measured import measured_cost
from lengthwise.engine.batch import StepBatch
from lengthwise.engine.optimizer import SlicedOptimizer
from lengthwise.models import trained_towers
from lengthwise.planner.service.process import PlannerProcess
from lengthwise.profiler.rank_profiler import ProfileSettings, open_store, profile
from lengthwise.report.figures import percent
from lengthwise.run.building import laid_out, open_session
from lengthwise.run.callbacks import Callback, call_back
from lengthwise.run.checkpoints import Checkpoints
from lengthwise.run.export import write_model
from lengthwise.run.folder import RunFolder
from lengthwise.run.job import MEASURING_SECONDS, Job
from lengthwise.run.launch import StopRequest
from lengthwise.run.resume import torchrun_agent
from lengthwise.run.step_end import FinitePolicy, RunStepEnd
from lengthwise.session import Session
from lengthwise.session.engine import Engine

_LEAST_TOKENS = 1024  # least length of the longest measured sequence: shorter ones tell little about attention


@dataclass(slots=True, kw_only=True)
class RankRun:
    """A rank of a run after its setup.

    callbacks: callbacks of rank 0, empty on other ranks. measurements: measurements before the first step, or None.
    of_towers: names of the parameters of towers that train.
    """

    job: Job
    session: Session
    optimizer: SlicedOptimizer
    end: RunStepEnd
    folder: RunFolder
    stop: StopRequest
    callbacks: Sequence[Callback]
    measurements: Measurements | None = None
    of_towers: Sequence[str] = ()

    @property
    def engine(self) -> Engine:
        """The session's engine."""
        return self.session.engine

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self.session.rank

    def say(self, line: str) -> None:
        """Report a decision and its reason to the callbacks."""
        call_back(self.callbacks, "on_note", line)

    def stopped_by(self, phase: str) -> int | None:
        """Return the signal that asked a rank to stop, or None. Collective."""
        self.engine.transport.phase = phase
        return int(max(self.engine.each_rank(self.stop.signal or 0))) or None

    def leave_if_asked(self, before: str) -> None:
        """End all ranks if one was asked to stop before training begins. Collective."""
        if self.stopped_by(f"start, before {before}") is not None:
            raise KeyboardInterrupt

    def check_parameters(self) -> None:
        """Check that parameters are finite before they are evaluated or saved. Collective."""
        self.end.finite.check_parameters(self.session.steps, self.engine.each_rank(self.end.finite.largest))

    def unseen(self, batch: StepBatch) -> Sequence[str]:
        """Return the trained parameters that no row of a batch reaches: those of towers, without an image."""
        dataset = batch.dataset
        return () if any(dataset.images(row) for row in batch.ids) else self.of_towers

    def write_model(self, folder: Path) -> None:
        """Write the model and the tokenizer."""
        write_model(self.engine.model, self.job.config, self.job.tokenizer, folder)
        fault("model-save", self.rank, self.session.steps)

    def close(self) -> None:
        """Stop writing in the background, and close the session."""
        self.session.runner.writer.close()  # an unfinished checkpoint stays unfinished
        self.session.close()


def set_up(
    job: Job,
    world: World,
    transport: Transport,
    process: PlannerProcess | None,
    callbacks: Sequence[Callback],
    stop: StopRequest,
    folder: RunFolder,
) -> RankRun:
    """Open the session, restore the checkpoint, and measure costs if asked for. Collective.

    Raises MemoryShortage if the model or no microbatch fits, DataError if all ranks together cannot hold the longest
    sequence.
    """
    config, say = job.config, partial(call_back, callbacks, "on_note")
    if isinstance(config.heads, int) and config.heads > job.replicas:
        say(f"heads: {config.heads} has no effect on {counted(job.replicas, 'rank')}")
    session = open_session(job, world, transport, process, say=say)
    job, optimizer = laid_out(job, session), session.optimizer
    _check_eval_fits(job, session)
    checkpoints = Checkpoints(
        config,
        session.runner.writer,
        optimizer,
        data=lambda: job.dataset.digest().hex(),
        lines=folder.synced_lines,
        note=say,
    )
    finite = FinitePolicy(
        skips=config.not_finite == "skip",
        parameters=optimizer.parameters,
        callbacks=callbacks,
        largest_allowed=torch.finfo(session.engine.dtype).max,
    )
    end = RunStepEnd(rank=transport.rank, finite=finite, checkpoints=checkpoints)
    session.runner.end = end
    _restore(job, session, end, say)
    towers = {id(own) for each in trained_towers(session.engine.model) for own in each.parameters()}
    rank = RankRun(
        job=job,
        session=session,
        optimizer=optimizer,
        end=end,
        folder=folder,
        stop=stop,
        callbacks=callbacks,
        of_towers=[name for name, each in session.engine.model.named_parameters() if id(each) in towers],
    )
    if job.measures_at_start(session.shard):
        _measure_costs(rank, world)
    return rank


def _restore(job: Job, session: Session, end: RunStepEnd, say: Callable[[str], None]) -> None:
    """Restore parameters, states and counts from the checkpoint, if there is one. Collective."""
    resume = job.resume
    if resume is None:
        return
    end.finite.skipped = resume.manifest.skipped
    end.checkpoints.restore(resume)
    session.runner.steps = resume.step
    for each in resume.passed_over:
        say(f"skipped and removed: {each}")
    say(f"resuming from {resume.folder}, after step {resume.step}")


def _check_eval_fits(job: Job, session: Session) -> None:
    """Raise DataError if all ranks cannot hold the longest eval sequence; the session has checked the data."""
    longest, most = 0 if job.eval_dataset is None else int(job.eval_dataset.lengths.max()), session.longest_tokens
    if longest > most:
        remedy = f"Use more ranks, recompute: auto, or eval data of at most {most} tokens (too_long: skip)."
        expected = f"sequences of at most {most} tokens, which all ranks together hold"
        raise DataError("eval.data", expected=expected, got=f"{longest} tokens", remedy=remedy)


def _measure_costs(rank: RankRun, world: World) -> None:
    """Measure the machine and plan with the measured costs; values and states stay equal to the bit. Collective."""
    rank.leave_if_asked("costs")
    job, engine, precision = rank.job, rank.engine, rank.job.config.precision
    assert precision != "auto", "run.checks fills it in"
    engine.transport.phase = "measuring before the first step"
    rank.say(f"measuring the machine, about {MEASURING_SECONDS:.0f} s")
    settings = ProfileSettings(
        seconds=MEASURING_SECONDS,
        longest_tokens=max(_LEAST_TOKENS, *rank.session.planning.ahead.capacities.values()),
        precision=precision,
        clock="wall",
        hardware=job.hardware,
        computing=engine.computing,
    )
    offload, trained = job.config.offload, (engine.model, rank.optimizer.parameters, rank.optimizer)
    disk = offload.path if offload is not None and offload.store == "disk" else None
    store = open_store(world.device, disk, where=f"rank {world.rank}")
    try:
        with engine.attending():
            found = profile(job.model, world, engine.transport, settings, trained=trained, store=store)
    except ConfigError as error:  # about the samples, so the same on all ranks
        rank.say(f"not measured, planned by estimates for the device: {error}")
        return
    finally:
        if store is not None:
            store.close()
    rank.measurements = found
    rank.session.planning.reprice(measured_cost(found))
    fits = percent(found.fit.mean_error)
    rank.say(f"measured {len(found.samples)} samples; the costs fit them with a mean error of {fits}")


def begin(run: RankRun) -> None:
    """Begin or continue the run's folder. Collective."""
    job = run.job
    fault("start", run.rank, run.session.steps)
    run.leave_if_asked("the first step")
    if not run.rank:
        if job.resume is not None:
            run.folder.go_on(job.config, job.resume)
        else:
            run.folder.start(job.config)
        run.folder.note_agent(torchrun_agent())
        if run.measurements is not None:
            run.folder.keep_measurements(run.measurements)
