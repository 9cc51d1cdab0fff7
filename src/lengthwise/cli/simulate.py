"""`lengthwise simulate`: step times on machines that one does not have. Needs no torch and no GPU.

A second run into a folder replaces the files of the first, with the traces that simulation.json lists. A folder that
has files of these names but no simulation.json of ours is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from lengthwise.cli.options import PlanChoices, named_alike, refuse_beside, refuse_but_one
from lengthwise.cli.output import FIGURES, PAGE, plain_console, refuse_others_files, write_simulation
from lengthwise.cli.run_model import trained_of
from lengthwise.cli.simulate_meshes import MeshChoices, compare_ways, search_planners
from lengthwise.cli.sources import (
    KnownLengths,
    lengths_of_data,
    lengths_of_run,
    listed_lengths,
    read_branches,
    refuse_data,
)
from lengthwise.core.errors import Collector, ConfigError, ModelRefused, raise_problems
from lengthwise.core.names import counted
from lengthwise.core.sizes import parse_tokens, read_whole

if TYPE_CHECKING:
    from lengthwise.config import RunConfig
    from lengthwise.cost import Cost
    from lengthwise.simulator import Best, Scenario

_MOST_COUNT = 10_000  # of batches, and of ranks in a trace; more take days, or a browser's memory
_USUAL = ("packed-dp", "static", "single-degree", "power-of-two", "bytescale", "lengthwise")
_NAMES = named_alike("mode virtual offload heads recompute kernel hardware model tokenizer capacity ranks data") | {
    "planner": "--planners",
    "stages": "--pp",
    "tokens": "--batch-tokens",
    "longest_tokens": "--context",
    "capacity_tokens": "--capacity",
    "context_tokens": "--context",
    "one_mode": "Give --planners lengthwise, or --mode free",
    "name_files": "Name them: --data FOLDER/*.jsonl",
    "skip_empty": "give --empty skip",
    "make_room": "Use more devices (--gpus, --pp), --recompute auto, or give --capacity",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationInput:
    """A command line that was read. lengths: function that reads the lengths. Tokens are None if not given.

    trained: LoRA rank if adapters train (`lora`), and whether the host has the optimizer's states (`offloads`).
    """

    planners: list[str]
    lengths: Callable[[], KnownLengths]
    wanted_tokens: int | None
    context_tokens: int | None
    trained: dict[str, Any]
    scenario: Scenario


@dataclass(frozen=True, kw_only=True)
class Simulate:
    """Simulate how long a step takes with Lengthwise and with today's usual methods; prints one sentence and
    seven rows."""

    run_file: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="RUN.yaml", help_behavior_hint="")] = (
        None
    )
    """A run file, for its model, data, batches and LoRA; layout and recomputation are the best ones for all rows."""
    config: Annotated[Path | None, tyro.conf.arg(metavar="RUN.yaml", help_behavior_hint="")] = None
    """The run file, as an option."""
    lengths: Annotated[str | None, tyro.conf.arg(metavar="RECIPE|FILE.json", help_behavior_hint="")] = None
    """Lengths to draw batches from: a published set (github, byted, wikipedia, prolong, wlb_like), a JSON list, or a
    plan file, for its "tokens" and "images"."""
    data: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE.jsonl|FOLDER ...", help_behavior_hint="")] = ()
    """Your own data, in place of --lengths: files of rows as for training (chats need --tokenizer), or folders."""
    tokenizer: Annotated[str, tyro.conf.arg(metavar="NAME|FOLDER")] = "bytes"
    """The tokenizer for --data: bytes (counts four to five times too many for English), or a Hugging Face one."""
    empty: Annotated[str, tyro.conf.arg(metavar="error|skip", help_behavior_hint="(default: error)")] = "error"
    """Whether an empty row of --data stops the command, or is left out and counted."""
    context: Annotated[str | None, tyro.conf.arg(metavar="TOKENS", help_behavior_hint="")] = None
    """The longest sequence, for example 2M (K = 1024, M = 1024 x 1024): published lengths are clipped to it, and the
    fixed mesh is sized for it; default: 128K for published sets, else the longest sequence."""
    batch_tokens: Annotated[str | None, tyro.conf.arg(metavar="TOKENS", help_behavior_hint="(default: 128K a GPU)")] = (
        None
    )
    """Tokens of one step; a run file has its own, and its first steps are then simulated."""
    branches: Annotated[str | None, tyro.conf.arg(metavar="NxTOKENS", help_behavior_hint="")] = None
    """Completions of each prompt, and tokens of every prompt, for example 8x1K (GRPO). Lengths are then those of
    completions, in the order of a step; Lengthwise computes a prompt once where that pays."""
    lora: Annotated[int | None, tyro.conf.arg(metavar="R", help_behavior_hint="")] = None
    """Train LoRA adapters of this LoRA rank on all linear layers instead of the whole model."""
    offload_optimizer: tyro.conf.FlagCreatePairsOff[bool] = False
    """Keep master weights and the optimizer's states in the host's memory, which updates them, in all rows."""
    details: tyro.conf.FlagCreatePairsOff[bool] = False
    """Also compare planners, each on its best mesh, in a long table."""
    planners: Annotated[str | None, tyro.conf.arg(metavar="NAME,...", help_behavior_hint="")] = None
    """Planners to compare in the details; every planner is compared with the best other one. Default:
    packed-dp,static,single-degree,power-of-two,bytescale,lengthwise. Installed packages may have more planners."""
    batches: Annotated[int, tyro.conf.arg(metavar="N")] = 4
    """Batches to simulate, each with its own seed."""
    trace_ranks: Annotated[int, tyro.conf.arg(metavar="N")] = 32
    """The number of ranks that a trace shows."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    """Folder for simulation.json and report.html, with details trace-PLANNER.json (opens in ui.perfetto.dev); default:
    no files."""
    machine: tyro.conf.OmitArgPrefixes[MeshChoices]
    planning: tyro.conf.OmitArgPrefixes[PlanChoices]

    def run(self) -> int:
        from lengthwise.report.page import simulation_page
        from lengthwise.report.simulation import (
            answer_notes,
            answer_sentence,
            answer_table,
            closing_sentences,
            remarks,
            simulation_json,
            simulation_table,
        )
        from lengthwise.report.tables import wrapped

        inputs, console = self._read(), plain_console()
        known = inputs.lengths()
        branches = inputs.scenario.branches
        prompt_tokens = 0 if branches is None else branches.prompt_tokens
        batches, context = known.batches(
            inputs.wanted_tokens,
            self.batches,
            inputs.context_tokens,
            devices=inputs.scenario.devices,
            prompt_tokens=prompt_tokens,
        )
        planners = inputs.planners if self.is_detailed else []
        scenario = replace(inputs.scenario, context_tokens=context)
        comparison = compare_ways(scenario, batches, kinds=self.machine.kinds, **inputs.trained)
        sentence, notes = answer_sentence(comparison, known.unit), [*self._text_alone(), *answer_notes(comparison)]
        if planners and (self.machine.pp or 1) > 1:
            notes = [*notes, "These rows have no stages, which count in the details below."]
        about = self._about(scenario, batches, known, **inputs.trained)
        width = console.width if console.is_terminal else None
        lines = (wrapped(each, width) for each in (about, *notes))
        for part in (wrapped(sentence, width), "", answer_table(comparison), "", *lines):
            console.print(part)
        said, verdict = list[str](), ""
        if planners:
            found = search_planners(planners, batches, scenario)
            comparison = replace(comparison, planners=found)
            said = remarks(found, device_bytes=scenario.hardware.device_bytes, names=self.names())
            devices = f"{counted(scenario.devices, 'device')} of {scenario.hardware.name}"
            absent, is_one = [name for name in _USUAL if name not in planners], scenario.only is not None
            verdict = closing_sentences(found, devices, one_mesh=is_one, not_compared=absent, unit=known.unit)
            for part in ("", simulation_table(found), *said, verdict):
                console.print(part)
        if self.out is not None:
            facts = {"about": about, **self._facts(scenario, batches, known)}
            figures = json.dumps(simulation_json(comparison, facts), indent=1) + "\n"
            page = simulation_page(
                comparison, about=about, sentence=sentence, notes=notes, verdict=verdict, remarks=said
            )
            write_simulation(self.out, figures, page, self._traces(comparison.planners))
            console.print(f"written to {self.out}: {FIGURES}, {PAGE}{', trace-*.json' * bool(planners)}")
        elif not planners:
            console.print(
                "More: --details compares all planners on the same engine; --out FOLDER writes a page, and JSON."
            )
        return 0

    @property
    def is_detailed(self) -> bool:
        """Whether planners are compared in detail: --details, or an option that only they have, is given."""
        machine, planning = self.machine, self.planning
        theirs = (self.planners, machine.pp, planning.mode, planning.virtual, planning.offload, planning.heads)
        return self.details or machine.mesh != "best" or any(each is not None for each in theirs)

    def _traces(self, found: Sequence[Best]) -> dict[str, str]:
        """Return a trace for each planner."""
        from lengthwise.simulator import chrome_trace

        shown = {best.planner: best.found for best in found if best.found is not None}
        return {
            planner: chrome_trace(
                each.first_plan,
                each.first,
                ranks_per_node=each.setting.cost.ranks_per_node,
                most_ranks=self.trace_ranks,
            )
            for planner, each in shown.items()
        }

    def _text_alone(self) -> list[str]:
        """Return lines on the priced part of a model with images that this version does not train."""
        from lengthwise.cost import check_trained

        try:
            check_trained(self.machine.model or "tiny")
        except ModelRefused as refused:
            return [
                f"Only the text part is priced: {self.machine.model} is {refused.got}, "
                "which this version does not train (docs/families.md)."
            ]
        return []

    def names(self) -> dict[str, str]:
        from lengthwise.data.recipes import RECIPES

        return (
            _NAMES
            | ({"ranks": "--gpus"} if self.machine.gpus is not None else {})
            | ({} if self.context else {"context_tokens": "--context (by itself, the longest sequence)"})
            | ({"clip": "clip them with --context"} if self.lengths in RECIPES else {})
        )

    def _read(self) -> SimulationInput:
        problems = Collector()
        attempt = problems.attempt
        if self.out is not None:
            attempt(partial(refuse_others_files, self.out))
        if self.lora is not None:
            attempt(partial(read_whole, "--lora", self.lora))
        branches = None if self.branches is None else attempt(partial(read_branches, self.branches))
        config = attempt(self._read_config)
        trained: dict[str, Any] = {"lora": None, "offloads": False} if config is None else trained_of(config)
        trained = {"lora": self.lora or trained["lora"], "offloads": self.offload_optimizer or trained["offloads"]}
        of_rows = {"--lora": trained["lora"], "--branches": self.branches}
        for option, given in (of_rows | {"--offload-optimizer": trained["offloads"] or None}).items():
            if given is not None and self.is_detailed:
                remedy = "Leave out one of them."
                expected = "nothing beside planners in detail, which train whole models and sequences on the devices"
                problems.add(ConfigError(option, expected=expected, got=str(given), remedy=remedy))
        planners = attempt(self._planner_names)
        for name in ("batches", "trace_ranks"):
            attempt(partial(read_whole, f"--{name.replace('_', '-')}", getattr(self, name), most=_MOST_COUNT))
        lengths = attempt(partial(self._lengths, config)) if config or not self._run_file else None
        text = self.batch_tokens
        wanted = None if text is None else attempt(partial(parse_tokens, text, "--batch-tokens"))
        context = None if self.context is None else attempt(partial(parse_tokens, self.context, "--context"))
        scenario = self.machine.read(self.planning, problems, config=config)
        options, cost = self.machine.options(self.planning), _cost_of_one_mesh(scenario) if scenario else None
        layers = scenario.shape.layers if scenario else 1
        for planner in planners or ["lengthwise"]:
            attempt(partial(replace(options, planner=planner, layers=layers).checked, 1, cost))
        problems.raise_all()
        if not (planners and scenario and lengths):
            raise AssertionError("what is None or empty was reported")
        return SimulationInput(
            planners=planners,
            lengths=lengths,
            wanted_tokens=wanted,
            context_tokens=context,
            trained=trained,
            scenario=replace(scenario, branches=branches),
        )

    @property
    def _run_file(self) -> Path | None:
        return self.config or self.run_file

    def _read_config(self) -> RunConfig | None:
        if self._run_file is None:
            return None
        from lengthwise.config import load_config

        unused = {"--measurements": self.machine.measurements, "--config": self.run_file and self.config}
        refuse_beside(unused, "nothing beside RUN.yaml", "Leave out {option}, or give --data in place of the run file.")
        return load_config(self._run_file)

    def _lengths(self, config: RunConfig | None) -> Callable[[], KnownLengths]:
        """Return the function that reads the lengths; refuse missing data."""
        sources = {"RUN.yaml": config is not None, "--lengths": self.lengths is not None, "--data": bool(self.data)}
        refuse_but_one("simulate", sources)
        counting = {
            "--tokenizer": None if self.tokenizer == "bytes" else self.tokenizer,
            "--empty": None if self.empty == "error" else self.empty,
        }
        if config is not None and self._run_file is not None:
            refuse_beside(counting, "nothing beside a run file, which has its own", "Leave it out, or change the file.")
            return partial(lengths_of_run, self._run_file, config)
        if self.lengths is not None:
            expected = "nothing beside --lengths, which are tokens already"
            refuse_beside(counting, expected, "Leave it out, or give --data.")
            return partial(listed_lengths, self.lengths)
        refuse_data(self.data, self.empty)
        return partial(lengths_of_data, self.data, self.tokenizer, self.empty)

    def _planner_names(self) -> list[str]:
        from lengthwise.planner.registry import unknown_planner

        if self.planners is None:
            return list(_USUAL)
        names = [name.strip() for name in self.planners.split(",") if name.strip()]
        raise_problems([error for name in names if (error := unknown_planner("--planners", name)) is not None])
        if not names or len(set(names)) < len(names):
            got, remedy = repr(self.planners), "Give at least one, once."
            raise ConfigError("--planners", expected="each planner once", got=got, remedy=remedy)
        return names

    def _about(
        self, scenario: Scenario, batches: list[list[int]], known: KnownLengths, *, lora: int | None, offloads: bool
    ) -> str:
        from lengthwise.report.branches import branches_text

        mesh = "" if scenario.only is None else f", all on one mesh: {scenario.only}"
        mesh = f"{mesh}, LoRA of rank {lora}" if lora else mesh
        mesh = f"{mesh}, optimizer on the host" if offloads else mesh
        shared = branches_text(scenario.branches)
        sums = sorted({sum(batch) for batch in batches})
        size = f"{sums[0]:,}" if len(sums) == 1 else f"{sums[0]:,} to {sums[-1]:,}"
        return (
            f"{scenario.shape.name} on {counted(scenario.devices, 'device')} of {scenario.hardware.name}{mesh}; "
            f"{counted(len(batches), 'batch')} of {size} tokens of {known.name}, "
            f"longest {max(map(max, batches)):,}{'; ' * bool(shared)}{shared}"
            f"{'; ' * bool(known.note)}{known.note}"
        )

    def _facts(self, scenario: Scenario, batches: list[list[int]], known: KnownLengths) -> dict[str, Any]:
        given = ("mode", "devices", "capacity_tokens", "context_tokens")
        return {
            "model": scenario.shape.name,
            "hardware": scenario.hardware.name,
            "kernel": scenario.hardware.kernel,
            "cost": _cost_of_one_mesh(scenario).version,
            "mesh": self.machine.mesh,
            "offload": scenario.base.offload,
            "heads": scenario.base.heads,
            "recompute": scenario.kinds,
            "virtual": scenario.base.cut.virtual,
            **{name: getattr(scenario, name) for name in given},
            "lengths": known.name,
            "lengths_in": known.unit,
            "rows_left_out": dict(known.left_out),
            "num_sequences": [len(batch) for batch in batches],
            "batch_tokens": [sum(batch) for batch in batches],
            "longest_tokens": max(map(max, batches)),
        }


def _cost_of_one_mesh(scenario: Scenario) -> Cost:
    return scenario.cost_of(scenario.base)
