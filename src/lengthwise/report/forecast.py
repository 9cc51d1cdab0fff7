"""How long `verify` will take and how much memory, said before it starts: from shapes, lengths and a quick calibration.

Seconds: the busiest rank under costs of this machine, all local ranks sharing its cores; the same sequences one by one
on rank 0; and drawing, copying and reducing the parameters. Bytes: values, gradients and slices of a rank and its
largest microbatch; then, on rank 0, a whole plain model and the longest sequence besides. An estimate: it only warns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lengthwise.core.held import fullest_tokens
from lengthwise.core.plan import Plan
from lengthwise.core.shape import ModelShape
from lengthwise.cost import DTYPE_BYTES, LOGITS_AT_ONCE, Cost, StepMemory, state_bytes
from lengthwise.cost.analytic import flops_coefficients
from lengthwise.cost.memory import wide_bytes
from lengthwise.planner import score
from lengthwise.report.figures import count, seconds

_BUILD_PASSES = 30  # reads and writes of each parameter's bytes from an empty process to a reduced gradient
_RANK_BYTES = 60e6  # what a forked rank has of its own before any model: its threads, gloo, Python's objects


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadRates:
    """What one thread of a machine does in a second's look at it, and what the machine has.

    linear_flops_per_second, attention_flops_per_second: in the precision of the run, forward and backward.
    copy_bytes_per_second: read and written, of large tensors. draw_per_second: normal random numbers.
    layer_seconds: what a layer costs however few tokens it has, forward and backward.
    process_bytes: what a process holds before any model. memory_bytes: of the machine; None: not known.
    """

    cores: int
    linear_flops_per_second: float
    attention_flops_per_second: float
    copy_bytes_per_second: float
    draw_per_second: float
    layer_seconds: float
    process_bytes: float
    memory_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Seconds of the three parts, and bytes: of the ranks of this machine together, then of rank 0 alone."""

    build_seconds: float
    planned_seconds: float
    plain_seconds: float
    planned_bytes: float
    plain_bytes: float
    local_ranks: int

    @property
    def total_seconds(self) -> float:
        """From start to verdict."""
        return self.build_seconds + self.planned_seconds + self.plain_seconds

    @property
    def peak_bytes(self) -> float:
        """The most that this machine holds at one time."""
        return max(self.planned_bytes, self.plain_bytes)


def forecast_verification(
    shape: ModelShape,
    plan: Plan,
    speed: ThreadRates,
    *,
    parameters: int,
    precision: str,
    local_ranks: int,
    eager: bool = False,
    logits_at_once: int | None = LOGITS_AT_ONCE,
) -> Forecast:
    """Estimate `verify` of a plan on `local_ranks` processes of this machine.

    `parameters` is the model's true count; where it differs from the shape's, linear work is scaled by it. `eager`:
    the plain model keeps whole score matrices.
    """
    narrow = DTYPE_BYTES[precision]
    wide = wide_bytes(narrow)
    threads = max(1, speed.cores // local_ranks)
    waits = max(1.0, local_ranks / speed.cores)
    cost = _cost(shape, speed, threads, parameters)
    memory = StepMemory(shape=shape, dtype_bytes=narrow, logits_at_once=logits_at_once)
    model = state_bytes(parameters, dtype_bytes=narrow, ranks=plan.ranks, moments=False)  # there is no optimizer
    tokens = max(lengths := plan.tokens)
    rounds = precision == "bf16"  # plain models then run in fp32 and, to know what rounding does, twice in bf16
    widest = wide if rounds else narrow
    scores = 2 * shape.layers * shape.heads * tokens**2 * wide * eager
    plain = parameters * (widest + (3 + rounds) * wide) + scores
    plain += float(replace(memory, dtype_bytes=widest, logits_at_once=None).microbatch_bytes(tokens))
    passes = _BUILD_PASSES * wide * parameters / (speed.copy_bytes_per_second * threads)
    held = max(
        float(memory.microbatch_bytes(fullest_tokens(plan, each), each.recompute, each.offload))
        for each in plan.microbatches
    )
    return Forecast(
        build_seconds=(passes + parameters / speed.draw_per_second) * (waits + 1),
        planned_seconds=max(_busy_seconds(_as_priced(plan), cost)) * waits,
        plain_seconds=(1 + 2 * rounds) * sum(cost.piece_seconds([each], 1) + cost.fixed_seconds for each in lengths),
        planned_bytes=speed.process_bytes + local_ranks * (_RANK_BYTES + model + held),
        plain_bytes=speed.process_bytes + _RANK_BYTES + model + parameters * wide + plain,
        local_ranks=local_ranks,
    )


def _as_priced(plan: Plan) -> Plan:
    """Leave out what the five coefficients do not price: copies, and the exchange of split heads."""
    microbatches = tuple(
        replace(each, offload=0.0, pieces=tuple(replace(piece, heads=1) for piece in each.pieces))
        for each in plan.microbatches
    )
    return replace(plan, microbatches=microbatches)


def forecast_lines(forecast: Forecast, memory_bytes: float | None) -> list[str]:
    """Say what to expect, and warn where the machine has less memory than that."""
    plan, one, models = (
        seconds(each) for each in (forecast.planned_seconds, forecast.plain_seconds, forecast.build_seconds)
    )
    together, alone = count(forecast.planned_bytes), count(forecast.plain_bytes)
    lines = [
        f"expected, roughly: {seconds(forecast.total_seconds)} (the plan {plan}, one process {one}, models {models}), "
        "and some seconds in which processes start",
        f"memory, roughly: {count(forecast.peak_bytes)}B on this machine (its {forecast.local_ranks} ranks together "
        f"{together}B, then one process {alone}B)",
    ]
    if memory_bytes is not None and forecast.peak_bytes > memory_bytes:
        lines.append(
            f"warning: this machine has {count(memory_bytes)}B of memory. If a rank is killed, try fewer --ranks, a "
            "smaller global_batch or capacity_tokens, fewer layers, or --set precision=fp32."
        )
    return lines


def _cost(shape: ModelShape, speed: ThreadRates, threads: int, parameters: int) -> Cost:
    """Make the costs of a rank with so many threads; linear work follows the model's true parameters."""
    linear, attention = flops_coefficients(shape)
    linear *= parameters / shape.total_params
    return Cost(
        quadratic_seconds=attention / (speed.attention_flops_per_second * threads),
        linear_seconds=linear / (speed.linear_flops_per_second * threads),
        fixed_seconds=shape.layers * speed.layer_seconds,
        windows=shape.window_shares,
        version="calibrated",
    )


def _busy_seconds(plan: Plan, cost: Cost) -> tuple[float, ...]:
    """Return how long each rank works, all of one speed, rings in even shares and with all heads."""
    even = tuple(
        replace(each, pieces=tuple(replace(piece, shares=None, heads=1) for piece in each.pieces))
        for each in plan.microbatches
    )
    return score(replace(plan, microbatches=even), cost, speeds=[1.0] * plan.ranks).busy_seconds
