"""Everything a run needs, checked before any process starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import torch

from lengthwise.comm import world_from_environment
from lengthwise.config import MEASURE_AT_START, MEASURE_NOTHING, DataSource, RunConfig
from lengthwise.core.errors import Collector, ConfigError, DataError
from lengthwise.core.measurements import Precision
from lengthwise.core.plan import Plan
from lengthwise.cost import Cost, hardware_of_gpu, logits_at_once, shape_from_config
from lengthwise.cost.measured import base_cost, cost_from_measurements
from lengthwise.data import Batches, Dataset, Tokenizer, check_fits, check_positions, load_dataset, load_tokenizer
from lengthwise.engine.activations import check_offload
from lengthwise.engine.batch import StepBatch
from lengthwise.engine.memory import free_bytes
from lengthwise.engine.schedule import check_steps, warmup_steps
from lengthwise.models import (
    DTYPES,
    Computing,
    ModelSource,
    check_buildable,
    check_computing,
    check_lora,
    check_model_config,
    check_recompute,
    check_weights,
    find_model,
    position_limit,
)
from lengthwise.planner import PACKED_DP, PlanOptions
from lengthwise.planner.service.rank_memory import Capacities
from lengthwise.planner.service.step_planning import StepPlanning
from lengthwise.program import refuse_unsupported
from lengthwise.report.figures import count
from lengthwise.run.caching import data_cache
from lengthwise.run.defaults import settle
from lengthwise.run.launch import threads_of_each
from lengthwise.run.resume import Resume
from lengthwise.run.stages import check_cut, check_ranks

_UNMEASURED_TOKENS = 4096
MEASURING_SECONDS = 8.0  # that measuring before the first step takes, about
_ANY_GPU = "h100"
_MEASURED_RUN = 20.0  # times that, from which a run is measured unasked


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked run, the same on every rank.

    `gpus`: how many GPUs of a machine it uses; 0: it computes on the CPU. `gpu_name`: that of the first. `adapters`:
    parameters that train in place of the model's own; None: all train. `measured_cost`: of the run's file of
    measurements; None: it names none. `measured_capacities`: of `capacity_tokens: auto`, once they are known.
    `resume`: what the run goes on from; None: it starts. `chosen`: keys whose defaults depend on model and device, with
    the reason.
    """

    config: RunConfig
    ranks: int
    model: ModelSource
    dataset: Dataset
    eval_dataset: Dataset | None
    tokenizer: Tokenizer | None
    timeout_seconds: float
    gpus: int = 0
    gpu_name: str | None = None
    adapters: int | None = None
    measured_cost: Cost | None = None
    measured_capacities: Capacities | None = None
    resume: Resume | None = None
    chosen: Mapping[str, str] = field(default_factory=dict)

    @property
    def replicas(self) -> int:
        """Over how many ranks a plan cuts sequences: each is a pipeline of `stages` ranks."""
        return self.ranks // self.config.stages

    def batches(self, *, after: int = 0) -> Iterator[StepBatch]:
        """Yield the global batches of the run, in order, those of the first `after` steps left out."""
        following = islice(Batches(self.dataset, self.config), after, None)
        return (StepBatch(self.dataset, batch.ids) for batch in following)

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return Batches(self.dataset, self.config).num_steps

    @property
    def warmup_steps(self) -> int:
        """Steps over which the learning rate grows."""
        return warmup_steps(self.config.optimizer, self.num_steps)

    def eval_batches(self) -> Iterator[StepBatch]:
        """Yield the batches of one evaluation: the eval data once, in steps of the run's size."""
        if self.eval_dataset is None:
            return iter(())
        once = self.config.model_copy(update={"steps": None, "epochs": 1})
        return (StepBatch(self.eval_dataset, batch.ids) for batch in Batches(self.eval_dataset, once))

    @property
    def logits_at_once(self) -> int | None:
        """How many logits the loss makes at once; None: all of a microbatch."""
        if self.config.loss != "chunked":
            return None
        return logits_at_once(self.model.config.vocab_size, on_gpus=self.gpus > 0)

    @property
    def precision(self) -> Precision:
        """What the run computes in."""
        assert self.config.precision != "auto", "run.defaults fills it in"
        return self.config.precision

    @property
    def computing(self) -> Computing:
        """How the model computes, by the run file."""
        return _computing(self.config)

    @property
    def num_heads(self) -> int:
        """How many attention heads the model has, which a plan may split."""
        return shape_from_config(self.model.config.to_dict()).heads

    @property
    def capacities(self) -> Mapping[str, int]:
        """The tokens that a rank holds by the kinds of recomputation to choose from.

        Those of the run file or measured; before anything was, as many as the longest sequence needs on these ranks.
        """
        if self.measured_capacities is not None:
            return self.measured_capacities.plain
        kind, tokens = self.config.recompute, self.config.capacity_tokens
        if tokens == "auto":
            tokens = max(_UNMEASURED_TOKENS, -(-self.longest_tokens // self.replicas))
        return {"none" if kind == "auto" else kind: tokens}

    def with_capacities(self, capacities: Capacities) -> Job:
        """Return the job with capacities that were measured."""
        return replace(self, measured_capacities=capacities)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest sequence of the data, and of the eval data."""
        return max(int(each.lengths.max()) for each in (self.dataset, self.eval_dataset) if each is not None)

    @property
    def most_tokens(self) -> int:
        """The most tokens that a global batch of this run can have."""
        lengths, asked = np.sort(self.dataset.lengths[self.dataset.ids])[::-1], self.config.global_batch
        if asked.tokens is not None:
            return max(int(lengths[0]), asked.tokens)
        copies = Batches(self.dataset, self.config).most_copies
        return int(np.repeat(lengths[: asked.sequences], copies)[: asked.sequences].sum())

    @property
    def measures_at_start(self) -> bool:
        """Whether the machine is measured before the first step: where that is asked for, or a small part of the run.

        The same on all ranks: a run's seconds are estimated from lengths and a device that is the same for all.
        """
        device = _ANY_GPU if self.gpus else "cpu"  # not this rank's own: ranks may have different ones
        is_long = self._seconds_of_a_step(device) * self.num_steps > _MEASURED_RUN * MEASURING_SECONDS
        asked = self.config.measurements
        # Some measurements are of a few ranks, which alone would wait for the others; and all are of whole models.
        if self.shard != "zero1" or self.config.stages > 1:
            return False
        return asked == MEASURE_AT_START or (asked is None and is_long)

    @property
    def measures(self) -> bool:
        """Whether steps are planned by what was measured, and corrected by what they took."""
        return self.measures_at_start or self.measured_cost is not None

    @property
    def estimated_step_seconds(self) -> float:
        """What a step takes, roughly: by estimates for this device, without waits."""
        return self._seconds_of_a_step(self.hardware)

    def _seconds_of_a_step(self, device: str) -> float:
        """What a step computes, by estimates for a device, evenly over all ranks."""
        lengths, asked = self.dataset.lengths[self.dataset.ids], self.config.global_batch
        sequences = asked.sequences or asked.tokens / lengths.mean()
        shape = shape_from_config(self.model.config.to_dict())
        cost = base_cost(shape, device, precision=self.config.precision, adapters=self.adapters)
        once = float(cost.compute_seconds(lengths).sum()) / len(lengths)
        return once * sequences / self.ranks

    @property
    def shard(self) -> str:
        """How parameters lie over the ranks: zero1, zero3 or hybrid; on one node the last two are the same."""
        within = self.config.ranks_in_step(self.ranks)
        if within == self.ranks:
            return "zero1" if self.ranks == 1 else "zero3"
        return "hybrid" if self.config.shard == "hybrid" else "zero1"

    @property
    def hardware(self) -> str:
        """The named hardware whose costs count where none were measured."""
        return hardware_of_gpu(self.gpu_name or "a GPU")[0] if self.gpus else "cpu"

    @property
    def hardware_note(self) -> str | None:
        """What to say where steps are priced as another device than this one; None: nothing."""
        if not self.gpus or self.measures:
            return None
        return hardware_of_gpu(self.gpu_name or "a GPU")[1]

    @property
    def planning(self) -> StepPlanning:
        """What plans the steps of this run."""
        config, shape = self.config, shape_from_config(self.model.config.to_dict())
        ratio = config.offload.ratio if config.offload else "off"
        stages = config.stages
        return StepPlanning(
            ranks=self.replicas,
            cost=self.measured_cost
            or base_cost(shape, self.hardware, precision=config.precision, adapters=self.adapters, stages=stages),
            capacities=self.capacities,
            measured=self.measured_capacities,
            options=PlanOptions(
                planner=config.planner,
                mode="pipeline" if stages > 1 else config.plan_mode(self.ranks),
                stages=stages if stages > 1 else None,
                virtual=config.virtual if stages > 1 else None,
                layers=self.model.config.num_hidden_layers,
                context_tokens=int(self.dataset.lengths.max()),
                offload=ratio if isinstance(ratio, str) else "off",
                heads=config.heads,
            ),
            offload_ratio=None if isinstance(ratio, str) else ratio,
        )

    def refuse_plan(self, plan: Plan) -> None:
        """Raise PlanError, or Problems, for a plan that the ranks of this run cannot run."""
        config = self.config
        refuse_unsupported(plan, num_heads=self.num_heads, stages=config.stages, virtual=config.virtual)

    def make_plan(self, lengths: Sequence[int]) -> Plan:
        """Plan one step here and now, and check the plan before anyone runs it."""
        plan = self.planning.plan(lengths)
        self.refuse_plan(plan)
        return plan


def prepare_job(
    config: RunConfig,
    *,
    ranks: int,
    timeout_seconds: float,
    gpus: int = 0,
    gpu_name: str | None = None,
    resume: Resume | None = None,
    chosen: Mapping[str, str] | None = None,
) -> Job:
    """Find the model, read the data and check one against the other.

    Raises:
        LengthwiseError: all problems at once.
    """
    collector = Collector()
    attempt = collector.attempt
    config, settled = settle(config, gpus=gpus)
    model = attempt(lambda: find_model(config.model, weights=config.weights))
    vocab_size = getattr(model.config, "vocab_size", None) if model else None
    loaded: list[Tokenizer] = []

    def tokenizer() -> Tokenizer:
        if not loaded:
            loaded.append(load_tokenizer(config.tokenizer_name))
        return loaded[0]

    def read(sources: Sequence[DataSource], key: str) -> Dataset | None:
        def load() -> Dataset:
            ready = sources if cache is None else cache.prepared(sources, key)
            return load_dataset(ready, tokenizer=tokenizer, vocab_size=vocab_size, key=key)

        return attempt(load)

    cache = data_cache(config.tokenizer_name, tokenizer, vocab_size, timeout_seconds)
    dataset = read(config.data, "data")
    eval_dataset = read(config.eval.data, "eval.data") if config.eval and config.eval.data else None
    positions = position_limit(model.config) if model else None
    capacity, cuts = config.capacity_tokens, config.planner != PACKED_DP
    attempt(lambda: check_ranks(config, ranks))
    sizes = {"ranks": max(1, ranks // config.stages), "stages": config.stages}
    for each in filter(None, (dataset, eval_dataset)):
        if capacity != "auto" and config.offload is None:
            attempt(lambda each=each: check_fits(each, **sizes, capacity_tokens=capacity, cuts=cuts))
        if positions is not None:
            attempt(lambda each=each: check_positions(each, positions=positions))
    if dataset is not None:
        attempt(lambda: check_steps(config.optimizer, Batches(dataset, config).num_steps))
        if resume is not None:
            attempt(lambda: resume.check_within(Batches(dataset, config).num_steps))
    adapters, cost = None, None
    if model:
        adapters = _check_model(config, model, collector, gpus=gpus)
        if adapters is not None or config.lora is None:  # else what trains is not known
            cost = attempt(lambda: _measured_cost(config, model, ranks=ranks, gpus=gpus, adapters=adapters))
    collector.raise_all()
    assert model is not None, "a model that was not found must have been a problem"
    assert dataset is not None, "data that was not read must have been a problem"
    job = Job(
        config=config,
        ranks=ranks,
        model=model,
        dataset=dataset,
        eval_dataset=eval_dataset,
        tokenizer=loaded[0] if loaded else None,
        timeout_seconds=timeout_seconds,
        gpus=gpus,
        gpu_name=gpu_name,
        adapters=adapters,
        measured_cost=cost,
        resume=resume,
        chosen=chosen or settled,
    )
    if capacity != "auto" and config.offload is not None:  # how much more a rank holds then is the model's matter
        sizes = {"ranks": ranks, "capacity_tokens": capacity, "held_tokens": job.planning.most_held_tokens}
        for each in filter(None, (dataset, eval_dataset)):
            attempt(lambda each=each: check_fits(each, **sizes, cuts=cuts))
    collector.raise_all()
    _check_losses(job)
    return job


def _check_model(config: RunConfig, model: ModelSource, collector: Collector, *, gpus: int) -> int | None:
    """Collect what keeps the model from being trained so; return how many parameters of adapters train, if any."""
    attempt, refused = collector.attempt, len(collector.problems)
    attempt(lambda: check_model_config(model.config))
    if len(collector.problems) == refused:
        parameters = attempt(lambda: check_buildable(model.config))
        if not (gpus and model.weights and config.shard != "zero1"):  # ranks read their own rows of them
            attempt(lambda: check_room(model, parameters or 0))
    if len(collector.problems) > refused:
        return None
    attempt(lambda: check_weights(model))
    if config.recompute != "auto":
        attempt(lambda: check_recompute(model.config, config.recompute))
    dtype = DTYPES[config.precision]
    attempt(lambda: check_computing(model.config, _computing(config), dtype=dtype, on_gpus=gpus > 0))
    attempt(lambda: _check_heads(config, model))
    if config.stages > 1:
        attempt(lambda: check_cut(config, model))
    attempt(lambda: check_offload(config.offload, model.config.num_hidden_layers, on_gpus=gpus > 0))
    return attempt(lambda: check_lora(model, config.lora))


def check_room(model: ModelSource, parameters: int) -> None:
    """Refuse a model whose parameters alone, in fp32 as they are read or drawn, are more than this machine holds."""
    needed, free = 4 * parameters, free_bytes(torch.device("cpu"), 1)
    if 0 < free < needed:
        expected = f"a model whose parameters fit into the {free / 1e9:.1f} GB that are free here"
        got, remedy = f"{count(parameters)} parameters, {needed / 1e9:.1f} GB in fp32", "Give a smaller model."
        raise ConfigError(f"model {model.name}", expected=expected, got=got, remedy=remedy)


def _computing(config: RunConfig) -> Computing:
    return Computing(
        attention=config.attention,
        compile=config.compile,
        fused_layers=config.fused_layers,
        experts=config.experts,
    )


def _measured_cost(
    config: RunConfig, model: ModelSource, *, ranks: int, gpus: int, adapters: int | None
) -> Cost | None:
    """Read the costs of the run's file of measurements; None where it names none.

    Threads count where several ranks are started here, on the CPU: other launchers decide them.
    """
    if config.measurements in (None, MEASURE_AT_START, MEASURE_NOTHING):
        return None
    shape = shape_from_config(model.config.to_dict())
    known = ranks > 1 and not gpus and world_from_environment() is None
    threads = threads_of_each(ranks) if known else None
    return cost_from_measurements(
        config.measurements,
        shape,
        precision=config.precision,
        threads=threads,
        adapters=adapters,
        on_gpus=gpus > 0,
    )


def _check_heads(config: RunConfig, model: ModelSource) -> None:
    """Refuse groups of heads that the model cannot be split in, whatever the ranks."""
    heads = shape_from_config(model.config.to_dict()).heads
    if isinstance(config.heads, int) and heads % config.heads:
        expected = f"auto, off, or a number that divides the model's {heads} heads"
        raise ConfigError("heads", expected=expected, got=f"{config.heads}", remedy="Set heads: auto.")


def _check_losses(job: Job) -> None:
    """Find what has no loss token now, not hours in; only data with such sequences can have it."""
    if not job.dataset.loss_tokens[job.dataset.ids].all():
        first, number = Batches(job.dataset, job.config).steps_of_zero(job.dataset.loss_tokens)
        if first is not None:
            where = f"step {first.step}" + (f" and {number - 1} more" if number > 1 else "")
            got = f"none in sequences {', '.join(map(str, first.ids[:10]))}{' ...' if len(first.ids) > 10 else ''}"
            remedy = "Enlarge global_batch, or leave out sequences of one token and fully masked ones."
            raise DataError(where, expected="at least one token with a label in a global batch", got=got, remedy=remedy)
    if job.eval_dataset is not None and not job.eval_dataset.loss_tokens.any():
        remedy = "Give eval data with labels, or leave eval out."
        raise DataError("eval.data", expected="at least one token with a label", got="none", remedy=remedy)
