"""A checked run, before any process of it starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lengthwise.config import MEASURE_AT_START, RunConfig
from lengthwise.core.measurements import Precision
from lengthwise.core.plan import Plan
from lengthwise.core.shape import ModelShape
from lengthwise.cost import Cost, StepMemory, hardware_of_gpu, shape_from_config
from lengthwise.cost.measured import base_cost
from lengthwise.data import Batches, Dataset, Tokenizer
from lengthwise.data.fed import Steps
from lengthwise.engine.batch import StepBatch
from lengthwise.engine.schedule import warmup_steps
from lengthwise.models import Computing, ModelSource, placeholders
from lengthwise.planner.service.rank_memory import Capacities
from lengthwise.planner.service.step_planning import StepPlanning, step_planning
from lengthwise.program import refuse_unsupported
from lengthwise.run.resume import Resume
from lengthwise.setup import TrainedModel, memory_of_settings, offload_of

_UNMEASURED_TOKENS = 4096
MEASURING_SECONDS = 8.0  # about what measuring before the first step takes
_ANY_GPU = "h100"
_PRICED_ROWS = 10_000  # rows from which a step's seconds are estimated
_MEASURED_RUN = 20.0  # a run that is longer than this many times `MEASURING_SECONDS` is measured by default


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked run, the same on every rank.

    trained: sizes of the model and its optimizer. steps: the sequences of every step. gpus: number of GPUs that it uses
    on a machine; 0 computes on the CPU. gpu_name: name of the first GPU. measured_cost: costs from the run's file of
    measurements, or None without a file. measured_capacities: the measured capacities of `capacity_tokens: auto`, once
    known. resume: the checkpoint that the run continues from, or None. chosen: reasons of defaults that depend on model
    and device, by key.
    """

    config: RunConfig
    ranks: int
    model: ModelSource
    trained: TrainedModel
    steps: Steps
    eval_dataset: Dataset | None
    tokenizer: Tokenizer | None
    timeout_seconds: float
    gpus: int = 0
    gpu_name: str | None = None
    measured_cost: Cost | None = None
    measured_capacities: Capacities | None = None
    resume: Resume | None = None
    chosen: Mapping[str, str] = field(default_factory=dict)

    @property
    def replicas(self) -> int:
        """Number of ranks in plans; with `stages` one of them is a pipeline of several ranks."""
        return self.ranks // self.config.stages

    @property
    def dataset(self) -> Dataset:
        """The training data; if other processes serve it, only its steps have rows."""
        return self.steps.dataset  # pyright: ignore[reportReturnType] - a served one has no rows of its own

    @property
    def known(self) -> Dataset:
        """The data that forecasts and limits use before the first step: `dataset`, or the longest rows to come."""
        return self.steps.known

    def batches(self, *, after: int = 0) -> Iterator[StepBatch]:
        """Return the global batches of the run, in order, without those of the first `after` steps."""
        start = self.resume.manifest.position if self.resume is not None and self.resume.step == after else None
        following, refused = self.steps.after(after, start), placeholders(self.model.config)
        return (StepBatch(self.dataset, batch.ids, batch.end, batch.digest, refused) for batch in following)

    @property
    def num_steps(self) -> int:
        """Number of steps of the whole run."""
        return self.steps.num_steps

    @property
    def warmup_steps(self) -> int:
        """Number of steps over which the learning rate grows."""
        return warmup_steps(self.config.optimizer, self.num_steps)

    def eval_batches(self) -> Iterator[StepBatch]:
        """Return the batches of one evaluation: the eval data once, in batches of the run's size."""
        if self.eval_dataset is None:
            return iter(())
        once = self.config.model_copy(update={"steps": None, "epochs": 1})
        refused = placeholders(self.model.config)
        return (
            StepBatch(self.eval_dataset, each.ids, placeholders=refused) for each in Batches(self.eval_dataset, once)
        )

    @property
    def logits_at_once(self) -> int | None:
        """Number of logits that the loss makes at a time, or None for all of a microbatch."""
        return self.memory.logits_at_once

    @property
    def precision(self) -> Precision:
        """The precision of the run."""
        assert self.config.precision != "auto", "run.checks fills it in"
        return self.config.precision

    @property
    def computing(self) -> Computing:
        """The kernels and layers that the run file asks for."""
        return Computing.of(self.config)

    @property
    def num_heads(self) -> int:
        """Number of the model's attention heads, which a plan may split."""
        return self.shape.heads

    @property
    def capacities(self) -> Mapping[str, int]:
        """Capacities of a rank in tokens, by kind of recomputation.

        They are measured, or from the run file. Before the measurement the longest sequence decides.
        """
        if self.measured_capacities is not None:
            return self.measured_capacities.plain
        kind, tokens = self.config.recompute, self.config.capacity_tokens
        if tokens == "auto":
            tokens = max(_UNMEASURED_TOKENS, -(-self.longest_tokens // self.replicas))
        return {"none" if kind == "auto" else kind: tokens}

    def with_capacities(self, capacities: Capacities) -> Job:
        """Return the job with measured capacities."""
        return replace(self, measured_capacities=capacities)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest sequence of the data and the eval data."""
        return max(int(each.lengths.max()) for each in (self.known, self.eval_dataset) if each is not None)

    @property
    def most_tokens(self) -> int:
        """Maximum tokens of a global batch."""
        return self.steps.most_tokens

    @property
    def measures_at_start(self) -> bool:
        """Whether the machine is measured before the first step: if asked for, or if that is a small part of the run.

        The same on all ranks: a run's seconds are estimated from lengths and one named device.
        """
        device = _ANY_GPU if self.gpus else "cpu"  # not this rank's own: ranks may have different ones
        is_long = self._seconds_of_a_step(device) * self.num_steps > _MEASURED_RUN * MEASURING_SECONDS
        asked = self.config.measurements
        # Some measurements involve a few ranks only, and all need whole models.
        if self.shard != "zero1" or self.config.stages > 1:
            return False
        return asked == MEASURE_AT_START or (asked is None and is_long and self.steps.is_known)

    @property
    def measures(self) -> bool:
        """Whether plans use measured costs, and slow ranks get less work."""
        return self.measures_at_start or self.measured_cost is not None

    @property
    def estimated_step_seconds(self) -> float:
        """Estimated seconds of a step on this device, without waits."""
        return self._seconds_of_a_step(self.hardware)

    def _seconds_of_a_step(self, device: str) -> float:
        lengths, asked = self.steps.drawn_lengths(_PRICED_ROWS), self.config.global_batch
        sequences = asked.sequences or asked.tokens / lengths.mean()
        cost = base_cost(self.shape, device, precision=self.config.precision, adapters=self.trained.trained)
        once = float(cost.compute_seconds(lengths).sum()) / len(lengths)
        return once * sequences / self.ranks

    @property
    def first_lengths(self) -> list[int] | None:
        """Lengths of the first global batch, or None if rows are read during training."""
        return self.steps.first_lengths

    @property
    def shard(self) -> str:
        """The layout of parameters: zero1, zero3 or hybrid; on one node the last two are the same."""
        return self.config.layout(self.ranks)

    @property
    def hardware(self) -> str:
        """Name of the hardware whose costs are used without measurements."""
        return hardware_of_gpu(self.gpu_name or "a GPU")[0] if self.gpus else "cpu"

    @property
    def hardware_note(self) -> str | None:
        """A note if the costs are another device's, else None."""
        if not self.gpus or self.measures:
            return None
        return hardware_of_gpu(self.gpu_name or "a GPU")[1]

    @property
    def cost(self) -> Cost:
        """Costs with all parameters on every rank: measured, or estimated for the device."""
        if self.measured_cost is not None:
            return self.measured_cost
        config = self.config
        return base_cost(
            self.shape, self.hardware, precision=config.precision, adapters=self.trained.trained, stages=config.stages
        )

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model that costs and memory depend on."""
        return shape_from_config(self.model.config.to_dict())

    @property
    def memory(self) -> StepMemory:
        """Memory of a step in the run's layout."""
        return memory_of_settings(self.config, self.trained, ranks=self.ranks, on_gpus=self.gpus > 0)

    @property
    def planning(self) -> StepPlanning:
        """Planning of the run's steps."""
        return step_planning(
            self.memory,
            self.cost,
            self.capacities,
            measured=self.measured_capacities,
            offload=offload_of(self.config.offload),
            planner=self.config.planner,
            heads=self.config.heads,
            context_tokens=int(self.known.lengths[self.known.ids].max()),
        )

    def refuse_plan(self, plan: Plan) -> None:
        """Raise PlanError, or Problems, for a plan that the ranks of this run cannot run."""
        refuse_unsupported(plan, num_heads=self.num_heads, cut=self.config.cut)

    def make_plan(self, lengths: Sequence[int]) -> Plan:
        """Plan one step in this process, and check that the run's ranks can run it."""
        plan = self.planning.plan(lengths)
        self.refuse_plan(plan)
        return plan
