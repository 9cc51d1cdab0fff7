"""Makes the candidate plans of a step and takes the best: all are finished and scored here, and nowhere else.

The planner makes a candidate for each set of choices (offload, heads). Small steps of `lengthwise` also try other
planners and annealing; pipelines also try shelves and slots. docs/decisions/other-planners-as-candidates.md. Planners
decide degrees, at the prices of the best choices (`Cost.choosing`); `write_offload` and `split_heads` write the
choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import numpy as np

from lengthwise.core.held import held_by_rank
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Choice, Cost
from lengthwise.planner.baselines.power_of_two import plan_power_of_two
from lengthwise.planner.baselines.single_degree import plan_single_degree
from lengthwise.planner.baselines.static import plan_static
from lengthwise.planner.placement.annealing import MOST_WORK, anneal
from lengthwise.planner.plan_options import CHOICES, PlanOptions
from lengthwise.planner.problem.effort import (
    FAR,
    GOOD_ENOUGH,
    HEADS_FACTOR,
    HEADS_SECONDS,
    SEQUENCE_SECONDS,
    SMALL_STEP,
    WAVE_SECONDS,
)
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.planner.problem.score import score, written_seconds
from lengthwise.planner.problem.step_lengths import NEARLY
from lengthwise.planner.registry import PLANNERS, check_registered, find_planner
from lengthwise.planner.schedules.pipeline import is_worth_search, pipeline_schedule, plan_pipeline
from lengthwise.planner.schedules.waves import plan_waves
from lengthwise.program.features import with_requires
from lengthwise.program.ring_order import ring_order

_SPLIT_AT_ONCE = frozenset(("static", "power-of-two", "bytescale", "bytescale-naive"))  # memory decides their degrees
# In lock-step, which ends no later without the lock; degrees of 2, 4, 8 ... divide into groups of a given number.
_OTHERS = (plan_single_degree, plan_static, plan_power_of_two, plan_waves)
_DIGITS = 6  # of an offload ratio; rounded up


@dataclass(slots=True, kw_only=True)
class Selection:
    """The best candidate so far: the plan that ends first. Before the first offer `plan` has no microbatches."""

    plan: Plan
    cost: Cost
    options: PlanOptions
    seconds: float = inf

    def offer(self, microbatches: list[Microbatch], *, check: Callable[[Plan], None] | None = None) -> None:
        """Finish, check and score a candidate; keep it if it ends before the best so far."""
        plan = self._finished(microbatches)
        if check is not None:
            check(plan)
        seconds = score(plan, self.cost, speeds=self.options.speeds).makespan_seconds
        if seconds < self.seconds * (1 - NEARLY):
            self.plan, self.seconds = plan, seconds

    def _finished(self, microbatches: list[Microbatch]) -> Plan:
        """Add to a plan what follows from its degrees: recomputation, offload ratios, split heads."""
        recompute = self.options.recompute
        if recompute != "none":
            microbatches = [replace(microbatch, recompute=recompute) for microbatch in microbatches]
        plan = replace(self.plan, microbatches=tuple(microbatches))
        if self.options.offload == "auto":
            plan = write_offload(plan)
        if self.options.heads != "off":
            plan = split_heads(plan, self.cost, self.options.heads)
        return with_requires(plan)


def write_offload(plan: Plan) -> Plan:
    """Return the plan with the offload ratio that each microbatch needs; earlier ratios are ignored."""
    microbatches = tuple(
        replace(microbatch, offload=_needed_ratio(plan, microbatch)) for microbatch in plan.microbatches
    )
    return replace(plan, microbatches=microbatches)


def _needed_ratio(plan: Plan, microbatch: Microbatch) -> float:
    """Return the least o with held x `kept_ratio(o, L)` <= capacity + tokens allowed for rounding, on every rank."""
    if len(microbatch.pieces) == 1:
        only = microbatch.pieces[0]
        if sum(plan.tokens[i] for i in only.sequences) <= plan.capacity:
            return 0.0
    held, rounding = held_by_rank(plan, microbatch)
    kept = min(1.0, *((plan.capacity + rounding[rank]) / tokens for rank, tokens in held.items() if tokens))
    if kept == 1.0:
        return 0.0
    ratio = (1 - kept) * plan.layers / max(plan.layers - 2, 1)
    assert ratio <= 1 + 1e-12, f"{held.most_common(1)} tokens on a rank, with all offloaded ratio {ratio}"
    return min(1.0, math.ceil(ratio * 10**_DIGITS) / 10**_DIGITS)


def split_heads(plan: Plan, cost: Cost, asked: str | int = "auto") -> Plan:
    """Return the plan with the fastest split of heads for each ring, or in groups of `asked` where possible."""
    placed = [(piece, microbatch) for microbatch in plan.microbatches for piece in microbatch.pieces]
    ways = [_ways_to_split(*each, cost, asked) for each in placed]
    every = [way for of_piece in ways for way in of_piece]
    seconds = iter(written_seconds(every, np.array(plan.tokens, dtype=np.int64), cost).tolist())
    heads = (min(of_piece, key=lambda _: next(seconds))[1].heads if of_piece else 1 for of_piece in ways)
    microbatches = tuple(
        replace(microbatch, pieces=tuple(_split(piece, next(heads)) for piece in microbatch.pieces))
        for microbatch in plan.microbatches
    )
    return replace(plan, microbatches=microbatches)


def _ways_to_split(piece: Piece, microbatch: Microbatch, cost: Cost, asked: str | int) -> list[tuple[Piece, Choice]]:
    if piece.degree == 1 or piece.shares is not None:
        return []
    tried = range(1, min(cost.heads, piece.degree) + 1) if asked == "auto" else (int(asked),)
    fitting = (heads for heads in tried if cost.heads % heads == piece.degree % heads == 0)
    choices = (Choice(heads=heads, offload=microbatch.offload, recompute=microbatch.recompute) for heads in fitting)
    return [(_split(piece, choice.heads), choice) for choice in choices]


def _split(piece: Piece, heads: int) -> Piece:
    if heads == 1:
        return piece
    first = min(piece.ranks)
    is_interval = piece.ranks == ring_order(first, piece.degree)
    return replace(piece, heads=heads, ranks=ring_order(first, piece.degree, heads) if is_interval else piece.ranks)


def choose_plan(request: PlanRequest, cost: Cost, options: PlanOptions) -> Selection:
    """Return the candidate that ends first. request.cost: costs with all choices. cost: costs for the score."""
    piped = options.mode == "pipeline"
    empty = Plan(
        ranks=request.cluster.ranks,
        layers=options.layers,
        capacity=request.cluster.capacity_tokens,
        tokens=request.tokens,
        microbatches=(),
        schedule=pipeline_schedule(request.cut) if piped else {"kind": options.mode},
    )
    selection = Selection(plan=empty, cost=cost, options=options)
    longest = max(request.tokens)
    if options.planner == "static" and request.context_tokens is not None:
        longest = max(longest, request.context_tokens)  # its mesh must hold the context
    for variant in _variants(request.cost, longest, request.cluster, heads=_ways_of_heads(request, options)):
        if options.planner == "lengthwise" and selection.seconds <= request.bound_seconds * GOOD_ENOUGH:
            break  # with one sequence per ring, more choices could gain no more than that
        asked = request if variant == request.cost else replace(request, cost=variant)
        if options.mode == "waves":
            selection.offer(plan_waves(asked))
        elif options.planner != "lengthwise":
            check = None if options.planner in PLANNERS else partial(check_registered, options.planner)
            selection.offer(find_planner(options.planner)(asked), check=check)
        else:
            _offer_all(asked, selection)
    return selection


def _variants(widest: Cost, longest_tokens: int, cluster: Cluster, *, heads: Sequence[bool]) -> Iterator[Cost]:
    """Yield the costs to plan with, those with the fewest choices first."""
    if not widest.chooses:
        yield widest
        return
    may_offload = widest.choices.offloads
    offloads = [False] * (longest_tokens <= cluster.longest_tokens or not may_offload)
    offloads += [True] * (may_offload and longest_tokens > cluster.capacity_tokens)
    for splits_heads in heads if widest.choices.splits_heads else (False,):
        for offload in offloads:
            variant = replace(widest, choices=replace(widest.choices, splits_heads=splits_heads))
            yield variant if offload else variant.without_copies()


def _ways_of_heads(request: PlanRequest, options: PlanOptions) -> tuple[bool, ...]:
    """Return whether to try degrees chosen without splitting heads, with it, or (small steps of others) both."""
    if options.planner == "lengthwise":
        return (request.planning_seconds >= HEADS_SECONDS,)
    is_small = len(request.tokens) * request.cluster.ranks <= SMALL_STEP
    gains_nothing = options.planner in _SPLIT_AT_ONCE and request.priced_stages == 1
    return (False, True) if is_small and not gains_nothing else (True,)


def _offer_all(request: PlanRequest, selection: Selection) -> None:
    if is_worth_search(request):
        _offer_searched(request, selection)
    if request.priced_stages > 1 and request.speeds is None:
        staged = request if request.stages == request.priced_stages else replace(request, stages=request.priced_stages)
        for microbatches in plan_pipeline(staged, selection.seconds):
            selection.offer(microbatches)
        if selection.seconds == inf:  # no slots held all
            _offer_searched(request, selection)


def _offer_searched(request: PlanRequest, selection: Selection) -> None:
    """Offer the plan of the search; for small steps also those of some other planners, annealed."""
    made = [find_planner("lengthwise")(request)]
    selection.offer(made[0])
    if is_worth_others(request, selection):
        others = request if request.context_tokens is None else replace(request, context_tokens=None)
        for planner in _OTHERS:
            made.append(planner(others))
            selection.offer(made[-1])
    if len(request.tokens) * request.cluster.ranks <= MOST_WORK:
        drafts = [request.draft(each) for each in made]
        ends = [score(draft, request.cost, speeds=request.speeds).makespan_seconds for draft in drafts]
        first = ends.index(min(ends))
        for start in sorted({first} if request.priced_stages == 1 else {0, first}):  # stages may turn the order
            if ends[start] > request.bound_seconds * FAR:
                selection.offer(anneal(request, made[start], ends[start]))


def is_worth_others(request: PlanRequest, selection: Selection) -> bool:
    """Return whether other planners could end enough earlier, on a small step that pays for them."""
    is_small = len(request.tokens) * request.cluster.ranks <= SMALL_STEP
    if not is_small or request.planning_seconds < others_seconds(request):
        return False
    if selection.options.heads not in CHOICES:  # the search knows no groups of a given number
        return True
    return selection.seconds > min(request.bound_seconds, request.packed_bound_seconds) * FAR


def others_seconds(request: PlanRequest) -> float:
    """Return an estimate of the seconds that the plans of the other planners take to make."""
    filled = max(request.cluster.ranks, int(request.lengths.sum()) / request.cluster.capacity_tokens)
    seconds = SEQUENCE_SECONDS * len(request.tokens) + WAVE_SECONDS * filled
    return seconds * (HEADS_FACTOR if request.cost.choices.splits_heads else 1)
