"""A comparison: today's usual methods, each at its own best settings, against Lengthwise.

Without stages: FSDP2 with padding, with packing, and with one size of ring (`rivals`), of padded rows as in TRL, or of
packs, in the order of a shuffled set or, with one's own sampler, sorted by work; and Lengthwise as it trains by
default: with the layout that a run takes (hybrid as if all nodes ran in lock-step), microbatches as memory allows. All
are planned, simulated and searched alike (`mesh_search`), with each sequence whole and one attention kernel; then ours
once more, if sequences share prompts, and the quickest rows with other kernels. Beside them: degrees by
Megatron-Core's rule, a power of two for each sequence, on our engine (`zero1`, as it has). A comparison on 8 devices
takes a few seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from lengthwise.core.errors import MemoryShortage, PlanError
from lengthwise.cost import LayoutSeconds, choose_shard, wanted_tokens
from lengthwise.cost.shard_choice import Shard
from lengthwise.planner import arithmetic_seconds
from lengthwise.simulator.found import TooLarge, run_batches
from lengthwise.simulator.layouts import MOST_RANKS, layout_seconds
from lengthwise.simulator.mesh_search import Best, MeshSearch
from lengthwise.simulator.meshes import RankMesh, Scenario
from lengthwise.simulator.rivals import PACKED, PADDED, RIVALS, lock_steps

OURS, POWERS = "Lengthwise", "power-of-two degrees"
_NEAR = 1.25  # times the quickest: another kernel may turn the order
LAYOUTS: tuple[Shard, ...] = ("zero1", "zero3", "hybrid")  # of parameters over the ranks

Batches = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Results of each way to train on the batches of a scenario; a batch is the lengths of its sequences in tokens.

    rivals: FSDP2 in each way that exists on these devices. powers: `POWERS`, or None on one device. layouts: Lengthwise
    with each layout, in the order of `LAYOUTS`. auto: layout that `shard: auto` takes, or None if none fits without
    offload. shared: Lengthwise on the mesh of `apart` with plans that may share prompts, or None if sequences share
    none or no such plan fits. planners: planners in detail. kernels: gain over FSDP2 with other attention kernels of
    the hardware that are as fast, by their names.
    """

    scenario: Scenario
    batches: Batches
    rivals: tuple[Best, ...]
    layouts: tuple[Best, ...]
    auto: Shard | None = None
    powers: Best | None = None
    shared: Best | None = None
    planners: tuple[Best, ...] = ()
    kernels: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def ours(self) -> Best:
        """Lengthwise as it trains these sequences."""
        return self.shared or self.apart

    @property
    def apart(self) -> Best:
        """Lengthwise, each sequence whole, with the layout that a run takes, or the quickest if all need offload."""
        if self.auto:
            return self.layouts[LAYOUTS.index(self.auto)]
        quickest = min(self.layouts, key=_seconds)
        return quickest if quickest.found else self.layouts[-1]

    @property
    def rows(self) -> tuple[Best, ...]:
        """All ways to train, ours last."""
        return (*self.rivals, *([self.powers] if self.powers else []), self.ours)

    @property
    def best_other(self) -> Best | None:
        """The quickest of FSDP2's rows, of equals in three digits the first, or None if none fits."""
        fitting = [row for row in self.rivals if row.found is not None]
        return min(fitting, key=lambda row: float(f"{_seconds(row):.3g}"), default=None)

    @property
    def longest(self) -> int:
        """Length of the longest sequence, in tokens."""
        return max(map(max, self.batches))


def compare(batches: Batches, scenario: Scenario) -> Comparison:
    """Compare FSDP2 and Lengthwise on the same batches, each at its best settings."""
    rivals = tuple(_rival(name, batches, scenario) for name in (RIVALS if scenario.devices > 1 else RIVALS[:2]))
    layouts = tuple(compare_layouts(batches, scenario))
    auto = auto_layout(batches, scenario, layouts)
    powers = _powers(batches, scenario) if scenario.devices > 1 else None
    found = Comparison(scenario=scenario, batches=batches, rivals=rivals, layouts=layouts, auto=auto, powers=powers)
    found = replace(found, shared=_shared(found.apart, batches, scenario))
    return replace(found, kernels=_by_kernel(found))


def _by_kernel(found: Comparison) -> dict[str, float]:
    """Return the gain over the rows of FSDP2 that may be quickest, at their best settings.

    Ours keeps its mesh, and what sharing prompts gains there.
    """
    scenario, ours, quickest = found.scenario, found.apart.found, found.best_other
    hardware, gains = scenario.hardware, dict[str, float]()
    if scenario.cost is not None or ours is None or quickest is None:
        return {}
    near = [row.planner for row in found.rivals if _seconds(row) <= _NEAR * _seconds(quickest)]
    for kernel in hardware.kernels:
        if kernel.name == hardware.kernel or kernel.attention_efficiency < hardware.attention_efficiency:
            continue
        other = replace(scenario, hardware=hardware.with_kernel(kernel.name))
        seconds = min(_seconds(_rival(name, found.batches, other)) for name in near)
        search = MeshSearch(planner="lengthwise", batches=found.batches, scenario=other)
        if same := search.best_of([replace(ours.mesh, held=tuple(ours.held_tokens.items()))]):
            gains[kernel.name] = seconds / same.mean_seconds * _seconds(found.apart) / _seconds(found.ours)
    return gains


def auto_layout(batches: Batches, scenario: Scenario, layouts: Sequence[Best]) -> Shard | None:
    """Return the layout that a run of these batches takes by itself, or None if none fits without offload.

    A run decides by its first batch, which `layouts` have simulated; of many ranks it plans a share, as this does.
    """
    found = [row.found for row in layouts if row.found is not None]
    took = {each.mesh.layout: each.step_seconds[0] for each in found if not each.most("most_offload")}
    longest, capacity, kinds = max(map(max, batches)), scenario.capacity_tokens, scenario.kinds
    room, cost = scenario.hardware.device_bytes, scenario.cost_of(RankMesh())
    seconds: LayoutSeconds = lambda memory: took.get(memory.shard, inf)  # noqa: E731
    if scenario.devices > MOST_RANKS:
        seconds = layout_seconds(batches[0], cost, room, kinds=kinds, capacity_tokens=capacity)
    tokens = capacity or wanted_tokens(scenario.devices, longest=longest)
    try:
        shard = choose_shard(scenario.memory(RankMesh()), room, tokens=tokens, kinds=kinds, seconds=seconds).shard
    except MemoryShortage:
        return None
    return shard if shard in took else None


def compare_layouts(batches: Batches, scenario: Scenario) -> list[Best]:
    """Run Lengthwise with each layout that exists here, in the order of `LAYOUTS`."""
    is_node = scenario.devices <= scenario.cost_of(RankMesh()).ranks_per_node
    rows: list[Best] = []
    for layout in LAYOUTS[:1] if scenario.devices == 1 else LAYOUTS[:2] if is_node else LAYOUTS:
        like = rows[-1].found if layout == "hybrid" else None  # hybrid gathers in the same waves as zero3
        rows.append(_ours(layout, batches, scenario, like=like and like.steps[0].recompute))
    return rows


def _shared(apart: Best, batches: Batches, scenario: Scenario) -> Best | None:
    """Run Lengthwise on the mesh of `apart` with plans that may compute prompts once."""
    if scenario.branches is None or apart.found is None:
        return None
    setting = scenario.setting(apart.found.mesh)
    try:
        return replace(apart, found=run_batches("lengthwise", batches, setting, shared=scenario.branches.shared))
    except TooLarge:
        return None


def _rival(name: str, batches: Batches, scenario: Scenario) -> Best:
    """Run one of `RIVALS` at its best settings."""
    held = _held_by_work(batches, scenario, "zero3")
    tries = lock_steps(name, batches, scenario.devices, held, layers=scenario.shape.layers)
    meshes = [RankMesh(layout="zero3", held=((kind, held),), lock_step=how) for kind, held, how in tries]
    found = MeshSearch(planner=name, batches=batches, scenario=scenario).best_of(meshes)
    cuts = name not in (PADDED, PACKED)
    return Best(planner=name, found=found, refusal=None if found else _unheld(batches, scenario, "zero3", cuts=cuts))


def _powers(batches: Batches, scenario: Scenario) -> Best:
    """Run degrees by powers of two on our engine, at the best of the capacities that fit; offload as in `_ours`."""
    found = None
    for offload in ("off", "auto"):
        alone = replace(scenario, only=None, base=RankMesh(heads="auto", offload=offload))
        if found := MeshSearch(planner="power-of-two", batches=batches, scenario=alone).best():
            break
    return Best(planner=POWERS, found=found, refusal=None if found else _unheld(batches, scenario, "zero1", cuts=True))


def _ours(layout: Shard, batches: Batches, scenario: Scenario, *, like: str | None = None) -> Best:
    """Run Lengthwise with a layout, with offload only if nothing else holds the sequences.

    like: kind of recomputation to take if it holds them.
    """
    search = MeshSearch(planner="lengthwise", batches=batches, scenario=scenario)
    held = tuple(_held_by_work(batches, scenario, layout).items())
    first = tuple(each for each in held if each[0] == like)
    for some, offload in ((first, "off"), (held, "off"), (held, "auto")):
        mesh = RankMesh(layout=layout, held=some, heads="auto", offload=offload)
        if some and (found := search.best_of([mesh])):
            return Best(planner=OURS, found=found)
    return Best(planner=OURS, refusal=_unheld(batches, scenario, layout, cuts=True))


def _held_by_work(batches: Batches, scenario: Scenario, layout: Shard) -> dict[str, int]:
    """Return the tokens that a rank holds, by recomputation, the kind of least arithmetic first."""
    cost = scenario.cost_of(RankMesh(layout=layout))
    held = scenario.held(layout).items()
    return dict(sorted(held, key=lambda each: arithmetic_seconds(batches[0], cost, each[0])))


def _unheld(batches: Batches, scenario: Scenario, layout: Shard, *, cuts: bool) -> PlanError:
    """Return the error for sequences that no mesh of a layout holds. cuts: True if all devices share a sequence."""
    longest, capacities = max(map(max, batches)), scenario.held(layout)
    if not capacities:
        states = scenario.memory(RankMesh(layout=layout)).state_bytes() / 1e9
        got = f"no room beside {states:.0f} GB of parameters and states on each GPU"
    else:
        most = max(capacities.values())
        got = f"all GPUs hold {scenario.devices * most:,}" if cuts else f"a GPU holds {most:,}"
        got = f"longest sequence {longest:,}, {got}"
    return PlanError("sequences", expected="room for all", got=got, remedy="Use more devices, or clip the sequences.")


def _seconds(row: Best) -> float:
    return inf if row.found is None else row.found.mean_seconds
