"""The meshes that a planner may be given, what is asked of them, and what was found on one.

A mesh: devices of a rank (tensor x pipeline stages), how parameters lie over ranks, and the tokens of a rank; planners
choose the rest within it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lengthwise.core.errors import ConfigError, LengthwiseError, PlanError
from lengthwise.core.plan import RECOMPUTE_KINDS
from lengthwise.core.shape import UNCUT, Cluster, LayerCut, ModelShape
from lengthwise.cost import (
    STEP_TOKENS,
    Cost,
    Hardware,
    StepMemory,
    all_terms_cost,
    laid_cost,
    recompute_capacities,
    step_memory,
)
from lengthwise.cost.shard_choice import Shard
from lengthwise.planner import PLANNING_SHARE, PlanOptions, PlanStep, options_of, plan_step
from lengthwise.program import trains
from lengthwise.simulator.rivals import LockStep
from lengthwise.simulator.study import PlannerResult, Setting, compare_planners

_MOST_STAGES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMesh:
    """Devices of a rank, `tensor` for each stage of its `cut`, and what it may do beside cutting sequences.

    capacity_share: of the tokens that fit by estimate. held: tokens of a rank by kinds of recomputation, in place of
    what fits. heads, offload: as of `PlanOptions`. layout: of parameters over the ranks. lock_step: how FSDP2 runs, in
    place of a planner.
    """

    tensor: int = 1
    cut: LayerCut = UNCUT
    capacity_share: float = 1.0
    heads: str | int = "off"
    offload: str = "off"
    layout: Shard = "zero1"
    held: tuple[tuple[str, int], ...] = ()
    lock_step: LockStep | None = None

    @property
    def devices(self) -> int:
        """Of a rank."""
        return self.tensor * self.cut.stages

    def __str__(self) -> str:
        rank = f"TP {self.tensor} x PP {self.cut.stages} devices a rank" if self.devices > 1 else "one device a rank"
        share = f", {self.capacity_share:g} of the tokens that fit" if self.capacity_share != 1 else ""
        choices = [f"{name} {each}" for name, each in (("heads", self.heads), ("offload", self.offload))]
        return f"{rank}{share}, {', '.join(choices)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked: a model on so many devices of a hardware, and the meshes that may be tried.

    tensors, stages: of a rank, ascending. kinds: of recomputation, chosen for each step. capacity_tokens: of a rank
    (default: what fits); takes_capacity: whatever the estimate says. base: the mesh of one device, whose choices and
    chunks of a stage all meshes have. cost: of ranks of one device, measured (default: by hardware). mode: of
    `PlanOptions` (default: by stages and layout). context_tokens, loader: of `Setting`. adapters: parameters that train
    in place of the model's own (LoRA); None: all train. offloads: the optimizer and its masters are on the host.
    """

    shape: ModelShape
    hardware: Hardware
    devices: int
    context_tokens: int = 1
    tensors: tuple[int, ...] = (1,)
    stages: tuple[int, ...] = (1,)
    kinds: tuple[str, ...] = RECOMPUTE_KINDS
    capacity_tokens: int | None = None
    takes_capacity: bool = False
    base: RankMesh = RankMesh(heads="auto", offload="auto")
    cost: Cost | None = None
    loader: str = "none"
    mode: str | None = None
    adapters: int | None = None
    offloads: bool = False

    def setting(self, mesh: RankMesh) -> Setting:
        """Return what is simulated on a mesh.

        Raises:
            ConfigError: no room beside weights and optimizer, or less than the given capacity, or a mesh that does not
                fit model or node.
        """
        memory = self.memory(mesh)
        if mesh.held:
            capacities = dict(mesh.held)
        elif self.capacity_tokens is not None and self.takes_capacity:
            capacities = dict.fromkeys(self.kinds, self.capacity_tokens)
        else:
            fitting = recompute_capacities(memory, self.hardware, kinds=self.kinds)
            capacities = self._capacities(fitting, mesh)
        return Setting(
            memory=memory,
            hardware=self.hardware,
            cost=self.cost_of(mesh),
            cluster=Cluster(ranks=memory.ranks, capacity_tokens=max(capacities.values())),
            context_tokens=self.context_tokens,
            loader=self.loader,
            capacities=capacities,
            must_fit=mesh.offload != "off" if mesh.held else self.capacity_tokens is None or not self.takes_capacity,
        )

    def cost_of(self, mesh: RankMesh) -> Cost:
        """Return the costs of ranks on a mesh, of FSDP2 with the head in its root unit."""
        shape, tensor, stages = self.shape, mesh.tensor, mesh.cut.stages
        cost = self.cost or all_terms_cost(shape, self.hardware, tensor=tensor, stages=stages, adapters=self.adapters)
        return laid_cost(cost, self.memory(mesh), head_apart=mesh.lock_step is None)

    def held(self, layout: Shard) -> dict[str, int]:
        """Return the tokens that a rank of one device holds, by kinds of recomputation that leave room; {}: none does.

        A given capacity is taken with the kinds that leave so much, or, where none does, with all.
        """
        try:
            fitting = recompute_capacities(self.memory(RankMesh(layout=layout)), self.hardware, kinds=self.kinds)
        except ConfigError:
            fitting = {}
        given = self.capacity_tokens
        if given is None:
            return fitting
        return dict.fromkeys([kind for kind, held in fitting.items() if held >= given] or self.kinds, given)

    def _capacities(self, fitting: Mapping[str, int], mesh: RankMesh) -> dict[str, int]:
        """Return the given capacity, or what the mesh fits, for each kind that leaves so much."""
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

    def options(self, mesh: RankMesh) -> PlanOptions:
        """Return how steps are planned on a mesh: with the tries that training has."""
        choices = {"heads": mesh.heads, "offload": mesh.offload, "planning_share": PLANNING_SHARE}
        return options_of(self.memory(mesh), **choices, **({"mode": self.mode} if self.mode else {}))

    def memory(self, mesh: RankMesh) -> StepMemory:
        """Return what a device holds on a mesh."""
        ranks, node = self.devices // mesh.devices, self.hardware.ranks_per_node // mesh.tensor
        node = max(1, node if self.cost is None else self.cost.ranks_per_node)
        whole = step_memory(self.shape, self.hardware, ranks, tensor=mesh.tensor, cut=mesh.cut)
        return replace(whole, shard=mesh.layout, ranks_per_node=node, trained=self.adapters, offloads=self.offloads)

    def trained_today(self) -> Question | None:
        """Return the question with the meshes alone that the engine runs; None: there are none."""
        stages = tuple(stages for stages in self.stages if stages == 1 or self.mode in (None, "pipeline"))
        return replace(self, tensors=(1,), stages=stages) if 1 in self.tensors and stages else None

    def mesh(self, tensor: int, stages: int) -> RankMesh:
        """Return a mesh with all that fits, and all that planners may choose."""
        return replace(self.base, tensor=tensor, cut=replace(self.base.cut, stages=stages))


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
    mesh: RankMesh
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

    today, any_mesh: None where no such mesh holds these sequences; refusal, refusal_today: why the last one did not.
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
    mesh: RankMesh,
    setting: Setting,
    planner: str,
    batches: Sequence[Sequence[int]],
    question: Question,
    plan_each: PlanStep | None = None,
) -> Found:
    """Run batches of one planner on one mesh, whose setting it is.

    plan_each: as for `plan_recomputed` (default: the planner of the mesh).
    """
    options = question.options(mesh)
    (result,) = compare_planners(
        [planner], batches, setting, progress=lambda *_: None, options=options,
        plan_each=plan_each or mesh.lock_step or plan_step,
    )  # fmt: skip
    features = frozenset[str]().union(*(step.features for step in result.steps))
    runs = trains(features, tensor=mesh.tensor)
    return Found(planner=planner, mesh=mesh, setting=setting, result=result, trains=runs)


def on_one_mesh(mesh: RankMesh, planner: str, batches: Sequence[Sequence[int]], question: Question) -> Best:
    """Run all batches of one planner where that is the only mesh there is."""
    try:
        found = found_on(mesh, question.setting(mesh), planner, batches, question)
    except (ConfigError, PlanError) as error:
        return Best(planner=planner, today=None, any_mesh=None, tried=1, refusal=error)
    return Best(planner=planner, today=found if found.trains else None, any_mesh=found, tried=1)
