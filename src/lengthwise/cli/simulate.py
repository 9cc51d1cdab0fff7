"""`lengthwise simulate`: what steps would take on machines that one does not have. Needs no torch and no GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console

from lengthwise.cli.options import PlanChoices, named_alike, refuse_beside, refuse_but_one, refuse_recompute
from lengthwise.cli.output import plain_console
from lengthwise.cli.simulate_lengths import KnownLengths, lengths_of_data, listed_lengths, refuse_data
from lengthwise.core.errors import Collector, ConfigError, raise_problems
from lengthwise.core.names import counted, unknown_name
from lengthwise.core.shape import Cluster
from lengthwise.core.sizes import MOST_RANKS, parse_tokens, read_whole

if TYPE_CHECKING:
    from lengthwise.core.shape import ModelShape
    from lengthwise.cost import Cost, Hardware
    from lengthwise.planner import PlanOptions
    from lengthwise.simulator import PlannerResult, Setting

_QUICK_RANKS = 50_000  # up to here no planner takes minutes for a batch
_PLANNERS = "static,single-degree,bytescale-naive,bytescale,lengthwise"

_NAMES = named_alike("mode virtual offload heads recompute hardware model tokenizer capacity ranks data") | {
    "planner": "--planners",
    "stages": "--pp",
    "tensor": "--tp",
    "tokens": "--batch-tokens",
    "longest_tokens": "--context",
    "capacity_tokens": "--capacity",
    "context_tokens": "--context",
    "one_mode": "Give --planners lengthwise, or --mode free",
    "name_files": "Name them: --data FOLDER/*.jsonl",
    "skip_empty": "give --empty skip",
    "make_room": "Use more devices a rank (--tp, --pp), --recompute auto, or give --capacity",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A command line that was read; `known` is None where data are still to be read.

    The setting's context is that of the batches once they are drawn; `context_tokens`: what the user says of it.
    """

    planners: list[str]
    known: KnownLengths | None
    wanted_tokens: int
    context_tokens: int | None
    setting: Setting


@dataclass(frozen=True, kw_only=True)
class Simulate:
    """Simulate steps of several planners on the same batches; writes JSON, traces for Perfetto and a page."""

    model: Annotated[str | None, tyro.conf.arg(metavar="NAME|FOLDER", help_behavior_hint="(required)")] = None
    """A named shape, llama-7b for example, or a Hugging Face folder or its config.json."""
    lengths: Annotated[str | None, tyro.conf.arg(metavar="RECIPE|FILE.json", help_behavior_hint="")] = None
    """Lengths to draw batches from: a published set (github, byted, wikipedia, prolong, wlb_like), or a JSON list."""
    data: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE.jsonl|FOLDER ...", help_behavior_hint="")] = ()
    """Your own data, in place of --lengths: files of rows {"text": ...} or {"input_ids": ...}, or folders of texts."""
    tokenizer: Annotated[str, tyro.conf.arg(metavar="NAME|FOLDER")] = "bytes"
    """Counts the tokens of texts of --data: bytes (four to five times too many for English), or a Hugging Face one."""
    empty: Annotated[str, tyro.conf.arg(metavar="error|skip", help_behavior_hint="(default: error)")] = "error"
    """Whether an empty row of --data stops the command, or is left out and counted."""
    context: Annotated[str | None, tyro.conf.arg(metavar="TOKENS", help_behavior_hint="")] = None
    """The longest sequence, 2M for example (K = 1024, M = 1024 x 1024): published lengths are clipped to it, and the
    fixed mesh is sized for it; default: 2M for published sets, else the longest sequence."""
    batch_tokens: Annotated[str, tyro.conf.arg(metavar="TOKENS")] = "32M"
    """Tokens of one step."""
    ranks: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Model replicas, of --tp x --pp devices each."""
    gpus: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Devices in all, in place of --ranks."""
    hardware: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE.json", help_behavior_hint="(default: h100)")] = (
        None
    )
    """h100, h200, bytescale-gpu or cpu, or a JSON file with the keys of lengthwise/cost/hardware.json."""
    measurements: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json", help_behavior_hint="")] = None
    """What `lengthwise profile` measured, in place of --model and --hardware."""
    capacity: Annotated[str | None, tyro.conf.arg(metavar="TOKENS", help_behavior_hint="")] = None
    """Tokens that one rank holds in a microbatch; default: what fits beside weights and optimizer, by estimate."""
    tp: Annotated[int, tyro.conf.arg(metavar="T")] = 1
    """Devices that split every layer of a rank (tensor parallelism)."""
    pp: Annotated[int, tyro.conf.arg(metavar="P")] = 1
    """Pipeline stages of a rank."""
    recompute: Annotated[str, tyro.conf.arg(metavar="KIND|auto", help_behavior_hint="(default: none)")] = "none"
    """What backward computes again: none, layer, all_but_attention, or auto: for each planner and step the kind that
    ends first, with the capacity that it leaves (no --capacity then)."""
    planners: Annotated[str, tyro.conf.arg(metavar="NAME,...")] = _PLANNERS
    """Planners to compare; speed-ups are over the first."""
    batches: Annotated[int, tyro.conf.arg(metavar="N")] = 4
    """Batches to simulate, each with its own seed."""
    loader: Annotated[str, tyro.conf.arg(metavar="none|local|remote")] = "none"
    """How data is loaded: none (it is there), local (every process reads for itself), remote (each sequence once)."""
    trace_ranks: Annotated[int, tyro.conf.arg(metavar="N")] = 32
    """Ranks that a trace shows."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Folder for simulation.json, trace-PLANNER.json (opens in ui.perfetto.dev) and report.html."""
    planning: tyro.conf.OmitArgPrefixes[PlanChoices]

    def run(self) -> int:
        """Run the command; return the exit status."""
        from lengthwise.cli.simulate_files import write_simulation
        from lengthwise.report.page import simulation_page
        from lengthwise.report.simulation import closing_sentence, remarks, simulation_json, simulation_table
        from lengthwise.simulator import chrome_trace

        asked = self._read()
        known = asked.known or lengths_of_data(self.data, self.tokenizer, self.empty)
        batches, context = known.batches(asked.wanted_tokens, self.batches, asked.context_tokens)
        setting = replace(asked.setting, context_tokens=context)
        results = self._simulated(asked, setting, batches)
        chosen = self._simulated_again(asked, setting, batches)
        facts = self._facts(setting, batches, known)
        devices = counted(setting.cluster.ranks * setting.devices, "GPU")
        mesh = f"{devices}, {f'--tp {self.tp} x --pp {self.pp}' if setting.devices > 1 else 'one'} a rank,"
        sentence = closing_sentence(results, mesh, chosen=chosen, unit=known.unit)
        beside = remarks(results, device_bytes=setting.hardware.device_bytes, chose_recompute=self.recompute == "auto")
        shown = {"ranks_per_node": setting.cost.ranks_per_node, "most_ranks": self.trace_ranks}
        traces = {each.planner: chrome_trace(each.first_plan, each.first, **shown) for each in results}
        figures = json.dumps(simulation_json(results, facts, chosen), indent=1) + "\n"
        page = simulation_page(results, batches, about=facts["about"], sentence=sentence, remarks=beside)
        write_simulation(self.out, figures, page, traces)
        console = plain_console()
        table = simulation_table(results, title="one step, mean of batches (simulated, not measured)")
        written = f"written to {self.out}: simulation.json, trace-*.json, report.html"
        for part in (facts["about"], table, *beside, sentence, written):
            console.print(part)
        return 0

    def _simulated_again(self, asked: Asked, setting: Setting, batches: list[list[int]]) -> list[PlannerResult]:
        """Run the first batch of first and last planner with heads and recomputation chosen, unless asked otherwise."""
        options, capacities = replace(self._options(), heads="auto"), setting.capacities
        if self.capacity is None and self.recompute == "none":
            kinds = replace(self, recompute="auto")
            capacities = kinds._capacities(setting.shape, setting.hardware, setting.cluster.ranks)
        if len(asked.planners) == 1 or (options == self._options() and capacities == setting.capacities):
            return []
        ends = replace(asked, planners=[asked.planners[0], asked.planners[-1]])
        return self._simulated(ends, replace(setting, capacities=capacities), batches[:1], options)

    def _simulated(
        self, asked: Asked, setting: Setting, batches: list[list[int]], options: PlanOptions | None = None
    ) -> list[PlannerResult]:
        from lengthwise.simulator import compare_planners

        progress = Console(stderr=True, highlight=False)
        if setting.cluster.ranks > _QUICK_RANKS:
            progress.print(f"{setting.cluster.ranks:,} ranks: this can take minutes for each planner and batch")
        with progress.status("planning") as status:
            return compare_planners(
                asked.planners,
                batches,
                setting,
                progress=lambda planner, batch: status.update(f"{planner}, batch {batch + 1} of {len(batches)}"),
                options=options or self._options(),
            )

    def _options(self) -> PlanOptions:
        """Return mode and choices, for every planner alike."""
        return self.planning.options(stages=self.pp if self.planning.mode == "pipeline" else None)

    def names(self) -> dict[str, str]:
        """Map names of the library to what the user typed for them."""
        from lengthwise.data.recipes import RECIPES

        return (
            _NAMES
            | ({"ranks": "--gpus"} if self.gpus is not None else {})
            | ({} if self.context else {"context_tokens": "--context (by itself, the longest sequence)"})
            | ({"clip": "clip them with --context"} if self.lengths in RECIPES else {})
        )

    def _read(self) -> Asked:
        """Read all of the command line but the data; raise all that is wrong with it."""
        from lengthwise.cli.simulate_files import refuse_others_files
        from lengthwise.simulator import LOADERS, Setting

        problems = Collector()
        attempt = problems.attempt
        attempt(partial(refuse_others_files, self.out))
        planners = attempt(self._planner_names)
        for name in ("batches", "trace_ranks", "tp", "pp"):
            attempt(partial(read_whole, f"--{name.replace('_', '-')}", getattr(self, name)))
        if self.loader not in LOADERS:
            problems.add(unknown_name("--loader", self.loader, LOADERS))
        known = attempt(self._known_lengths)
        wanted = attempt(partial(parse_tokens, self.batch_tokens, "--batch-tokens"))
        context = None if self.context is None else attempt(partial(parse_tokens, self.context, "--context"))
        is_mesh = self.tp > 0 and self.pp > 0
        if self.measurements is None:
            shape, hardware, cost = self._priced(problems)
        else:
            shape, hardware, cost = attempt(self._measured) or (None, None, None)
        options = replace(self._options(), layers=shape.layers if shape else 1)
        for planner in planners or ["lengthwise"]:
            attempt(partial(replace(options, planner=planner).checked, 1, cost))
        ranks = attempt(partial(self._ranks, self.tp * self.pp)) if is_mesh else None
        capacities = attempt(partial(self._capacities, shape, hardware, ranks))
        problems.raise_all()
        if not (shape and hardware and cost and ranks and capacities and planners and wanted):
            raise AssertionError("what is None or empty was reported")
        setting = Setting(
            shape=shape, hardware=hardware, cost=cost, devices=self.tp * self.pp, context_tokens=context or 1,
            cluster=Cluster(ranks=ranks, capacity_tokens=max(capacities.values())), loader=self.loader,
            capacities=capacities,
        )  # fmt: skip
        return Asked(planners=planners, known=known, wanted_tokens=wanted, context_tokens=context, setting=setting)

    def _known_lengths(self) -> KnownLengths | None:
        """Take lengths that need no reading of data, and refuse data that are not there."""
        refuse_but_one("simulate", {"--lengths": self.lengths is not None, "--data": bool(self.data)})
        if self.lengths is not None:
            unused = {
                "--tokenizer": None if self.tokenizer == "bytes" else self.tokenizer,
                "--empty": None if self.empty == "error" else self.empty,
            }
            refuse_beside(unused, "nothing beside --lengths, which are tokens already", "Leave it out, or give --data.")
            return listed_lengths(self.lengths)
        refuse_data(self.data, self.empty)
        return None

    def _priced(self, problems: Collector) -> tuple[ModelShape | None, Hardware | None, Cost | None]:
        """Find the model and the hardware, and make their costs; a None has a problem, which is kept."""
        from lengthwise.cost import all_terms_cost, named_hardware, named_shape

        if self.model is None:
            got, remedy = "neither", "Give exactly one."
            problems.add(ConfigError("simulate", expected="one of --model and --measurements", got=got, remedy=remedy))
        shape = problems.attempt(partial(named_shape, self.model)) if self.model is not None else None
        hardware = problems.attempt(partial(named_hardware, self.hardware or "h100"))
        if shape is None or hardware is None or self.tp < 1 or self.pp < 1:
            return shape, hardware, None
        cost = problems.attempt(partial(all_terms_cost, shape, hardware, tensor=self.tp, stages=self.pp))
        return shape, hardware, cost

    def _measured(self) -> tuple[ModelShape, Hardware, Cost]:
        """Read the model, the hardware of what was not measured, and the costs from a file of measurements."""
        from lengthwise.cost import named_hardware
        from lengthwise.cost.measured import measured_cost, measured_shape, read_measurements

        assert self.measurements is not None, "only asked for where there is a file"
        problems = Collector()
        meshes = {"--tp": self.tp, "--pp": self.pp}
        unused = {"--model": self.model, "--hardware": self.hardware}
        unused |= {option: number for option, number in meshes.items() if number != 1}
        expected = "nothing beside --measurements, which are of one model, one device a rank"
        problems.attempt(partial(refuse_beside, unused, expected, "Leave out {option} or --measurements."))
        found = problems.attempt(partial(read_measurements, self.measurements))
        problems.raise_all()
        assert found is not None, "a file that was not read must have been a problem"
        return measured_shape(found), named_hardware(found.hardware), measured_cost(found)

    def _planner_names(self) -> list[str]:
        from lengthwise.planner.registry import planner_names

        names = [name.strip() for name in self.planners.split(",") if name.strip()]
        known = planner_names()
        raise_problems([unknown_name("--planners", name, known) for name in names if name not in known])
        if not names or len(set(names)) < len(names):
            got, remedy = repr(self.planners), "Give at least one, once."
            raise ConfigError("--planners", expected="each planner once", got=got, remedy=remedy)
        return names

    def _capacities(self, shape: ModelShape | None, hardware: Hardware | None, ranks: int | None) -> dict[str, int]:
        """Return the tokens a rank holds by kind of recomputation to choose from; empty where a None hides it."""
        from lengthwise.core.plan import RECOMPUTE_KINDS
        from lengthwise.cost import recompute_capacities, step_memory

        refuse_recompute(self.recompute, self.capacity)
        if self.capacity is not None:
            return {self.recompute: parse_tokens(self.capacity, "--capacity")}
        if shape is None or hardware is None or ranks is None:
            return {}
        kinds = RECOMPUTE_KINDS if self.recompute == "auto" else (self.recompute,)
        virtual = max(1, self.planning.virtual or 1)
        memory = step_memory(shape, hardware, ranks, tensor=self.tp, stages=self.pp, virtual=virtual)
        return recompute_capacities(memory, hardware, kinds=kinds)

    def _ranks(self, devices: int) -> int:
        refuse_but_one("simulate", {"--ranks": self.ranks is not None, "--gpus": self.gpus is not None})
        if self.ranks is not None:
            return read_whole("--ranks", self.ranks, most=MOST_RANKS)
        assert self.gpus is not None, "one of the two was checked to be given"
        read_whole("--gpus", self.gpus, most=MOST_RANKS)
        if self.gpus % devices:
            expected, remedy = f"a multiple of --tp x --pp = {devices}", "Give all devices of whole ranks."
            raise ConfigError("--gpus", expected=expected, got=str(self.gpus), remedy=remedy)
        return self.gpus // devices

    def _about(self, setting: Setting, batches: list[list[int]], known: KnownLengths) -> str:
        """Say in one line what is simulated, and how its lengths were counted."""
        mesh = f" of {self.tp} x {self.pp} devices" if setting.devices > 1 else ""
        held = {kind: f"{capacity:,}" for kind, capacity in (setting.capacities or {}).items()}
        capacity = ", ".join(held.values() if len(held) == 1 else map(" ".join, held.items()))
        sums = sorted({sum(batch) for batch in batches})
        size = f"{sums[0]:,}" if len(sums) == 1 else f"{sums[0]:,} to {sums[-1]:,}"
        return (
            f"{setting.shape.name} on {counted(setting.cluster.ranks, 'rank')}{mesh} of {setting.hardware.name}, "
            f"{capacity} tokens a rank; {counted(len(batches), 'batch')} of {size} tokens of {known.name}, "
            f"longest {max(map(max, batches)):,}; loader: {self.loader}{'; ' if known.note else ''}{known.note}"
        )

    def _facts(self, setting: Setting, batches: list[list[int]], known: KnownLengths) -> dict[str, Any]:
        cluster = setting.cluster
        return {
            "about": self._about(setting, batches, known),
            "model": setting.shape.name,
            "hardware": setting.hardware.name,
            "cost": setting.cost.version,
            "mode": self.planning.mode,
            "offload": self.planning.offload or "off",
            "heads": self.planning.heads or "off",
            "recompute": self.recompute,
            "capacities_tokens": dict(setting.capacities or {}),
            "stages": self.pp,
            "virtual": self.planning.virtual or 1,
            "ranks": cluster.ranks,
            "devices_per_rank": setting.devices,
            "capacity_tokens": cluster.capacity_tokens,
            "context_tokens": setting.context_tokens,
            "lengths": known.name,
            "lengths_in": known.unit,
            "rows_left_out": dict(known.left_out),
            "num_sequences": [len(batch) for batch in batches],
            "batch_tokens": [sum(batch) for batch in batches],
            "longest_tokens": max(map(max, batches)),
            "loader": self.loader,
        }
