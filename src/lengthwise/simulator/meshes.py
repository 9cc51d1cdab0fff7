"""The best mesh of each planner, searched alike for all: what a competent user would have found by trying.

A mesh is how many devices make a rank (tensor x pipeline stages) and how many tokens a rank may hold; each planner
chooses context parallelism, heads, offload and recomputation within it. For each planner, on the batch of most work:

1. every number of tensor-parallel devices that memory allows, ranks holding all that fits, then half of it and so on,
   until two in a row end no sooner;
2. from the best, twice the stages, while that ends sooner.

Those within 3 % of the best, two at most, run all batches; the least mean is taken. A mesh whose arithmetic alone takes
longer than the best so far is not planned. Cost: three to thirty plans a planner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from lengthwise.core.errors import ConfigError, LengthwiseError, PlanError
from lengthwise.core.plan import RECOMPUTE_KINDS
from lengthwise.core.shape import Cluster, ModelShape
from lengthwise.cost import STEP_TOKENS, Cost, Hardware, all_terms_cost, recompute_capacities, step_memory
from lengthwise.planner import PLANNING_SHARE, PlanOptions, arithmetic_seconds
from lengthwise.program import trains
from lengthwise.simulator.study import PlannerResult, Setting, TooLarge, compare_planners, ideal_seconds

_NEAR = 1.03  # of the best on one batch: run on all
_MOST_NEAR = 2  # of them
_PATIENCE = 2  # halvings in a row that may end no sooner
_MOST_STAGES = 8
_LEAST_SHARE = 1 / 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Devices of a rank, and what it may do beside cutting sequences.

    capacity_share: of the tokens that fit by estimate. heads, offload: as of `PlanOptions`.
    """

    tensor: int = 1
    stages: int = 1
    capacity_share: float = 1.0
    heads: str | int = "off"
    offload: str = "off"

    @property
    def devices(self) -> int:
        """Of a rank."""
        return self.tensor * self.stages

    def __str__(self) -> str:
        rank = f"TP {self.tensor} x PP {self.stages} devices a rank" if self.devices > 1 else "one device a rank"
        share = f", {self.capacity_share:g} of the tokens that fit" if self.capacity_share != 1 else ""
        choices = [f"{name} {each}" for name, each in (("heads", self.heads), ("offload", self.offload))]
        return f"{rank}{share}, {', '.join(choices)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshQuestion:
    """What is asked: a model on so many devices of a hardware, and the meshes that may be tried.

    tensors, stages: of a rank, ascending. kinds: of recomputation, chosen for each step. capacity_tokens: of a rank
    (default: what fits, by estimate); takes_capacity: whatever the estimate says. heads, offload: what planners may
    choose. cost: of ranks of one device, measured (default: made from the hardware). mode, virtual: of `PlanOptions`
    (default: `pipeline` for ranks of several stages, else `free`). context_tokens, loader: of `Setting`.
    """

    shape: ModelShape
    hardware: Hardware
    devices: int
    context_tokens: int
    tensors: tuple[int, ...] = (1,)
    stages: tuple[int, ...] = (1,)
    kinds: tuple[str, ...] = RECOMPUTE_KINDS
    capacity_tokens: int | None = None
    takes_capacity: bool = False
    heads: str | int = "auto"
    offload: str = "auto"
    cost: Cost | None = None
    loader: str = "none"
    mode: str | None = None
    virtual: int | None = None

    def setting(self, mesh: Mesh) -> Setting:
        """Return what is simulated on a mesh.

        Raises:
            ConfigError: weights and optimizer leave no room on it, or less than the capacity that is given, by
                estimate, or the mesh does not fit model or node.
        """
        ranks = self.devices // mesh.devices
        cost = self.cost or all_terms_cost(self.shape, self.hardware, tensor=mesh.tensor, stages=mesh.stages)
        if self.capacity_tokens is not None and self.takes_capacity:
            capacities = dict.fromkeys(self.kinds, self.capacity_tokens)
        else:
            memory = step_memory(
                self.shape, self.hardware, ranks, tensor=mesh.tensor, stages=mesh.stages, virtual=self.virtual or 1
            )
            fitting = recompute_capacities(memory, self.hardware, kinds=self.kinds)
            capacities = self._capacities(fitting, mesh)
        return Setting(
            shape=self.shape,
            hardware=self.hardware,
            cost=cost,
            cluster=Cluster(ranks=ranks, capacity_tokens=max(capacities.values())),
            context_tokens=self.context_tokens,
            devices=mesh.devices,
            loader=self.loader,
            capacities=capacities,
            must_fit=self.capacity_tokens is None or not self.takes_capacity,
        )

    def _capacities(self, fitting: Mapping[str, int], mesh: Mesh) -> dict[str, int]:
        """Return the capacity that is given, or the mesh's share of what fits, for each kind that leaves so much."""
        if self.capacity_tokens is not None:
            capacities = {kind: self.capacity_tokens for kind, held in fitting.items() if held >= self.capacity_tokens}
            expected, remedy = "what fits beside weights and optimizer", "Give a smaller {capacity}."
            wanted = self.capacity_tokens
        else:
            shared = {kind: int(held * mesh.capacity_share) for kind, held in fitting.items()}
            capacities = {kind: held // STEP_TOKENS * STEP_TOKENS for kind, held in shared.items()}
            capacities = {kind: held for kind, held in capacities.items() if held}
            expected, remedy = "what fits", "Use more devices a rank, or hardware with more memory."
            wanted = STEP_TOKENS
        if not capacities:
            most = max(fitting.values())
            raise ConfigError("capacity", expected=f"{expected}: at most {most} tokens", got=str(wanted), remedy=remedy)
        return capacities

    def options(self, mesh: Mesh) -> PlanOptions:
        """Return how steps are planned on a mesh: with the tries that training has."""
        mode = self.mode or ("pipeline" if mesh.stages > 1 else "free")
        is_pipeline = mode == "pipeline"
        return PlanOptions(
            mode=mode,
            stages=mesh.stages if is_pipeline else None,
            virtual=self.virtual if is_pipeline else None,
            heads=mesh.heads,
            offload=mesh.offload,
            planning_share=PLANNING_SHARE,
        )

    def trained_today(self) -> MeshQuestion | None:
        """Return the question with the meshes alone that the engine runs; None: there are none."""
        tensors = tuple(each for each in self.tensors if trains(frozenset(), devices=each))
        stages = tuple(each for each in self.stages if trains(frozenset(), devices=each))
        if not tensors or not stages or not trains({self.mode or "free"} - {"free"}, loader=self.loader):
            return None
        return replace(self, tensors=tensors, stages=stages)


def powers_that_divide(devices: int, most: int) -> tuple[int, ...]:
    """List 1, 2, 4, ... up to `most`, as far as they divide the devices."""
    return tuple(each for each in (2**power for power in range(most.bit_length())) if devices % each == 0)


def tensors_to_try(shape: ModelShape, hardware: Hardware, devices: int) -> tuple[int, ...]:
    """List numbers of tensor-parallel devices of a rank: powers of two inside a node that divide heads and devices."""
    return tuple(t for t in powers_that_divide(devices, hardware.ranks_per_node) if shape.heads % t == 0)


def stages_to_try(shape: ModelShape, devices: int) -> tuple[int, ...]:
    """List numbers of pipeline stages of a rank: powers of two that divide layers and devices."""
    return tuple(p for p in powers_that_divide(devices, _MOST_STAGES) if shape.layers % p == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A planner on its best mesh, all batches; `trains`: whether the engine of this version runs these plans."""

    planner: str
    mesh: Mesh
    setting: Setting
    result: PlannerResult
    trains: bool

    @property
    def held_tokens(self) -> dict[str, int]:
        """The tokens that a rank holds with each kind of recomputation that its plans take."""
        held, capacities = self.setting.cluster.capacity_tokens, self.setting.capacities or {}
        return {step.recompute: capacities.get(step.recompute, held) for step in self.result.steps}


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best that a planner can do: on the meshes that the engine runs, and on all; tried: plans made for it.

    today, any_mesh: None where no such mesh holds these sequences; refusal, refusal_today: why, of the last of all
    meshes, and of the last that the engine runs, that did not; or of the first that a device is too small for.
    """

    planner: str
    today: Found | None
    any_mesh: Found | None
    tried: int
    refusal: LengthwiseError | None = None
    refusal_today: LengthwiseError | None = None

    @property
    def only_planned(self) -> Found | None:
        """The best mesh, where it is another than the best that the engine runs."""
        is_other = self.any_mesh is not None and (self.today is None or self.any_mesh.mesh != self.today.mesh)
        return self.any_mesh if is_other else None


def found_on(
    mesh: Mesh, setting: Setting, planner: str, batches: Sequence[Sequence[int]], question: MeshQuestion
) -> Found:
    """Run batches of one planner on one mesh, whose setting it is.

    Raises:
        LengthwiseError: of `plan_step`.
    """
    options = question.options(mesh)
    (result,) = compare_planners([planner], batches, setting, progress=lambda *_: None, options=options)
    features = frozenset[str]().union(*(step.features for step in result.steps))
    runs = trains(features, devices=mesh.devices, loader=question.loader)
    return Found(planner=planner, mesh=mesh, setting=setting, result=result, trains=runs)


def on_one_mesh(mesh: Mesh, planner: str, batches: Sequence[Sequence[int]], question: MeshQuestion) -> Best:
    """Run all batches of one planner where that is the only mesh there is."""
    try:
        found = found_on(mesh, question.setting(mesh), planner, batches, question)
    except (ConfigError, PlanError) as error:
        return Best(planner=planner, today=None, any_mesh=None, tried=1, refusal=error)
    return Best(planner=planner, today=found if found.trains else None, any_mesh=found, tried=1)


def _say_nothing(planner: str, mesh: Mesh, tried: int) -> None:
    """Report no progress."""


def best_mesh(
    planner: str,
    batches: Sequence[Sequence[int]],
    question: MeshQuestion,
    *,
    progress: Callable[[str, Mesh, int], None] = _say_nothing,
) -> Best:
    """Search the best mesh of one planner; before each plan, call `progress` with how many were tried before."""
    search = _Search(planner=planner, batches=batches, question=question, progress=progress)
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
    question: MeshQuestion,
    *,
    progress: Callable[[str, Mesh, int], None] = _say_nothing,
) -> list[Best]:
    """Do `best_mesh` for each planner.

    Raises:
        LengthwiseError: no planner has a mesh that holds these sequences.
    """
    found = [best_mesh(planner, batches, question, progress=progress) for planner in planners]
    refuse_unheld(found)
    return found


@dataclass(slots=True, kw_only=True)
class _Search:
    """The tries of one planner; each mesh is planned once, whoever asks for it."""

    planner: str
    batches: Sequence[Sequence[int]]
    question: MeshQuestion
    progress: Callable[[str, Mesh, int], None]
    first: dict[Mesh, Found] = field(default_factory=dict)  # on the batch of most work
    finished: dict[Mesh, Found] = field(default_factory=dict)
    left_out: set[Mesh] = field(default_factory=set)  # refused, or their arithmetic takes longer than another step
    too_large: set[Mesh] = field(default_factory=set)  # of these: with less room, ranks are given less
    refusal: LengthwiseError | None = None
    tried: int = 0

    def best(self, question: MeshQuestion) -> Found | None:
        """Return the best of a question's meshes and of those tried before; None: none holds the sequences."""
        self._walk(question)
        ordered = sorted(self.first, key=self._seconds)
        near = [mesh for mesh in ordered[:_MOST_NEAR] if self._seconds(mesh) <= _NEAR * self._seconds(ordered[0])]
        return min(map(self._finish, near), key=lambda each: each.result.mean_seconds, default=None)

    def _seconds(self, mesh: Mesh) -> float:
        """Return what the batch of most work takes on a mesh; inf where it was not planned."""
        return self.first[mesh].result.mean_seconds if mesh in self.first else inf

    def _walk(self, question: MeshQuestion) -> None:
        """Try meshes in the order of the module's list."""
        for stages in question.stages:
            for tensor in question.tensors:
                if question.devices % (tensor * stages) == 0:
                    whole = Mesh(tensor=tensor, stages=stages, heads=question.heads, offload=question.offload)
                    self._halve(whole, question)
            if self.first:
                break
        best = min(self.first, key=self._seconds, default=None)
        while best is not None:
            more = replace(best, stages=2 * best.stages)
            is_within = more.stages <= question.stages[-1] and question.devices % more.devices == 0
            if is_within:
                self._try(more)
            best = more if is_within and self._seconds(more) < self._seconds(best) else None

    def _halve(self, mesh: Mesh, question: MeshQuestion) -> None:
        """Try a mesh, and smaller capacities until so many in a row end no sooner, not counting the too large."""
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

    def _try(self, mesh: Mesh) -> None:
        """Run the batch of most work on a mesh, unless its arithmetic takes longer or some batch cannot be held."""
        if mesh in self.first or mesh in self.left_out:
            return
        try:
            setting = self.question.setting(mesh)
            heaviest = max(self.batches, key=lambda tokens: ideal_seconds(tokens, setting))
            longest = max(map(max, self.batches))
            kinds = _worth_planning(heaviest, longest, setting, mesh, min(map(self._seconds, self.first), default=inf))
            if not kinds:
                self.left_out.add(mesh)
                return
            self.progress(self.planner, mesh, self.tried)
            self.tried += 1
            worth = replace(setting, capacities=kinds)
            if longest > max(heaviest):
                found_on(mesh, setting, self.planner, [[longest]], self.question)  # refused where it is not held
            self.first[mesh] = found_on(mesh, worth, self.planner, [heaviest], self.question)
        except (ConfigError, PlanError) as error:
            self.left_out.add(mesh)
            self.too_large |= {mesh} if isinstance(error, TooLarge) else set()
            if not isinstance(self.refusal, TooLarge):
                self.refusal = error

    def _finish(self, mesh: Mesh) -> Found:
        """Run all batches on a mesh that was tried."""
        if len(self.batches) == 1:
            return self.first[mesh]
        if mesh not in self.finished:
            self.progress(self.planner, mesh, self.tried)
            setting = self.question.setting(mesh)
            self.finished[mesh] = found_on(mesh, setting, self.planner, self.batches, self.question)
        return self.finished[mesh]


def _worth_planning(
    tokens: Sequence[int], longest_tokens: int, setting: Setting, mesh: Mesh, least: float
) -> dict[str, int]:
    """Return the capacities of those kinds whose arithmetic, spread evenly, takes less than the best so far.

    A kind that cannot hold the longest of all sequences is left out, unless none can: for the planner to refuse.
    """
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
