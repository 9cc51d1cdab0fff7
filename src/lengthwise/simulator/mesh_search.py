"""The best mesh of each planner, searched alike for all: what a competent user would have found by trying.

On the batch of most work: every number of tensor-parallel devices that fits, at capacities halved until two in a row
end no sooner; then twice the stages while that ends sooner. Those within 3 % of the best, two at most, run all batches.
Hopeless meshes and kinds of recomputation are skipped. Three to thirty plans a planner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from lengthwise.core.errors import ConfigError, LengthwiseError, PlanError
from lengthwise.core.plan import Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost
from lengthwise.planner import PlanOptions, arithmetic_seconds, plan_recomputed, plan_step
from lengthwise.simulator.meshes import Best, Found, Question, RankMesh, found_on
from lengthwise.simulator.study import Setting, TooLarge, ideal_seconds

_NEAR = 1.03  # of the best on one batch: run on all
_MOST_NEAR = 2  # of them
_FAR = 1.5  # times the best of the kinds of recomputation on that batch: not planned on the others
_PATIENCE = 2  # halvings in a row that may end no sooner
_LEAST_SHARE = 1 / 64


def _say_nothing(planner: str, mesh: RankMesh, tried: int) -> None:
    """Report no progress."""


def best_mesh(
    planner: str,
    batches: Sequence[Sequence[int]],
    question: Question,
    *,
    progress: Callable[[str, RankMesh, int], None] = _say_nothing,
) -> Best:
    """Search the best mesh of one planner; before each plan, call `progress` with how many were tried before."""
    search = Search(planner=planner, batches=batches, question=question, progress=progress)
    narrow = question.trained_today()
    both = [] if narrow is None else [search.best(narrow)]
    refusal_today = search.refusal
    both.append(search.best(question))
    found = sorted((each for each in both if each is not None), key=lambda each: each.result.mean_seconds)
    return Best(
        planner=planner,
        today=next((each for each in found if each.trains), None),
        any_mesh=next(iter(found), None),
        tried=search.tried,
        refusal=search.refusal,
        refusal_today=refusal_today,
    )


def refuse_unheld(found: Sequence[Best]) -> None:
    """Raise the LengthwiseError of the last planner where none has a mesh that holds the sequences."""
    if all(each.any_mesh is None for each in found):
        refusal = found[-1].refusal
        assert refusal is not None, "a planner without a mesh was refused one"
        raise refusal


def best_meshes(
    planners: Sequence[str],
    batches: Sequence[Sequence[int]],
    question: Question,
    *,
    progress: Callable[[str, RankMesh, int], None] = _say_nothing,
) -> list[Best]:
    """Do `best_mesh` for each planner; LengthwiseError: none has a mesh that holds these sequences."""
    found = [best_mesh(planner, batches, question, progress=progress) for planner in planners]
    refuse_unheld(found)
    return found


@dataclass(slots=True, kw_only=True)
class Search:
    """The tries of one planner; each mesh is planned once."""

    planner: str
    batches: Sequence[Sequence[int]]
    question: Question
    progress: Callable[[str, RankMesh, int], None] = _say_nothing
    first: dict[RankMesh, Found] = field(default_factory=dict)  # on the batch of most work
    finished: dict[RankMesh, Found] = field(default_factory=dict)
    left_out: set[RankMesh] = field(default_factory=set)  # refused, or their arithmetic takes longer than another step
    too_large: set[RankMesh] = field(default_factory=set)  # of these: with less room, ranks are given less
    plans: dict[RankMesh, dict[tuple[tuple[int, ...], Cluster, PlanOptions], Plan]] = field(default_factory=dict)
    refusal: LengthwiseError | None = None
    tried: int = 0

    def best(self, question: Question) -> Found | None:
        """Return the best of a question's meshes and of earlier ones; None: none holds the sequences."""
        self._walk(question)
        ordered = sorted(self.first, key=self._seconds)
        near = [mesh for mesh in ordered[:_MOST_NEAR] if self._seconds(mesh) <= _NEAR * self._seconds(ordered[0])]
        return min(map(self._finish, near), key=lambda each: each.result.mean_seconds, default=None)

    def quickest(self, meshes: Iterable[RankMesh]) -> Found | None:
        """Return the mesh whose plan of the batch of most work ends first by prediction; None: none holds them all."""
        ends: dict[RankMesh, float] = {}
        for mesh in meshes:
            try:
                ends[mesh] = self._predicted(mesh)
            except (ConfigError, PlanError) as error:
                self.refusal = error
        for mesh in sorted(ends, key=ends.__getitem__):
            try:
                return self._finish(mesh, far=1.0)
            except PlanError as error:
                self.refusal = error
        return None

    def _predicted(self, mesh: RankMesh) -> float:
        """Return the seconds of the batch of most work on a mesh that holds the longest sequence, as its plan says."""
        setting, options = self.question.setting(mesh), replace(self.question.options(mesh), planner=self.planner)
        heaviest, longest = self._heaviest(setting), max(map(max, self.batches))
        options = replace(options, layers=self.question.shape.layers)
        ends = [
            float(
                plan_recomputed(
                    tokens, setting.cluster.ranks, setting.cost, setting.capacities or {}, options,
                    plan_each=partial(self._plan, mesh),
                ).notes["predicted_seconds"]
            )
            for tokens in (heaviest, *([[longest]] if longest > max(heaviest) else []))
        ]  # fmt: skip
        return ends[0]

    def _seconds(self, mesh: RankMesh) -> float:
        """Return the seconds of the batch of most work on a mesh; inf where it was not planned."""
        return self.first[mesh].result.mean_seconds if mesh in self.first else inf

    def _walk(self, question: Question) -> None:
        for stages in question.stages:
            for tensor in question.tensors:
                if question.devices % (tensor * stages) == 0:
                    self._halve(question.mesh(tensor, stages), question)
            if self.first:
                break
        best = min(self.first, key=self._seconds, default=None)
        while best is not None:
            more = replace(best, cut=replace(best.cut, stages=2 * best.cut.stages))
            is_within = more.cut.stages <= question.stages[-1] and question.devices % more.devices == 0
            if is_within:
                self._try(more)
            best = more if is_within and self._seconds(more) < self._seconds(best) else None

    def _halve(self, mesh: RankMesh, question: Question) -> None:
        """Try a mesh, then smaller capacities until several in a row end no sooner; too large ones do not count."""
        least, waited = inf, 0
        while waited < _PATIENCE and mesh.capacity_share >= _LEAST_SHARE:
            self._try(mesh)
            if question.capacity_tokens is not None:
                return
            if mesh in self.first:
                waited = 0 if self._seconds(mesh) < least else waited + 1
                least = min(least, self._seconds(mesh))
            elif mesh not in self.too_large:
                return  # arithmetic takes too long, or a rank holds too little: with less room it does, too
            mesh = replace(mesh, capacity_share=mesh.capacity_share / 2)

    def _try(self, mesh: RankMesh) -> None:
        """Run the batch of most work on a mesh, unless its arithmetic is slower or some batch does not fit."""
        if mesh in self.first or mesh in self.left_out:
            return
        try:
            setting = self.question.setting(mesh)
            heaviest = self._heaviest(setting)
            longest = max(map(max, self.batches))
            kinds = _worth_planning(heaviest, longest, setting, mesh, min(map(self._seconds, self.first), default=inf))
            if not kinds:
                self.left_out.add(mesh)
                return
            self.progress(self.planner, mesh, self.tried)
            self.tried += 1
            worth = replace(setting, capacities=kinds)
            if longest > max(heaviest):
                self._found_on(mesh, setting, [[longest]])  # refused where it is not held
            self.first[mesh] = self._found_on(mesh, worth, [heaviest])
        except (ConfigError, PlanError) as error:
            self.left_out.add(mesh)
            self.too_large |= {mesh} if isinstance(error, TooLarge) else set()
            if not isinstance(self.refusal, TooLarge):
                self.refusal = error

    def _finish(self, mesh: RankMesh, far: float = _FAR) -> Found:
        if len(self.batches) == 1 and mesh in self.first:
            return self.first[mesh]
        if mesh not in self.finished:
            self.progress(self.planner, mesh, self.tried)
            setting = self.question.setting(mesh)
            try:
                self.finished[mesh] = self._found_on(mesh, self._with_near_kinds(mesh, setting, far), self.batches)
            except PlanError:  # another kind may hold what these do not
                self.finished[mesh] = self._found_on(mesh, setting, self.batches)
        return self.finished[mesh]

    def _heaviest(self, setting: Setting) -> Sequence[int]:
        return max(self.batches, key=lambda tokens: ideal_seconds(tokens, setting))

    def _found_on(self, mesh: RankMesh, setting: Setting, batches: Sequence[Sequence[int]]) -> Found:
        return found_on(mesh, setting, self.planner, batches, self.question, partial(self._plan, mesh))

    def _plan(self, mesh: RankMesh, tokens: Sequence[int], cluster: Cluster, cost: Cost, options: PlanOptions) -> Plan:
        """Plan a step on a mesh as `plan_step` does; the batch of most work once."""
        plans, key = self.plans.setdefault(mesh, {}), (tuple(tokens), cluster, options)
        if key in plans:
            return plans[key]
        plan = (mesh.lock_step or plan_step)(tokens, cluster, cost, options)
        if mesh not in self.first and not mesh.lock_step:  # the batch of most work, which comes again with all
            plans[key] = plan
        return plan

    def _with_near_kinds(self, mesh: RankMesh, setting: Setting, far: float) -> Setting:
        """Drop the kinds of recomputation that ended far later on the batch of most work."""
        if len(setting.capacities or {}) == 1:
            return setting
        heaviest, offload = tuple(self._heaviest(setting)), self.question.options(mesh).offload
        ends = {
            options.recompute: float(plan.notes["predicted_seconds"])
            for (tokens, _, options), plan in self.plans[mesh].items()
            if tokens == heaviest and options.offload == offload
        }
        latest = far * min(ends.values())
        kinds = {kind: held for kind, held in (setting.capacities or {}).items() if ends.get(kind, 0.0) <= latest}
        return replace(setting, capacities=kinds)


def _worth_planning(
    tokens: Sequence[int], longest_tokens: int, setting: Setting, mesh: RankMesh, least: float
) -> dict[str, int]:
    """Return the capacities of kinds that hold the longest sequence and may beat the best so far."""
    capacities = setting.capacities or {}
    holding = {
        kind: held for kind, held in capacities.items()
        if mesh.offload != "off" or setting.cluster.ranks * held >= longest_tokens
    }  # fmt: skip
    return {
        kind: held
        for kind, held in (holding or capacities).items()
        if arithmetic_seconds(tokens, setting.cost, kind) < least * setting.cluster.ranks
    }
