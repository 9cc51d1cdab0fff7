"""The best mesh of each planner, searched alike for all: what a competent user would find by trying.

A search tries meshes on the batch of most work. Those within 3 % of the best, two at most, run all batches; hopeless
meshes and kinds of recomputation are skipped. For a named planner it halves capacities until two in a row end no
sooner. For FSDP2 in lock-step and for layouts of parameters it tries the given meshes.
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
from lengthwise.planner import PlanOptions, arithmetic_seconds, plan_step, with_mixes
from lengthwise.simulator.found import Found, TooLarge, ideal_seconds, run_batches
from lengthwise.simulator.meshes import RankMesh, Scenario, Setting

_NEAR = 1.03  # times the best on one batch: run on all
_MOST_NEAR = 2  # meshes that run all batches
_FAR = 1.25  # times the best kind of recomputation on that batch: not planned on the others
_PATIENCE = 2  # consecutive halvings that may end no sooner
_LEAST_SHARE = 1 / 64
_Asked = tuple[tuple[int, ...], tuple[tuple[float, ...], ...], Cluster, PlanOptions]  # lengths, trees of costs, ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best result of a planner.

    found: None if no mesh holds these sequences. tried: number of plans made. refusal: reason why the last mesh did
    not.
    """

    planner: str
    found: Found | None = None
    tried: int = 0
    refusal: LengthwiseError | None = None


def best_mesh(
    planner: str,
    batches: Sequence[Sequence[int]],
    scenario: Scenario,
    *,
    progress: Callable[[str, RankMesh, int], None] = lambda *_: None,
) -> Best:
    """Search the best mesh of one planner. progress: function that is called before each plan with earlier tries."""
    search = MeshSearch(planner=planner, batches=batches, scenario=scenario, progress=progress)
    return Best(planner=planner, found=search.best(), tried=search.tried, refusal=search.refusal)


def refuse_unheld(found: Sequence[Best]) -> None:
    """Raise the LengthwiseError of the last planner if none has a mesh that holds the sequences."""
    if all(each.found is None for each in found):
        refusal = found[-1].refusal
        assert refusal is not None, "a planner without a mesh was refused one"
        raise refusal


@dataclass(slots=True, kw_only=True)
class MeshSearch:
    """The tries of one planner; each mesh is planned once."""

    planner: str
    batches: Sequence[Sequence[int]]
    scenario: Scenario
    progress: Callable[[str, RankMesh, int], None] = lambda *_: None
    first: dict[RankMesh, Found] = field(default_factory=dict)  # on the batch of most work
    finished: dict[RankMesh, Found] = field(default_factory=dict)
    left_out: set[RankMesh] = field(default_factory=set)  # refused, or their arithmetic takes longer than another step
    too_large: set[RankMesh] = field(default_factory=set)  # among `left_out`: smaller capacities may fit
    plans: dict[RankMesh, dict[_Asked, Plan]] = field(default_factory=dict)
    refusal: LengthwiseError | None = None
    tried: int = 0

    def best(self) -> Found | None:
        """Return the best of the scenario's meshes, or None if none holds the sequences."""
        if self.scenario.only is not None:
            return self.best_of([self.scenario.only])
        self._halve(self.scenario.base)
        return self.best_of()

    def best_of(self, meshes: Iterable[RankMesh] = ()) -> Found | None:
        """Return the best of these meshes and of earlier ones, or None if none holds the sequences."""
        for mesh in meshes:
            self._try(mesh)
        while self.first:
            near = sorted(self.first, key=self._seconds)[:_MOST_NEAR]
            near = [mesh for mesh in near if self._seconds(mesh) <= _NEAR * self._least]
            if found := [each for each in map(self._finish, near) if each is not None]:
                return min(found, key=lambda each: each.mean_seconds)
        return None

    def _seconds(self, mesh: RankMesh) -> float:
        """Return the seconds of the batch of most work on a mesh; inf if it was not planned."""
        return self.first[mesh].mean_seconds if mesh in self.first else inf

    @property
    def _least(self) -> float:
        return min(map(self._seconds, self.first), default=inf)

    def _halve(self, mesh: RankMesh) -> None:
        """Try a mesh, then smaller capacities until several in a row end no sooner; too large ones do not count."""
        least, waited = inf, 0
        while waited < _PATIENCE and mesh.capacity_share >= _LEAST_SHARE:
            self._try(mesh)
            if self.scenario.capacity_tokens is not None:
                return
            if mesh in self.first:
                waited = 0 if self._seconds(mesh) < least else waited + 1
                least = min(least, self._seconds(mesh))
            elif mesh not in self.too_large:
                return  # less room would not help: arithmetic takes too long, or a rank holds too little
            mesh = replace(mesh, capacity_share=mesh.capacity_share / 2)

    def _try(self, mesh: RankMesh) -> None:
        """Run the batch of most work on a mesh, unless its arithmetic is slower or some batch does not fit."""
        if mesh in self.first or mesh in self.left_out:
            return
        try:
            setting = self.scenario.setting(mesh)
            heaviest = self._heaviest(setting)
            longest = max(map(max, self.batches))
            worth = _worth_planning(heaviest, longest, setting, self._least)
            if not worth.capacities:
                self.left_out.add(mesh)
                return
            self.progress(self.planner, mesh, self.tried)
            self.tried += 1
            if longest > max(heaviest) and not mesh.lock_step:  # lock-steps are listed only if they hold it
                self._run([[longest]], setting)  # raises if the longest is not held
            self.first[mesh] = self._run([heaviest], worth)
        except (ConfigError, PlanError) as error:
            self.left_out.add(mesh)
            self.too_large |= {mesh} if isinstance(error, TooLarge) else set()
            if not isinstance(self.refusal, TooLarge):
                self.refusal = error

    def _finish(self, mesh: RankMesh) -> Found | None:
        """Run all batches on a mesh; leave the mesh out and return None if one does not fit."""
        if len(self.batches) == 1:
            return self.first[mesh]
        if mesh in self.finished:
            return self.finished[mesh]
        self.progress(self.planner, mesh, self.tried)
        setting = self.scenario.setting(mesh)
        for kinds in (self._with_near_kinds(setting), setting):  # another kind may hold what the near ones do not
            try:
                return self.finished.setdefault(mesh, self._run(self.batches, kinds))
            except PlanError as error:
                self.refusal = error
        del self.first[mesh]
        self.left_out.add(mesh)
        return None

    def _heaviest(self, setting: Setting) -> Sequence[int]:
        return max(self.batches, key=lambda tokens: ideal_seconds(tokens, setting))

    def _run(self, batches: Sequence[Sequence[int]], setting: Setting) -> Found:
        return run_batches(self.planner, batches, setting, plan_each=partial(self._plan, setting.mesh))

    def _plan(self, mesh: RankMesh, tokens: Sequence[int], cluster: Cluster, cost: Cost, options: PlanOptions) -> Plan:
        """Plan a step on a mesh as `plan_step` does, the batch of most work only once."""
        plans, key = self.plans.setdefault(mesh, {}), (tuple(tokens), cost.trees, cluster, options)
        if key in plans:
            return plans[key]
        plan = (mesh.lock_step or plan_step)(tokens, cluster, cost, options)
        if mesh not in self.first and not mesh.lock_step:  # the batch of most work, which returns among all batches
            plans[key] = plan
        elif mesh not in self.first and (seconds := float(plan.notes["predicted_seconds"])) >= self._least:
            expected, remedy = f"a step under {self._least:.3g} s", "Use the settings that take less."
            raise PlanError("settings", expected=expected, got=f"{seconds:.3g} s", remedy=remedy)
        return plan

    def _with_near_kinds(self, setting: Setting) -> Setting:
        """Drop the kinds of recomputation that ended far later on the batch of most work."""
        if len(setting.capacities) == 1:
            return setting
        heaviest = len(self._heaviest(setting))
        ends = {
            options.recompute: float(plan.notes["predicted_seconds"])
            for (tokens, _, _, options), plan in self.plans[setting.mesh].items()
            if len(tokens) == heaviest and options.offload == setting.options.offload
        }
        latest = _FAR * min(ends.values(), default=inf)
        kinds = {kind: held for kind, held in setting.capacities.items() if ends.get(kind, 0.0) <= latest}
        return replace(setting, capacities=kinds)


def _worth_planning(tokens: Sequence[int], longest_tokens: int, setting: Setting, least_seconds: float) -> Setting:
    """Keep the kinds of recomputation that hold the longest sequence and may end before the best so far."""
    ranks = setting.memory.ranks
    capacities = with_mixes(setting.capacities, longest_tokens, ranks, setting.options)
    offloads = setting.mesh.offload != "off"
    holding = {kind: held for kind, held in capacities.items() if offloads or ranks * held >= longest_tokens}
    worth = {
        kind: held
        for kind, held in (holding or capacities).items()
        if arithmetic_seconds(tokens, setting.cost, kind) < least_seconds * ranks
    }
    return replace(setting, capacities=worth)
