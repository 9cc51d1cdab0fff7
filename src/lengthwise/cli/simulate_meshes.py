"""The model, the machine and the meshes of `lengthwise simulate`.

Values of the command line stay for all planners; the rest is searched, each planner in a process of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from lengthwise.cli.options import PlanChoices, refuse_beside, refuse_but_one, refuse_kind
from lengthwise.core.errors import Collector, ConfigError, MemoryShortage
from lengthwise.core.names import counted, unknown_name
from lengthwise.core.plan import RECOMPUTE_KINDS
from lengthwise.core.processes import end_with_parent, kill_workers
from lengthwise.core.shape import LayerCut
from lengthwise.core.sizes import MOST_RANKS, parse_tokens, read_whole
from lengthwise.report.progress import LiveLine, showing

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

    from lengthwise.config import RunConfig
    from lengthwise.core.shape import ModelShape
    from lengthwise.cost import Cost, Hardware
    from lengthwise.planner import PlanOptions
    from lengthwise.simulator import Best, Comparison, RankMesh, Scenario

MESHES = ("best", "same")
_SHOWN_EVERY_SECONDS = 0.2
_SLOW = ("lengthwise", "bytescale", "single-degree")
_MANY_DEVICES = 2048  # above, a plan takes seconds


@dataclass(frozen=True, kw_only=True)
class MeshChoices:
    """The model, the machine, and the meshes to try on it."""

    model: Annotated[str | None, tyro.conf.arg(metavar="NAME|FOLDER", help_behavior_hint="(required)")] = None
    """The model: a named shape, for example llama-7b, or a Hugging Face folder or its config.json."""
    ranks: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Model replicas, of --pp devices each."""
    gpus: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """The number of devices, in place of --ranks."""
    hardware: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE.json", help_behavior_hint="(default: h100)")] = (
        None
    )
    """h100, h200, a100, bytescale-gpu or cpu, or a JSON file with the keys of lengthwise/cost/hardware.json."""
    kernel: Annotated[str | None, tyro.conf.arg(metavar="flash2|flash3|cudnn", help_behavior_hint="")] = None
    """The attention kernel whose speed is used; default: the kernels that training uses on this hardware (h100, h200:
    cudnn for long blocks and flash2 for packs; flash3 where you install it)."""
    measurements: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json", help_behavior_hint="")] = None
    """A file that `lengthwise profile` wrote, in place of --model and --hardware."""
    mesh: Annotated[str, tyro.conf.arg(metavar="best|same")] = "best"
    """best: search the best mesh of every planner, in the same way for all (over those of --capacity, --heads,
    --offload and --recompute that you do not give); same: use one mesh, as given, for all."""
    pp: Annotated[int | None, tyro.conf.arg(metavar="P", help_behavior_hint="(default: 1)")] = None
    """Pipeline stages of a rank, a device each."""
    capacity: Annotated[str | None, tyro.conf.arg(metavar="TOKENS", help_behavior_hint="")] = None
    """Tokens that one rank holds in a microbatch; default: what fits beside weights and optimizer, by estimate, and
    parts of it."""
    recompute: Annotated[
        str | None, tyro.conf.arg(metavar="KIND|auto", help_behavior_hint="(default: auto; same: none)")
    ] = None
    """What backward computes again: none, layer, all_but_attention, elementwise, or auto: for each planner and step
    the fastest kind, at the capacity that it leaves (not with --capacity)."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of recomputation to choose from: the given one, or all."""
        return RECOMPUTE_KINDS if self.recompute is None or self.recompute == "auto" else (self.recompute,)

    def read(self, planning: PlanChoices, problems: Collector, *, config: RunConfig | None = None) -> Scenario | None:
        """Read the scenario; add problems to `problems` and then return None.

        config: run file with the model, unless an option names one.
        """
        attempt, before = problems.attempt, len(problems.problems)
        if self.pp is not None:
            attempt(partial(read_whole, "--pp", self.pp))
        if self.mesh not in MESHES:
            problems.add(unknown_name("--mesh", self.mesh, MESHES))
        attempt(partial(refuse_kind, self.recompute, self.capacity))
        capacity = None if self.capacity is None else attempt(partial(parse_tokens, self.capacity, "--capacity"))
        devices = attempt(self._devices) if (self.pp or 1) > 0 else None
        described = self._priced(problems, config) if self.measurements is None else attempt(self._measured)
        if len(problems.problems) > before or not described or not devices:
            return None
        scenario = attempt(partial(self._scenario, planning, capacity, devices, described))
        if scenario is not None and scenario.only is not None:
            attempt(partial(scenario.setting, scenario.only))
        return scenario

    def _scenario(
        self,
        planning: PlanChoices,
        capacity: int | None,
        devices: int,
        described: tuple[ModelShape, Hardware, Cost | None],
    ) -> Scenario:
        from lengthwise.simulator import RankMesh, Scenario

        shape, hardware, cost = described
        is_same = self.mesh == "same"
        is_fixed = is_same or cost is not None or self.ranks is not None
        kinds = ("none",) if self.recompute is None and (is_same or capacity) else self.kinds
        usual, cut = "off" if is_same else "auto", LayerCut(stages=self.pp or 1, virtual=planning.virtual or 1)
        base = RankMesh(cut=cut, heads=planning.heads or usual, offload=planning.offload or usual)
        scenario = Scenario(
            shape=shape, hardware=hardware, devices=devices, kinds=kinds,
            capacity_tokens=capacity, takes_capacity=is_fixed, base=base, mode=planning.mode, cost=cost,
        )  # fmt: skip
        return replace(scenario, only=base) if is_same else scenario

    def options(self, planning: PlanChoices) -> PlanOptions:
        """Return the options of all planners, to check them before any plan."""
        is_pipeline = planning.mode == "pipeline" or (planning.mode is None and (self.pp or 1) > 1)
        return planning.options(**({"mode": "pipeline", "stages": self.pp} if is_pipeline else {}))

    def _devices(self) -> int:
        refuse_but_one("simulate", {"--ranks": self.ranks is not None, "--gpus": self.gpus is not None})
        of_rank = self.pp or 1
        if self.ranks is not None:
            return read_whole("--ranks", self.ranks, most=MOST_RANKS) * of_rank
        assert self.gpus is not None, "one of the two was checked to be given"
        read_whole("--gpus", self.gpus, most=MOST_RANKS)
        if self.gpus % of_rank:
            expected, remedy = f"a multiple of --pp = {of_rank}", "Give all devices of whole ranks."
            raise ConfigError("--gpus", expected=expected, got=str(self.gpus), remedy=remedy)
        return self.gpus

    def _priced(self, problems: Collector, config: RunConfig | None) -> tuple[ModelShape, Hardware, None] | None:
        from lengthwise.cli.run_model import shape_of_run
        from lengthwise.cost import all_terms_cost, named_hardware, named_shape

        if self.model is None and config is None:
            got, remedy = "neither", "Give exactly one."
            problems.add(ConfigError("simulate", expected="one of --model and --measurements", got=got, remedy=remedy))
        shape = problems.attempt(partial(named_shape, self.model)) if self.model is not None else None
        if config is not None and self.model is None:
            shape = problems.attempt(partial(shape_of_run, config, remedy="Add --model qwen3-8b, or another name."))
        hardware = problems.attempt(partial(named_hardware, self.hardware or "h100"))
        if hardware is not None and self.kernel is not None:
            hardware = problems.attempt(partial(hardware.with_kernel, self.kernel))
        stages = self.pp or 1
        if shape is None or hardware is None or stages < 1:
            return None
        cost = problems.attempt(partial(all_terms_cost, shape, hardware, stages=stages))
        return None if cost is None else (shape, hardware, None)

    def _measured(self) -> tuple[ModelShape, Hardware, Cost]:
        from lengthwise.cost import named_hardware
        from lengthwise.cost.measured import measured_cost, read_measurements

        assert self.measurements is not None, "only called if a file is given"
        problems = Collector()
        unused: dict[str, object] = {"--model": self.model, "--hardware": self.hardware, "--kernel": self.kernel}
        unused["--pp"] = None if self.pp == 1 else self.pp
        expected = "nothing beside --measurements, which are of one model, one device a rank"
        problems.attempt(partial(refuse_beside, unused, expected, "Leave out {option} or --measurements."))
        found = problems.attempt(partial(read_measurements, self.measurements))
        problems.raise_all()
        assert found is not None, "a file that cannot be read is a problem"
        return found.model, named_hardware(found.hardware), measured_cost(found)


def compare_ways(
    scenario: Scenario, batches: Sequence[Sequence[int]], *, lora: int | None = None, **changes: Any
) -> Comparison:
    """Compare FSDP2 and Lengthwise on these batches, with a line of progress.

    lora: rank of the adapters, None if the whole model trains. changes: fields of the scenario to change.
    MemoryShortage: with `offloads`, a node's host has too little memory.
    """
    from lengthwise.cost import check_host
    from lengthwise.cost.shard_choice import lora_params
    from lengthwise.simulator import RankMesh, compare

    adapters = None if lora is None else lora_params(scenario.shape, lora)
    scenario = replace(scenario, adapters=adapters, mode=None, **{"kinds": RECOMPUTE_KINDS, **changes})
    node = min(scenario.devices, scenario.hardware.ranks_per_node)
    check_host(scenario.memory(RankMesh()), node, scenario.hardware.host_bytes, key="--offload-optimizer")
    with showing("comparing FSDP2 and Lengthwise, each at its best settings", sys.stderr):
        return compare(batches, scenario)


def search_planners(planners: Sequence[str], batches: Sequence[Sequence[int]], scenario: Scenario) -> tuple[Best, ...]:
    """Search the best mesh of each planner, in a process a core if a fork is safe, with a line of progress.

    MemoryShortage: a process was ended from outside. LengthwiseError: no planner has a mesh for these sequences.
    """
    from lengthwise.simulator import best_mesh, refuse_unheld

    if scenario.devices > _MANY_DEVICES:
        what = "each planner" if scenario.only else "each planner (--mesh same tries one mesh)"
        print(f"{counted(scenario.devices, 'device')}: this can take minutes for {what}", file=sys.stderr)
    workers = min(os.cpu_count() or 1, len(planners))
    if workers > 1 and sys.platform == "linux" and threading.active_count() == 1:
        found = _searched_in_processes(workers, planners, batches, scenario)
    else:
        with showing("planning", sys.stderr) as phases:

            def show(planner: str, mesh: RankMesh, tried: int) -> None:
                place = f"planner {planners.index(planner) + 1} of {len(planners)}"
                phases.note(f"{place}, {planner}: {_doing(mesh, tried)}")

            found = [best_mesh(planner, batches, scenario, progress=show) for planner in planners]
    refuse_unheld(found)
    return tuple(found)


def _searched_in_processes(
    workers: int, planners: Sequence[str], batches: Sequence[Sequence[int]], scenario: Scenario
) -> list[Best]:
    line = LiveLine(sys.stderr)
    at_work: dict[str, str] = {}
    context = get_context("fork")
    reports = context.SimpleQueue()
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start_worker, initargs=(reports, batches, scenario, os.getpid())
    )
    try:
        slowest_first = [*filter(planners.__contains__, _SLOW), *(each for each in planners if each not in _SLOW)]
        searches = {pool.submit(_search_and_report, planner): planner for planner in slowest_first}
        waiting = set(searches)
        while waiting:
            done, waiting = wait(waiting, timeout=_SHOWN_EVERY_SECONDS, return_when=FIRST_COMPLETED)
            for search in done:
                search.result()
            while not reports.empty():
                planner, doing = reports.get()
                at_work[planner] = doing
            left = {searches[search] for search in waiting}
            now = [f"{planner}: {doing}" for planner, doing in at_work.items() if planner in left]
            line.update("; ".join([f"{len(planners) - len(left)} of {len(planners)} planners done", *now]))
        found = {planner: search.result() for search, planner in searches.items()}
    except BrokenProcessPool:
        expected, got = "each planner's process to finish its search", "one that was killed before its end"
        remedy = "The system kills processes when memory runs out: give fewer devices or --planners, or --mesh same."
        raise MemoryShortage("search of meshes", expected=expected, got=got, remedy=remedy) from None
    finally:
        line.close()
        kill_workers(pool)  # after Ctrl-C nobody waits for a search
        pool.shutdown(wait=True, cancel_futures=True)
    return [found[planner] for planner in planners]


_work: tuple[SimpleQueue[tuple[str, str]], Sequence[Sequence[int]], Scenario] | None = None  # of a worker


def _start_worker(
    reports: SimpleQueue[tuple[str, str]], batches: Sequence[Sequence[int]], scenario: Scenario, parent: int
) -> None:
    """Ignore Ctrl-C, which the command handles, and end when the command ends."""
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent)
    _work = reports, batches, scenario


def _search_and_report(planner: str) -> Best:
    from lengthwise.simulator import best_mesh

    assert _work is not None, "a worker that was not started"
    reports, batches, scenario = _work
    return best_mesh(
        planner, batches, scenario, progress=lambda name, mesh, tried: reports.put((name, _doing(mesh, tried)))
    )


def _doing(mesh: RankMesh, tried: int) -> str:
    return f"plan {tried + 1} ({mesh.capacity_share:g} of what fits)"
