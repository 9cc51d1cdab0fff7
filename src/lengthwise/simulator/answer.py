"""The short answer of a simulation: what people use today, each at its own best settings, against Lengthwise.

Without tensor parallelism or stages: FSDP2 with padding, with packing, and with one size of ring, in lock-step
(`rivals`), packs in the order of a shuffled set or, with one's own sampler, sorted by work; and Lengthwise as it trains
by default: with the fastest layout that fits (hybrid as if all nodes ran in lock-step), microbatches as memory allows.
Settings are tried on the batch of most work; the best run all batches. A few seconds for 8 devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import inf

import numpy as np

from lengthwise.core.errors import ConfigError, MemoryShortage, PlanError
from lengthwise.core.plan import RECOMPUTE_KINDS, Plan
from lengthwise.core.shape import Cluster, ModelShape
from lengthwise.core.timeline import Timeline
from lengthwise.cost import (
    Choice,
    Cost,
    Hardware,
    StepMemory,
    all_terms_cost,
    choose_shard,
    offloaded_cost,
    recompute_capacities,
    sharded_cost,
    sharded_traffic,
    step_memory,
    wanted_tokens,
)
from lengthwise.planner import PLANNING_SHARE, arithmetic_seconds, options_of, plan_step
from lengthwise.simulator.layouts import MOST_RANKS, layout_seconds
from lengthwise.simulator.rivals import LockStep, lock_step, packed, padded, recomputing
from lengthwise.simulator.step import simulate_plan
from lengthwise.simulator.study import needed_bytes, too_large
from lengthwise.simulator.ways import (
    BY_WORK,
    LAYOUTS,
    ONE_RING,
    OURS,
    PACKED,
    PADDED,
    RIVALS,
    Answer,
    WayRow,
    WaySettings,
    WorkSpan,
)

_MORE_MICROBATCHES = (0, 1, 2, 4, 8)  # of packs, than the fewest that hold a batch
_NEAR = 1.005  # of the least time that arithmetic takes: what comes so close is taken for the best
_FILLED = 0.98  # of a pack, as packing whole sequences leaves it


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked: a model on so many devices of a hardware.

    adapters: parameters that train in place of the model's own (LoRA); None: all train. capacity_tokens: of a device,
    with the kinds of recomputation that leave so much. kinds: that may be tried. cost: measured; None: by
    hardware. offloads: the optimizer and its masters are on the host, in all ways.
    """

    shape: ModelShape
    hardware: Hardware
    devices: int
    adapters: int | None = None
    capacity_tokens: int | None = None
    kinds: Sequence[str] = RECOMPUTE_KINDS
    cost: Cost | None = None
    offloads: bool = False

    @cached_property
    def costs(self) -> Cost:
        """Of one device a rank."""
        cost = self.cost or all_terms_cost(self.shape, self.hardware, adapters=self.adapters)
        return offloaded_cost(cost, self.memory("zero1")) if self.offloads else cost

    def costs_of(self, layout: str) -> Cost:
        """Return the costs of ranks whose parameters lie so."""
        if layout == "zero1":
            return self.costs
        group = self.costs.ranks_per_node if layout == "hybrid" else None
        return sharded_cost(self.costs, replace(self.memory("zero3"), ranks=self.devices), group=group)

    def memory(self, layout: str) -> StepMemory:
        """Return what a device holds with parameters that lie so."""
        node = self.hardware.ranks_per_node if self.cost is None else self.cost.ranks_per_node
        whole = step_memory(self.shape, self.hardware, self.devices)
        return replace(whole, shard=layout, ranks_per_node=node, trained=self.adapters, offloads=self.offloads)

    def layouts(self) -> tuple[str, ...]:
        """Return the layouts that differ here."""
        is_node = self.devices <= self.costs.ranks_per_node
        return LAYOUTS[:1] if self.devices == 1 else LAYOUTS[:2] if is_node else LAYOUTS

    def auto(self, batch: Sequence[int], longest: int, rows: Sequence[WayRow]) -> str:
        """Return the layout that a run takes by itself, whose steps take as `rows` say; "": none without offload.

        For more ranks than a run plans when it chooses, by what it goes by, of one batch.
        """
        tokens, kinds = self.capacity_tokens or wanted_tokens(self.devices, longest=longest), self.kinds
        took = {row.layout: row.mean_seconds for row in rows if row.settings and not row.settings.offloads}
        estimated = layout_seconds(
            batch, self.costs, self.hardware.device_bytes, kinds=kinds, capacity_tokens=self.capacity_tokens
        )
        try:
            found = choose_shard(
                self.memory("zero1"),
                self.hardware.device_bytes,
                tokens=tokens,
                kinds=kinds,
                seconds=estimated if self.devices > MOST_RANKS else lambda laid: took.get(laid.shard, inf),
            )
        except MemoryShortage:
            return ""
        return found.shard if found.shard in took else ""

    def capacities(self, layout: str) -> Mapping[str, int]:
        """Return the tokens that a device holds for each kind that leaves room; none: an empty mapping."""
        try:
            fitting = recompute_capacities(self.memory(layout), self.hardware, kinds=self.kinds)
        except ConfigError:
            fitting = {}
        given = self.capacity_tokens
        if given is None:
            return fitting
        return dict.fromkeys([kind for kind, held in fitting.items() if held >= given] or self.kinds, given)


def answer(batches: Sequence[Sequence[int]], question: Question) -> Answer:
    """Compare the four ways on the same batches, entry i of each the length of sequence i in tokens."""
    longest = max(map(max, batches))
    rows = [_rival(name, batches, question) for name in (RIVALS if question.devices > 1 else RIVALS[:-1])]
    if question.devices > 1:
        by_work = [_rival(name, batches, question, in_order=True) for name in (PACKED, ONE_RING)]
        rows.append(replace(_quickest(by_work), name=BY_WORK))
    layouts = compare_layouts(batches, question)
    auto = question.auto(batches[0], longest, layouts)
    taken = [row for row in layouts if auto and row.layout == auto]
    return Answer(
        rows=(*rows, _quickest(taken or layouts)),
        layouts=tuple(layouts),
        auto=auto,
        devices=question.devices,
        hardware=question.hardware.name,
        kernel="" if question.cost else question.hardware.kernel,
        batch_tokens=round(sum(map(sum, batches)) / len(batches)),
        longest=longest,
        only_attends=not question.shape.mixer_kept,
    )


def _quickest(rows: Sequence[WayRow]) -> WayRow:
    """Return the quickest row; where none fits, the last."""
    return min((row for row in rows if row.step_seconds), key=lambda row: row.mean_seconds, default=rows[-1])


def compare_layouts(batches: Sequence[Sequence[int]], question: Question) -> list[WayRow]:
    """Run Lengthwise with each layout that exists here, in the order of `LAYOUTS`."""
    rows: list[WayRow] = []
    for layout in question.layouts():
        like = rows[-1].settings if layout == "hybrid" else None  # which gathers in the same waves as zero3
        asked = question if like is None else replace(question, kinds=[like.recompute])
        rows.append(_ours(layout, batches, asked))
    return rows


def _heaviest(batches: Sequence[Sequence[int]], question: Question) -> Sequence[int]:
    return max(batches, key=lambda tokens: float(question.costs.compute_seconds(np.array(tokens)).sum()))


def _rival(name: str, batches: Sequence[Sequence[int]], question: Question, *, in_order: bool = False) -> WayRow:
    """Run one of `RIVALS` at its best settings; `in_order`: packs of like work side by side."""
    heaviest = _heaviest(batches, question)
    tried = [
        (run_rival(heaviest, settings, question).step_seconds, number, settings)
        for number, settings in enumerate(_rival_settings(name, batches, question, in_order=in_order))
    ]
    if not tried:
        return WayRow(name=name, refusal=_too_long(name, batches, question, "zero3"))
    settings = min(tried)[2]
    runs = [run_rival(tokens, settings, question) for tokens in batches]
    held = max(run.held_tokens for run in runs)
    return WayRow(
        name=name,
        settings=settings,
        step_seconds=tuple(run.step_seconds for run in runs),
        memory_bytes=question.memory("zero3").peak_bytes(held, Choice(recompute=settings.recompute)),
        stretches=_stretches_in_lock_step(runs[0], settings.degree or 1),
    )


def _rival_settings(
    name: str, batches: Sequence[Sequence[int]], question: Question, *, in_order: bool
) -> Iterator[WaySettings]:
    """List settings that hold the longest sequence; packs so large that every device has one in each microbatch."""
    ranks, longest, most_tokens = question.devices, max(map(max, batches)), max(map(sum, batches))
    degrees = [d for d in range(2, ranks + 1) if ranks % d == 0] if name == ONE_RING else [1]
    for (kind, held), degree in product(question.capacities("zero3").items(), degrees):
        least = -(-longest // degree)
        if least > held:
            continue
        if name == PADDED:
            for power, by_length in product(range((held // longest).bit_length()), (False, True)):
                yield WaySettings(recompute=kind, capacity_tokens=held, size=2**power, by_length=by_length)
            continue
        fewest = -(-most_tokens // int(ranks * held * _FILLED))
        rooms = {int(most_tokens / _FILLED / ((fewest + more) * ranks)) for more in _MORE_MICROBATCHES}
        for room in sorted({held, *(max(least, each) for each in rooms if each <= held)}, reverse=True):
            yield WaySettings(recompute=kind, capacity_tokens=room, degree=degree, sorted=in_order)


def run_rival(tokens: Sequence[int], settings: WaySettings, question: Question) -> LockStep:
    """Run one batch of lengths with FSDP2 in lock-step at these settings."""
    cost = recomputing(question.costs, settings.recompute, question.shape.layers)
    traffic = sharded_traffic(question.memory("zero3"), question.costs)
    degree = settings.degree or 1
    if settings.size is not None:
        microbatches = padded(tokens, settings.size, by_length=bool(settings.by_length))
    else:
        microbatches = packed(tokens, degree * settings.capacity_tokens)
        if settings.sorted:
            microbatches.sort(key=lambda pack: sum(length * length for length in pack), reverse=True)
    return lock_step(microbatches, question.devices, degree, cost, traffic)


def _too_long(name: str, batches: Sequence[Sequence[int]], question: Question, layout: str) -> str:
    longest, capacities = max(map(max, batches)), question.capacities(layout)
    if not capacities:
        states = question.memory(layout).state_bytes() / 1e9
        return f"no room beside {states:.0f} GB of parameters and states on each GPU"
    most = max(capacities.values())
    if name == ONE_RING:
        return f"longest sequence {longest:,}, all GPUs hold {question.devices * most:,}"
    return f"longest sequence {longest:,}, a GPU holds {most:,}"


def _stretches_in_lock_step(run: LockStep, degree: int) -> tuple[WorkSpan, ...]:
    starts = np.concatenate(([0.0], np.cumsum(run.seconds)[:-1]))
    kind = "ring" if degree > 1 else "local"
    return tuple(
        WorkSpan(rank=group * degree + member, start=float(start), end=float(start + busy), kind=kind)
        for start, row in zip(starts, run.busy_seconds, strict=True)
        for group, busy in enumerate(row.tolist())
        for member in range(degree)
        if busy
    )


def _ours(layout: str, batches: Sequence[Sequence[int]], question: Question) -> WayRow:
    """Run Lengthwise with a layout at its best settings: offloading only where nothing holds the sequences without.

    Settings that could be no quicker than others were, by their arithmetic alone, are not tried.
    """
    costs, heaviest, longest = question.costs_of(layout), _heaviest(batches, question), max(map(max, batches))
    tried_on = [heaviest] if longest in heaviest else [[longest], heaviest]
    least = {kind: arithmetic_seconds(heaviest, costs, kind) / question.devices for kind in RECOMPUTE_KINDS}
    ways = sorted(_our_settings(layout, question), key=lambda way: least[way.recompute])
    for offloads in (False, True):
        ways, tried = [replace(way, offloads=offloads) for way in ways], list[tuple[float, int]]()
        for number, way in enumerate(ways):
            is_open = not tried or least[way.recompute] * _NEAR < min(tried)[0]
            if is_open and (runs := _held(tried_on, way, question)):
                tried.append((runs[-1].seconds, number))
        for _, number in sorted(tried):
            if runs := _held(batches, ways[number], question):
                is_used = any(each.offload for run in runs for each in run.plan.microbatches)
                return WayRow(
                    name=OURS,
                    settings=replace(ways[number], offloads=is_used),
                    step_seconds=tuple(run.seconds for run in runs),
                    memory_bytes=max(run.memory_bytes for run in runs),
                    stretches=_stretches(runs[0]),
                    degrees=_degrees(runs[0].plan),
                )
    return WayRow(name=OURS, refusal=_too_long(ONE_RING, batches, question, layout))


def _held(batches: Sequence[Sequence[int]], way: WaySettings, question: Question) -> list[OurStep] | None:
    try:
        return [run_ours(tokens, way, question) for tokens in batches]
    except PlanError:
        return None


def _our_settings(layout: str, question: Question) -> list[WaySettings]:
    capacities = question.capacities(layout).items()
    return [WaySettings(recompute=kind, capacity_tokens=held, layout=layout) for kind, held in capacities]


@dataclass(frozen=True, slots=True, kw_only=True)
class OurStep:
    """A step of Lengthwise: the plan, when its microbatches run, how long the step takes, and the fullest device."""

    plan: Plan
    timeline: Timeline
    seconds: float
    memory_bytes: float


def run_ours(tokens: Sequence[int], settings: WaySettings, question: Question) -> OurStep:
    """Plan and simulate one batch with Lengthwise at these settings; PlanError: a device cannot hold it."""
    layout, offload = settings.layout or "zero1", "auto" if settings.offloads else "off"
    choices = {"recompute": settings.recompute, "heads": "auto", "offload": offload, "planning_share": PLANNING_SHARE}
    memory, costs = question.memory(layout), question.costs_of(layout)
    cluster = Cluster(ranks=question.devices, capacity_tokens=settings.capacity_tokens)
    plan = plan_step(tokens, cluster, costs, options_of(memory, **choices))
    timeline = simulate_plan(plan, costs)
    needed = needed_bytes(plan, timeline, memory)
    if settings.offloads and needed > question.hardware.device_bytes:
        raise too_large(needed, question.hardware.device_bytes)
    return OurStep(plan=plan, timeline=timeline, seconds=timeline.step_seconds, memory_bytes=needed)


def _degrees(plan: Plan) -> tuple[tuple[int, int], ...]:
    pieces = (piece for microbatch in plan.microbatches for piece in microbatch.pieces)
    return tuple(sorted({(plan.tokens[i], piece.degree) for piece in pieces for i in piece.sequences}))


def _stretches(run: OurStep) -> tuple[WorkSpan, ...]:
    timeline, found = run.timeline, list[WorkSpan]()
    for row, number in enumerate(timeline.microbatch.tolist()):
        rank, start = int(timeline.rank[row]), float(timeline.start[row])
        in_ring = any(rank in piece.ranks and piece.degree > 1 for piece in run.plan.microbatches[number].pieces)
        end = start + float(timeline.busy_seconds[row])
        found.append(WorkSpan(rank=rank, start=start, end=end, kind="ring" if in_ring else "local"))
    return tuple(found)
