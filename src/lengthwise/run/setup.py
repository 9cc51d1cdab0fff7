"""A rank of a run before its first step: its model, what it goes on from, what it measures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from lengthwise.comm import Transport, World
from lengthwise.core.faults import fault
from lengthwise.core.names import counted
from lengthwise.cost import ZERO3_ALONE
from lengthwise.data.remote import RemoteDataset
from lengthwise.data.stream import StreamDataset
from lengthwise.engine.memory import SMALLER_STATE, reporting_shortage
from lengthwise.engine.optimizer import ShardedOptimizer
from lengthwise.engine.parameters import Parameters
from lengthwise.run.building import build_trained, job_engine
from lengthwise.run.callbacks import Callback, call_back
from lengthwise.run.capacity import measure_capacities
from lengthwise.run.checkpoints import Checkpoints
from lengthwise.run.export import write_model
from lengthwise.run.folder import RunFolder
from lengthwise.run.job import MEASURING_SECONDS, Job
from lengthwise.run.launch import StopRequest
from lengthwise.run.pricing import Pricing
from lengthwise.run.readers import reading
from lengthwise.run.step_end import FinitePolicy, RunStepEnd
from lengthwise.session.capacity import capacities_sentence
from lengthwise.session.engine import Engine
from lengthwise.session.runner import StepRunner
from lengthwise.session.source import StepPlanner


@dataclass(slots=True, kw_only=True)
class RankRun:
    """What a rank's loop works with. callbacks: of rank 0."""

    job: Job
    runner: StepRunner
    end: RunStepEnd
    parameters: Parameters
    optimizer: ShardedOptimizer
    pricing: Pricing
    folder: RunFolder
    stop: StopRequest
    callbacks: Sequence[Callback]

    @property
    def engine(self) -> Engine:
        """What runs the microbatches."""
        return self.runner.engine

    @property
    def rank(self) -> int:
        """This rank."""
        return self.engine.transport.rank

    def say(self, line: str) -> None:
        """Let the callbacks know a decision and its reason."""
        call_back(self.callbacks, "on_note", line)

    def leave_if_asked(self, before: str) -> None:
        """End all ranks where one was asked to stop and nothing was trained yet. Collective."""
        self.engine.transport.phase = f"start, before {before}"
        if any(self.engine.each_rank(self.stop.signal or 0)):
            raise KeyboardInterrupt

    def check_parameters(self) -> None:
        """Check that parameters are finite before they are used or kept. Collective."""
        self.end.finite.check_parameters(self.runner.steps, self.engine.each_rank(self.end.finite.largest))

    def whole_on_first(self) -> AbstractContextManager[None]:
        """Let rank 0's model be written inside the block. Collective."""
        return self.parameters.whole_on_first(trained_only=self.job.config.lora is not None)

    def write_model(self, folder: Path) -> None:
        """Write the model, and the tokenizer beside it."""
        write_model(self.engine.model, self.job.config, self.job.tokenizer, folder)
        fault("model-save", self.rank, self.runner.steps)

    def close(self) -> None:
        """End what writes in the background, and the store of offloaded activations."""
        self.end.checkpoints.close()
        self.engine.close()


def set_up(
    job: Job,
    world: World,
    transport: Transport,
    planner: StepPlanner | None,
    callbacks: Sequence[Callback],
    stop: StopRequest,
    pricing: Pricing,
    folder: RunFolder,
) -> RankRun:
    """Build the model and its optimizer, restore what the run goes on from, and measure what it asks for. Collective.

    Raises:
        MemoryShortage: model, gradients and optimizer do not fit, or no microbatch beside them.
    """
    config, say = job.config, partial(call_back, callbacks, "on_note")
    if job.hardware_note is not None:
        say(job.hardware_note)
    if "shard" in job.chosen and (job.gpus or job.shard != "zero1"):
        say(job.chosen["shard"])
    if config.shard == "zero3" and job.ranks == 1:
        say(ZERO3_ALONE)
    if config.optimizer.offload and not job.gpus:
        say("optimizer.offload saves no memory on a machine without GPUs, where all is in the host's memory")
    if isinstance(config.heads, int) and config.heads > job.replicas:
        say(f"heads: {config.heads} has no effect on {counted(job.replicas, 'rank')}")
    engine, parameters, optimizer = _build(job, world, transport, planner, say)
    checkpoints = Checkpoints(
        config,
        transport,
        parameters,
        optimizer,
        data=lambda: job.dataset.digest().hex(),
        lines=folder.synced_lines,
        note=say,
    )
    finite = FinitePolicy(
        skips=config.not_finite == "skip",
        parameters=parameters,
        callbacks=callbacks,
        largest_allowed=torch.finfo(engine.dtype).max,
    )
    end = RunStepEnd(rank=transport.rank, finite=finite, checkpoints=checkpoints)
    rank = RankRun(
        job=job,
        runner=StepRunner(engine=engine, end=end, scale_gradients=optimizer.scale_gradients),
        end=end,
        parameters=parameters,
        optimizer=optimizer,
        pricing=pricing,
        folder=folder,
        stop=stop,
        callbacks=callbacks,
    )
    _restore(rank)
    if config.capacity_tokens == "auto":
        _measure_capacities(rank)
    if job.measures_at_start:
        _measure_costs(rank, world)
    engine.start_offloading()
    return rank


def _build(
    job: Job, world: World, transport: Transport, planner: StepPlanner | None, say: Callable[[str], None]
) -> tuple[Engine, Parameters, ShardedOptimizer]:
    with reporting_shortage(
        lambda: f"rank {world.rank}, start",
        needs=lambda: "the model, its gradients and its optimizer",
        remedy=SMALLER_STATE,
    ):
        model, parameters = build_trained(job, world, transport, say=say)
        optimizer = ShardedOptimizer(parameters, job.config.optimizer, transport)
    engine = job_engine(job, world, transport, planner, model, parameters)
    engine.kernel(engine.dtype, say)
    return engine, parameters, optimizer


def _restore(rank: RankRun) -> None:
    """Take parameters, states and counts from a checkpoint, where the run goes on from one. Collective."""
    resume = rank.job.resume
    if resume is None:
        return
    rank.end.finite.skipped = resume.manifest.skipped
    rank.end.checkpoints.restore(resume)
    rank.runner.steps = resume.step
    for each in resume.passed_over:
        rank.say(f"skipped and removed: {each}")
    rank.say(f"resuming from {resume.folder}, after step {resume.step}")


def _measure_capacities(rank: RankRun) -> None:
    """Plan by what ranks hold, by what fits beside all that is in memory now. Collective."""
    job = rank.job
    rank.engine.transport.phase = "measuring what fits into memory"
    found = measure_capacities(job, rank.engine, rank.parameters)
    rank.job = job.with_capacities(found)
    rank.pricing.plan_for(rank.job)
    rank.say(f"capacity of a rank: {capacities_sentence(found, job.most_tokens)}")


def _measure_costs(rank: RankRun, world: World) -> None:
    """Price plans by what the machine is measured to take; values and states stay as they are. Collective."""
    rank.leave_if_asked("costs")
    engine = rank.engine
    engine.transport.phase = "measuring before the first step"
    rank.say(f"measuring the machine, about {MEASURING_SECONDS:.0f} s")
    rank.say(rank.pricing.measure(world, engine.transport, (engine.model, rank.parameters, rank.optimizer)))


@contextmanager
def serving_rows(
    job: Job, world: World, transport: Transport, say: Callable[[str], None], ending: ExitStack
) -> Iterator[None]:
    """Let actors, or a process of each node, read data inside the block; nothing where it lies here. Collective.

    ending: as for `reading`.
    """
    dataset, seconds = job.dataset, job.timeout_seconds
    if isinstance(dataset, StreamDataset):
        served = reading(dataset, world, transport, timeout_seconds=seconds, say=say, ending=ending)
    elif isinstance(dataset, RemoteDataset):
        from lengthwise.run.actors import serving

        is_forked = world.rendezvous is not None
        served = serving(dataset, transport, timeout_seconds=seconds, say=say, is_forked=is_forked)
    else:
        yield
        return
    with served:
        yield
    if dataset.skipped:
        say(f"rows left out so far: {dataset.left_out}")
