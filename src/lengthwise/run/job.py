"""A checked run, before its session opens: settings, the place of its model, and its data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lengthwise.config import MEASURE_AT_START, RunConfig
from lengthwise.core.plan import Plan
from lengthwise.cost import hardware_of_gpu
from lengthwise.cost.measured import base_cost
from lengthwise.data import Batches, Dataset, Tokenizer
from lengthwise.data.feed_dataset import Steps
from lengthwise.engine.batch import ReadsFiles, StepBatch
from lengthwise.engine.schedule import warmup_steps
from lengthwise.models import ModelSource, placeholders
from lengthwise.program import refuse_unsupported
from lengthwise.run.resume import Resume
from lengthwise.setup import TrainedModel

MEASURING_SECONDS = 8.0  # of measuring before the first step, about
_ANY_GPU = "h100"
_PRICED_ROWS = 10_000  # rows from which a step's seconds are estimated
_MEASURED_RUN = 20.0  # runs longer than this many times `MEASURING_SECONDS` are measured by default


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """The checked settings of a run and its machine, before its ranks read model and data.

    ranks: number of processes. gpus: number of GPUs that it uses on a machine, 0 for the CPU. gpu_name: name of the
    first GPU. chosen: reasons of defaults that depend on model and device, by key.
    """

    config: RunConfig
    ranks: int
    timeout_seconds: float
    gpus: int = 0
    gpu_name: str | None = None
    chosen: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(RunStart):
    """A checked run, the same on every rank.

    trained: sizes of the model and its optimizer. steps: sequences of every step. resume: checkpoint from which the run
    continues, or None. sees: reads the images of rows, once the session is open.
    """

    model: ModelSource
    trained: TrainedModel
    steps: Steps
    eval_dataset: Dataset | None
    tokenizer: Tokenizer | None
    resume: Resume | None = None
    sees: ReadsFiles | None = None

    @property
    def replicas(self) -> int:
        """Number of ranks in plans; with `stages` one of them is a pipeline of several ranks."""
        return self.ranks // self.config.stages

    @property
    def dataset(self) -> Dataset:
        """Training data; with feeds, only the newest steps have rows."""
        return self.steps.dataset  # pyright: ignore[reportReturnType] - rows of feeds come later

    @property
    def has_images(self) -> bool:
        """Whether a row of the data or the eval data has images."""
        return any(each.first_with_images is not None for each in (self.known, self.eval_dataset) if each is not None)

    @property
    def known(self) -> Dataset:
        """Data for forecasts and limits before the first step: `dataset`, or one longest row per source."""
        return self.steps.known

    def batches(self, *, after: int = 0) -> Iterator[StepBatch]:
        """Yield the global batches of the run, in order, without those of the first `after` steps."""
        start = self.resume.manifest.position if self.resume is not None and self.resume.step == after else None
        following, refused = self.steps.after(after, start), placeholders(self.model.config)
        return (StepBatch(self.dataset, batch.ids, batch.end, batch.digest, refused, self.sees) for batch in following)

    @property
    def num_steps(self) -> int:
        """Number of steps of the whole run."""
        return self.steps.num_steps

    @property
    def warmup_steps(self) -> int:
        """Number of steps over which the learning rate grows."""
        return warmup_steps(self.config.optimizer, self.num_steps)

    def eval_batches(self) -> Iterator[StepBatch]:
        """Yield the batches of one evaluation: the eval data once, in batches of the run's size."""
        if self.eval_dataset is None:
            return iter(())
        once = self.config.model_copy(update={"steps": None, "epochs": 1})
        refused = placeholders(self.model.config)
        return (
            StepBatch(self.eval_dataset, each.ids, placeholders=refused, sees=self.sees)
            for each in Batches(self.eval_dataset, once)
        )

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest sequence of the data and the eval data."""
        return max(int(each.lengths.max()) for each in (self.known, self.eval_dataset) if each is not None)

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens of a global batch."""
        return self.steps.most_tokens

    def measures_at_start(self, layout: str) -> bool:
        """Return whether the machine is measured before the first step: if asked for, or in a long run.

        layout: layout of the parameters. All ranks agree: a run's seconds are estimated from lengths and one named
        device.
        """
        # Some measurements involve few ranks, and all need whole models.
        if layout != "zero1" or self.config.stages > 1:
            return False
        device = _ANY_GPU if self.gpus else "cpu"  # the same on all ranks, whose devices may differ
        is_long = self._seconds_of_a_step(device) * self.num_steps > _MEASURED_RUN * MEASURING_SECONDS
        measurements = self.config.measurements
        return measurements == MEASURE_AT_START or (measurements is None and is_long and self.steps.is_known)

    @property
    def estimated_step_seconds(self) -> float:
        """Estimated seconds of a step on this device, without waits."""
        return self._seconds_of_a_step(self.hardware)

    def _seconds_of_a_step(self, device: str) -> float:
        lengths, batch_size = self.steps.drawn_lengths(_PRICED_ROWS), self.config.global_batch
        sequences = batch_size.sequences or batch_size.tokens / lengths.mean()
        trained = self.trained
        of_model = {"adapters": trained.trained, "quantization": trained.quantization}
        cost = base_cost(trained.shape, device, precision=self.config.precision, **of_model)
        once = float(cost.compute_seconds(lengths).sum()) / len(lengths)
        return once * sequences / self.ranks

    @property
    def hardware(self) -> str:
        """Name of the hardware whose costs are used without measurements."""
        return hardware_of_gpu(self.gpu_name or "a GPU")[0] if self.gpus else "cpu"

    def refuse_plan(self, plan: Plan) -> None:
        """Raise PlanError, or Problems, for a plan that the ranks of this run cannot run."""
        refuse_unsupported(plan, num_heads=self.trained.shape.heads, cut=self.config.cut)
