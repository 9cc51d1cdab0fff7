"""`verify`: compare a planned step on N ranks with plain Hugging Face in one process, on the user's model and data.

The batch (`run.verify_batch`) runs once over N ranks under its plan, on the path of training up to the reduced
gradient, and once through the plain Hugging Face model with its own attention, one sequence at a time. For bf16 the
reference is fp32 at the rounded parameters, and plain bf16 shows the effect of rounding alone (`rounding`). Two more
checks find errors below rounding: the same plan in fp32, and the sums of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lengthwise.attention import activate_flash
from lengthwise.attention.heads import shares_keys
from lengthwise.comm import Transport, World
from lengthwise.config import OptimizerConfig
from lengthwise.core.plan import Plan
from lengthwise.engine.batch import StepBatch
from lengthwise.engine.placing import trainable
from lengthwise.engine.shortage import reporting_shortage
from lengthwise.models import DTYPES, build_adapted, has_states, keep_double, plain_attention, stop_dropping
from lengthwise.planner.service.step_planning import StepPlanning
from lengthwise.program import HeadRange
from lengthwise.run.building import laid_out, open_session
from lengthwise.run.job import Job
from lengthwise.run.reference import Reference, plain_gradients
from lengthwise.run.rounding import SUMS_TOLERANCE, TOLERANCES, Difference, Rounding, plain_kernels, rounding_of
from lengthwise.run.verify_batch import VerifyBatch, held_before_measuring
from lengthwise.session import Session
from lengthwise.session.runner import StepEnd
from lengthwise.session.source import PlannedStep

_FLOOR = 1e-3
_NOT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # in order of preference


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """Relative differences between N ranks and one process.

    `router_loss` is the routers' balance loss over the batch, or 0 without one. `gradients` has |difference| /
    max(|reference|, 1e-3 of the median parameter's norm), L2, by parameter. `rounding` is the effect of rounding alone,
    to which the tolerance is added, for bf16 and for models with states. `notes` name kernel and transport, and why.
    `uncut` says how to get a cut sequence, if the batch had none. `shared_keys` has the sizes of groups that split
    heads in which several ranks share a head of keys. `images` has the number of images compared, and of those in
    rings; None if no row of the data has any. In bf16 `in_fp32` compares the same plan in fp32, and `sums` has
    the differences of the gradients' sums, over microbatches and ranks, from independent sums.
    """

    plan: Plan
    loss: float
    reference_loss: float
    gradients: dict[str, float]
    tolerance: float
    router_loss: float = 0.0
    reference_router_loss: float = 0.0
    rounding: Rounding | None = None
    notes: tuple[str, ...] = ()
    uncut: str | None = None
    shared_keys: tuple[int, ...] = ()
    images: tuple[int, int] | None = None
    in_fp32: VerifyReport | None = None
    sums: Mapping[str, float] = field(default_factory=dict)

    @property
    def loss_difference(self) -> float:
        """Relative difference of the losses."""
        return relative_difference(self.loss, self.reference_loss)

    @property
    def router_loss_difference(self) -> float:
        """Relative difference of the router losses."""
        return relative_difference(self.router_loss, self.reference_router_loss)

    @property
    def worst_gradient(self) -> float:
        """Largest difference of a gradient; NaN counts as infinite."""
        return max(float("inf") if difference != difference else difference for difference in self.gradients.values())

    @property
    def passed(self) -> bool:
        """Whether losses and all gradients are within the allowed differences."""
        rounding = self.rounding
        within_loss = self.loss_difference <= self._allowed(rounding and rounding.loss)
        within_router_loss = self.router_loss_difference <= self._allowed(rounding and rounding.router_loss)
        gradients = all(difference <= self.allowed(name) for name, difference in self.gradients.items())
        sums = all(difference <= SUMS_TOLERANCE for difference in self.sums.values())
        in_fp32 = self.in_fp32 is None or self.in_fp32.passed
        return within_loss and within_router_loss and gradients and sums and in_fp32

    def allowed(self, parameter: str) -> float:
        """Return the allowed difference of a parameter's gradient."""
        return self._allowed(self.rounding and self.rounding.gradients[parameter])

    def _allowed(self, by_rounding: float | None) -> float:
        return self.tolerance + (0.0 if self.rounding is None else self.rounding.allows(by_rounding or 0.0))


def relative_difference(got: float, expected: float) -> float:
    """Return |got - expected| / |expected|; 0 where both are 0."""
    return abs(got - expected) / max(abs(expected), 1e-30)


def verify_rank(
    job: Job,
    world: World,
    transport: Transport,
    batch_of: Callable[[Job, StepPlanning], VerifyBatch],
    *,
    on_start: Callable[[VerifyBatch], None],
    on_phase: Callable[[str], None],
    notes: list[str],
) -> VerifyReport | None:
    """Compute the planned and the plain step and compare, on rank 0; other ranks return None after their gradients.

    Closes the transport. batch_of: function that makes the batch, alike on all ranks, from the job and the planning of
    its steps. notes: first notes of the report.
    """
    with reporting_shortage(
        lambda: f"rank {world.rank}, verify",
        needs=lambda: "the planned and the plain model with their gradients (in bf16 three models)",
        remedy="Verify a smaller model of the same kind.",
    ):
        session = _open(job, world, transport, notes.append)
        check = batch_of(laid_out(job, session), session.planning.ahead)
        on_start(check)
        return _compare(check, session, world, on_phase, notes)


def _compare(
    check: VerifyBatch, session: Session, world: World, on_phase: Callable[[str], None], notes: list[str]
) -> VerifyReport | None:
    job, batch, plan, transport = check.job, check.batch, check.plan, session.engine.transport
    planned, sums = _run_plan(session, job, plan, batch)
    in_fp32 = None
    if job.config.precision == "bf16":
        exact = replace(job, config=job.config.model_copy(update={"precision": "fp32"}))
        again = _open(exact, world, transport, lambda _: None)
        in_fp32, _ = _run_plan(again, exact, plan, batch, rounds_to=torch.bfloat16)
    transport.close()
    if world.rank:
        return None
    reference, roundings = _expected(job, batch, world.device, on_phase)

    def report(found: Reference, precision: str, **more: Any) -> VerifyReport:
        return VerifyReport(
            plan=plan,
            loss=found.loss,
            reference_loss=reference.loss,
            router_loss=found.router_loss,
            reference_router_loss=reference.router_loss,
            gradients=gradient_differences(found.gradients, reference.gradients),
            tolerance=TOLERANCES[precision],
            rounding=roundings.get(precision),
            **more,
        )

    return report(
        planned,
        job.config.precision,
        notes=tuple(notes),
        uncut=None if plan.ring_tokens else _how_to_cut(job, batch),
        shared_keys=_shared_keys(job, plan),
        images=_images(job, plan, batch) if job.sees is not None else None,
        in_fp32=None if in_fp32 is None else report(in_fp32, "fp32"),
        sums=sums,
    )


def _images(job: Job, plan: Plan, batch: StepBatch) -> tuple[int, int]:
    """Return the number of images of a batch, and of those in rings."""
    pieces = [piece for microbatch in plan.microbatches for piece in microbatch.pieces]
    ring = {sequence for piece in pieces if piece.degree > 1 for sequence in piece.sequences}
    counts = [len(job.dataset.images(row)) for row in batch.ids]
    return sum(counts), sum(count for sequence, count in enumerate(counts) if sequence in ring)


def _shared_keys(job: Job, plan: Plan) -> tuple[int, ...]:
    shape = job.trained.shape
    groups = sorted({piece.heads for microbatch in plan.microbatches for piece in microbatch.pieces} - {1})
    return tuple(n for n in groups if shares_keys(HeadRange(part=0, parts=n), shape.heads, shape.kv_heads))


class _Comparison(StepEnd):
    """The end of a step that accepts values that are not finite."""

    def accepts(self, step: int, what: str, value: float, sequences: Sequence[int]) -> bool:
        del step, what, value, sequences
        return True


def _open(job: Job, world: World, transport: Transport, say: Callable[[str], None]) -> Session:
    """Open the session of a run whose parameters are not updated, so that its optimizer needs no states."""
    optimizer = OptimizerConfig.model_validate({"name": "sgd", "offload": job.config.optimizer.offload})
    settings = {"optimizer": optimizer, "capacity_tokens": held_before_measuring(job)}
    job = replace(job, config=job.config.model_copy(update=settings))
    session = open_session(job, world, transport, say=say, draws_both=True)
    if stop_dropping(session.engine.model):
        say("dropout is off in this comparison: what it drops follows the plan")
    return session


def _run_plan(
    session: Session, job: Job, plan: Plan, batch: StepBatch, *, rounds_to: torch.dtype | None = None
) -> tuple[Reference, Mapping[str, float]]:
    """Run the batch as a step of a session, and close it; return its results, whole on rank 0.

    rounds_to: dtype to which parameters are rounded first. The second result is `VerifyReport.sums`.
    """
    dtype, transport = DTYPES[job.config.precision], session.engine.transport
    parameters, engine = session.optimizer.parameters, session.engine
    if rounds_to is not None:
        parameters.published()
        for values in filter(torch.is_floating_point, parameters.read_by_forward()):
            values.copy_(values.to(rounds_to))
    session.runner.end = _Comparison()
    planned = PlannedStep(batch=batch, plan=plan, plan_seconds=0.0)
    is_whole = session.shard == "zero1" and job.config.stages == 1
    with keep_double(dtype), _summing(engine.model, enabled=dtype == torch.bfloat16 and is_whole) as own:
        result = session.backward(planned)
    transport.phase = "verify, gathering gradients"
    gradients = parameters.gather_gradients()
    for sum_of_rank in own.values():
        transport.all_reduce(sum_of_rank)
    session.close()
    found = Reference(loss=result.loss, router_loss=result.router_loss or 0.0, gradients=gradients)
    on_host = {name: gradient.cpu() for name, gradient in gradients.items()} if own else {}
    return found, gradient_differences(on_host, own) if own else {}


def _add(total: Tensor, grad: Tensor) -> None:
    total.add_(grad.cpu())


@contextmanager
def _summing(model: nn.Module, *, enabled: bool) -> Iterator[dict[str, Tensor]]:
    """Sum the gradients of backwards inside the block, in fp32 on the host, by trainable parameter; {} if not asked."""
    sums: dict[str, Tensor] = {}
    hooks = []
    for name, parameter in trainable(model) if enabled else ():
        sums[name] = torch.zeros(parameter.shape, dtype=torch.float32)
        hooks.append(parameter.register_hook(partial(_add, sums[name])))
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()


def _how_to_cut(job: Job, batch: StepBatch) -> str:
    """Return settings that cut a sequence; every sequence of the data must still fit all ranks together."""
    longest = max(batch.lengths)
    if job.replicas == 1:
        return f"Give --ranks {2 * job.config.stages} or more."
    if longest < job.replicas:
        return f"Give data with longer sequences: the longest of this batch has {longest} tokens."
    name = job.dataset.name(batch.ids[batch.lengths.index(longest)])
    capacity = max(3 * longest // 4, -(-job.longest_tokens // job.replicas) + 1)  # + 1: ranks get whole chunks
    if capacity < longest:
        return f"To cut {name}, of {longest} tokens, add --set planner=lengthwise capacity_tokens={capacity}"
    return (
        f"The longest sequence of this batch, {name}, has {longest} tokens, the longest of the data "
        f"{job.longest_tokens}. Use another seed or a larger global_batch, so that the first batch has a longer one."
    )


def _expected(
    job: Job, batch: StepBatch, device: torch.device, on_phase: Callable[[str], None]
) -> tuple[Reference, dict[str, Rounding]]:
    """Compute the reference in one process, and the effect of rounding, by precision, if it decides.

    The reference of bf16 is fp32 at the rounded parameters. That of a model with states is fp64, as is that of towers
    that train, whose biases of keys have a gradient of rounding alone.
    """
    first, dtype, config = plain_attention(job.model), DTYPES[job.config.precision], job.model.text
    needs_double = has_states(config) or job.model.trains_towers
    exact = "fp64" if job.config.precision == "fp64" or needs_double else "fp32"
    size = {"heads": config.num_attention_heads, "layers": config.num_hidden_layers}

    def gradients_of(precision: str, kernel: str) -> Reference:
        model = _build(job, attention=first if kernel == "flash" else kernel).to(device)
        rounded = [each for each in model.parameters() if each.is_floating_point() and dtype == torch.bfloat16]
        for parameter in rounded:
            parameter.data = parameter.data.to(dtype).float()
        with sdpa_kernel(_NOT_CUDNN) if kernel == "flash" else nullcontext():
            return plain_gradients(
                model,
                job.dataset,
                batch.ids,
                DTYPES[precision],
                processor=job.config.tokenizer_name,
                image_options=job.sees.pixels.processor.cut.options if job.sees is not None else {},
                on_phase=lambda at: on_phase(f"one process, {precision}, {kernel}, {at}"),
            )

    activate_flash(None)  # plain models would otherwise call the planned model's kernel
    reference, roundings = gradients_of(exact, first), dict[str, Rounding]()
    for precision in ("bf16", "fp32"):
        if not dtype.itemsize <= DTYPES[precision].itemsize < DTYPES[exact].itemsize:
            continue
        found = dict[str, Difference]()
        for name in plain_kernels(first, longest=max(batch.lengths), on_gpu=device.type != "cpu", **size):
            got = gradients_of(precision, name)
            found[name] = Difference(
                loss=relative_difference(got.loss, reference.loss),
                router_loss=relative_difference(got.router_loss, reference.router_loss),
                gradients=gradient_differences(got.gradients, reference.gradients),
            )
        roundings[precision] = rounding_of(found, precision=precision, exact=exact)
    return reference, roundings


def _build(job: Job, **options: Any) -> nn.Module:
    """Build the job's model with both matrices of adapters random: beside zeros half of them have no gradient."""
    model = build_adapted(job.model, job.config.lora, seed=job.config.seed, draws_both=True, **options)
    stop_dropping(model)
    return model


def gradient_differences(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative L2 difference of each tensor, floored by 1e-3 of the median tensor's norm."""
    norms = {name: tensor.double().norm().item() for name, tensor in expected.items()}
    floor = _FLOOR * sorted(norms.values())[len(norms) // 2]
    return {
        name: (gradients[name].double() - tensor.double()).norm().item() / max(norms[name], floor, 1e-300)
        for name, tensor in expected.items()
    }
