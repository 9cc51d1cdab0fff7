"""The meshes that a planner may use, and the memory and costs of their ranks.

A mesh: devices of a rank (its pipeline stages), the layout of parameters over ranks, and the tokens of a rank. Planners
choose the rest within it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lengthwise.core.errors import ConfigError
from lengthwise.core.plan import RECOMPUTE_KINDS
from lengthwise.core.shape import UNCUT, LayerCut, ModelShape
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
from lengthwise.planner import PLANNING_SHARE, PlanOptions, options_of
from lengthwise.planner.plan_options import DEFAULT
from lengthwise.simulator.branches import Branches
from lengthwise.simulator.rivals import LockStep


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMesh:
    """Devices of a rank, one for each stage of its `cut`, and what planners may do beside cutting sequences.

    capacity_share: share of the tokens that fit by estimate (default 1). held: tokens of a rank by kind of
    recomputation, in place of what fits. heads, offload: as in `PlanOptions`. layout: layout of the parameters over the
    ranks. lock_step: an FSDP2 planner, in place of a named one.
    """

    cut: LayerCut = UNCUT
    capacity_share: float = 1.0
    heads: str | int = "off"
    offload: str = "off"
    layout: Shard = "zero1"
    held: tuple[tuple[str, int], ...] = ()
    lock_step: LockStep | None = None

    def __str__(self) -> str:
        rank = f"{self.cut.stages} stages a rank" if self.cut.stages > 1 else "one device a rank"
        share = f", {self.capacity_share:g} of the tokens that fit" if self.capacity_share != 1 else ""
        return f"{rank}{share}, heads {self.heads}, offload {self.offload}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The memory and costs of a mesh's ranks, and the options of planners.

    capacities: tokens of a rank by the kinds of recomputation that a step may choose. context_tokens: length that sizes
    the mesh of planners with a fixed one. must_fit: True refuses plans that need more memory than a device has.
    options: options of all planners; name and context are set for each step.
    """

    mesh: RankMesh = RankMesh()
    memory: StepMemory
    hardware: Hardware
    cost: Cost
    capacities: Mapping[str, int]
    context_tokens: int = 1
    must_fit: bool = False
    options: PlanOptions = DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A model on a number of devices, and the meshes that planners may use there.

    kinds: kinds of recomputation to choose from for each step. capacity_tokens: tokens of a rank (default: what fits).
    takes_capacity: True takes `capacity_tokens` even if the estimate says that fewer fit. base: mesh with all tokens
    that fit, whose stages and choices all meshes have. only: the one mesh of all planners, None to search the best of
    each. cost: measured costs of ranks of one device (default: by hardware). mode: as in `PlanOptions` (default: by
    stages and layout). context_tokens: as in `Setting`. adapters: number of adapter parameters that train (LoRA), None
    if the whole model trains. offloads: True if master weights and the optimizer's states are on the host. branches:
    prompts that sequences share, or None.
    """

    shape: ModelShape
    hardware: Hardware
    devices: int
    context_tokens: int = 1
    kinds: tuple[str, ...] = RECOMPUTE_KINDS
    capacity_tokens: int | None = None
    takes_capacity: bool = False
    base: RankMesh = RankMesh(heads="auto", offload="auto")
    only: RankMesh | None = None
    cost: Cost | None = None
    mode: str | None = None
    adapters: int | None = None
    offloads: bool = False
    branches: Branches | None = None

    def setting(self, mesh: RankMesh) -> Setting:
        """Return the memory and costs of a mesh's ranks.

        ConfigError: weights and optimizer leave no room, or less than the given capacity, or it has more stages than
        the model has layers.
        """
        memory, given = self.memory(mesh), self.capacity_tokens
        takes_any = given is not None and self.takes_capacity
        if mesh.held or takes_any:
            capacities = dict(mesh.held) or dict.fromkeys(self.kinds, given or 0)
        else:
            capacities = self._capacities(recompute_capacities(memory, self.hardware, kinds=self.kinds), mesh)
        return Setting(
            mesh=mesh,
            memory=memory,
            hardware=self.hardware,
            cost=self.cost_of(mesh),
            capacities=capacities,
            context_tokens=self.context_tokens,
            must_fit=mesh.offload != "off" if mesh.held else not takes_any,
            options=options_of(
                memory,
                heads=mesh.heads,
                offload=mesh.offload,
                planning_share=PLANNING_SHARE,
                **({"mode": self.mode} if self.mode else {}),
            ),
        )

    def cost_of(self, mesh: RankMesh) -> Cost:
        """Return the costs of ranks on a mesh; FSDP2 has the head in its root unit, and all of the links for rings."""
        stages, adapters, hardware = mesh.cut.stages, self.adapters, self.hardware
        if mesh.lock_step is not None:
            hardware = replace(hardware, node_ring_bytes_per_second=hardware.node_link_bytes_per_second)
        cost = self.cost or all_terms_cost(self.shape, hardware, stages=stages, adapters=adapters)
        return laid_cost(cost, self.memory(mesh), head_apart=mesh.lock_step is None)

    def held(self, layout: Shard) -> dict[str, int]:
        """Return the tokens that a rank of one device holds, by kind of recomputation; {} if none leaves room.

        A given capacity has the kinds that leave so much, or, if none does, all.
        """
        try:
            return dict(replace(self, takes_capacity=False).setting(RankMesh(layout=layout)).capacities)
        except ConfigError:
            return {} if self.capacity_tokens is None else dict.fromkeys(self.kinds, self.capacity_tokens)

    def _capacities(self, fitting: Mapping[str, int], mesh: RankMesh) -> dict[str, int]:
        given = self.capacity_tokens
        if given is not None:
            capacities = {kind: given for kind, held in fitting.items() if held >= given}
            expected, remedy = "what fits beside weights and optimizer", "Give a smaller {capacity}."
        else:
            shared = {kind: int(held * mesh.capacity_share) for kind, held in fitting.items()}
            capacities = {kind: held // STEP_TOKENS * STEP_TOKENS for kind, held in shared.items()}
            capacities = {kind: held for kind, held in capacities.items() if held}
            expected, remedy = "what fits", "Use more devices a rank, or hardware with more memory."
        if not capacities:
            expected, got = f"{expected}: at most {max(fitting.values())} tokens", str(given or STEP_TOKENS)
            raise ConfigError("capacity", expected=expected, got=got, remedy=remedy)
        return capacities

    def memory(self, mesh: RankMesh) -> StepMemory:
        """Return the memory of a device on a mesh."""
        node = self.hardware.ranks_per_node if self.cost is None else max(1, self.cost.ranks_per_node)
        whole = step_memory(self.shape, self.hardware, self.devices // mesh.cut.stages, cut=mesh.cut)
        return replace(whole, shard=mesh.layout, ranks_per_node=node, trained=self.adapters, offloads=self.offloads)
