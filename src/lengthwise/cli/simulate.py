"""`lengthwise simulate`: what steps would take on machines that one does not have. Needs no torch and no GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro
from rich.console import Console

from lengthwise.core.errors import ConfigError, raise_problems
from lengthwise.core.names import unknown_name
from lengthwise.core.shape import Cluster
from lengthwise.core.sizes import parse_tokens

if TYPE_CHECKING:
    from lengthwise.core.shape import ModelShape
    from lengthwise.cost import Hardware
    from lengthwise.simulator import Setting

_PLANNERS = "static,single-degree,bytescale-naive,bytescale,lengthwise"


@dataclass(frozen=True, kw_only=True)
class Simulate:
    """Simulate steps of several planners on the same batches; writes JSON, traces for Perfetto and a page."""

    model: Annotated[str, tyro.conf.arg(metavar="NAME|config.json")]
    """A named shape, llama-7b for example, or the path of a Hugging Face config.json."""
    lengths: Annotated[str | None, tyro.conf.arg(metavar="RECIPE|FILE.json", help_behavior_hint="")] = None
    """Lengths to draw batches from: a published set (github, byted, wikipedia, prolong, wlb_like), or a JSON list."""
    data: Annotated[Path | None, tyro.conf.arg(metavar="FILE.jsonl|FOLDER", help_behavior_hint="")] = None
    """Your own data, in place of --lengths: rows {"text": ...} or {"input_ids": ...}, or a folder of texts."""
    tokenizer: Annotated[str, tyro.conf.arg(metavar="NAME|FOLDER")] = "bytes"
    """Counts the tokens of texts of --data: bytes (four to five times too many for English), or a Hugging Face one."""
    context: Annotated[str | None, tyro.conf.arg(metavar="TOKENS", help_behavior_hint="")] = None
    """The longest sequence, 2M for example (K = 1024, M = 1024 x 1024): published lengths are clipped to it, and the
    fixed mesh is sized for it; default: 2M for published sets, else the longest sequence."""
    batch_tokens: Annotated[str, tyro.conf.arg(metavar="TOKENS")] = "32M"
    """Tokens of one step."""
    ranks: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Model replicas, of --tp x --pp devices each."""
    gpus: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Devices in all, in place of --ranks."""
    hardware: Annotated[str, tyro.conf.arg(metavar="NAME|FILE.json")] = "h100"
    """h100, bytescale-gpu or cpu, or a JSON file with the keys of lengthwise/cost/hardware.json."""
    capacity: Annotated[str | None, tyro.conf.arg(metavar="TOKENS", help_behavior_hint="")] = None
    """Tokens that one rank holds in a microbatch; default: what fits beside weights and optimizer, by estimate."""
    tp: Annotated[int, tyro.conf.arg(metavar="T")] = 1
    """Devices that split every layer of a rank (tensor parallelism)."""
    pp: Annotated[int, tyro.conf.arg(metavar="P")] = 1
    """Pipeline stages of a rank."""
    virtual: Annotated[int | None, tyro.conf.arg(metavar="V", help_behavior_hint="")] = None
    """Chunks of layers of a stage (interleaved 1F1B), for --mode pipeline; default: 1."""
    mode: Annotated[str, tyro.conf.arg(metavar="free|waves|pipeline", help_behavior_hint="(default: free)")] = "free"
    """How plans are made: free, waves (lengthwise only), or pipeline (planned for the --pp stages; other planners plan
    free and run that through the stages)."""
    offload: Annotated[str, tyro.conf.arg(metavar="off|auto", help_behavior_hint="(default: off)")] = "off"
    """Whether ranks may keep activations on the host to hold longer sequences, for all planners alike."""
    heads: Annotated[str, tyro.conf.arg(metavar="off|auto", help_behavior_hint="(default: off)")] = "off"
    """Whether rings may split attention heads, for all planners alike."""
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

    def run(self) -> int:
        """Run the command; return the exit status."""
        from lengthwise.cli.output import refuse_unwritable, write_atomically
        from lengthwise.report.page import simulation_page
        from lengthwise.report.simulation import closing_sentence, simulation_json, simulation_table
        from lengthwise.simulator import chrome_trace, compare_planners

        planners = self._planner_names()
        refuse_unwritable(self.out)
        setting, batches = self._setting_and_batches()
        console = Console(highlight=False, soft_wrap=True)
        progress = Console(stderr=True, highlight=False)
        with progress.status("planning") as status:
            results = compare_planners(
                planners,
                batches,
                setting,
                told=lambda planner, batch: status.update(f"{planner}, batch {batch + 1} of {len(batches)}"),
                options=self._options(),
            )
        gpus = setting.cluster.ranks * setting.devices
        facts = self._facts(setting, batches)
        sentence = closing_sentence(results, gpus)
        write_atomically(self.out / "simulation.json", json.dumps(simulation_json(results, facts), indent=1) + "\n")
        for each in results:
            trace = chrome_trace(
                each.first_plan,
                each.first,
                ranks_per_node=setting.cost.ranks_per_node,
                most_ranks=max(1, self.trace_ranks),
            )
            write_atomically(self.out / f"trace-{each.planner}.json", trace)
        page = simulation_page(results, batches, about=facts["about"], sentence=sentence)
        write_atomically(self.out / "report.html", page)
        console.print(facts["about"])
        console.print(simulation_table(results, title="one step, mean of batches (simulated, not measured)"))
        console.print(sentence)
        console.print(f"written to {self.out}: simulation.json, trace-*.json, report.html")
        return 0

    def _options(self) -> dict[str, object]:
        """Return what `plan_step` is told of mode and choices; it refuses what does not go together."""
        stages = self.pp if self.mode == "pipeline" else None
        choices = {"offload": self.offload, "heads": self.heads}
        return {"mode": self.mode, "stages": stages, "virtual": self.virtual, **choices}

    def _planner_names(self) -> list[str]:
        from lengthwise.planner import PLANNERS

        names = [name.strip() for name in self.planners.split(",") if name.strip()]
        raise_problems([unknown_name("--planners", name, PLANNERS) for name in names if name not in PLANNERS])
        if not names or len(set(names)) < len(names):
            raise ConfigError(
                "--planners", expected="each planner once", got=repr(self.planners), remedy="Give at least one, once."
            )
        return names

    def _setting_and_batches(self) -> tuple[Setting, list[list[int]]]:
        from lengthwise.cost import all_terms_cost, named_hardware, named_shape
        from lengthwise.simulator import LOADERS, Setting

        if self.loader not in LOADERS:
            raise unknown_name("--loader", self.loader, LOADERS)
        shape, hardware = named_shape(self.model), named_hardware(self.hardware)
        cost = all_terms_cost(shape, hardware, tensor=self.tp, stages=self.pp)
        devices = self.tp * self.pp
        ranks = self._ranks(devices)
        capacities = self._capacities(shape, hardware, ranks)
        context = None if self.context is None else parse_tokens(self.context, "--context")
        batches, context = self._batches(context)
        cluster = Cluster(ranks=ranks, capacity_tokens=max(capacities.values()))
        setting = Setting(
            shape=shape, hardware=hardware, cost=cost, cluster=cluster, context_tokens=context, devices=devices,
            loader=self.loader, capacities=capacities,
        )  # fmt: skip
        return setting, batches

    def _capacities(self, shape: ModelShape, hardware: Hardware, ranks: int) -> dict[str, int]:
        """Tell what a rank holds with each kind of recomputation that may be chosen."""
        from lengthwise.cli.plan import refuse_recompute
        from lengthwise.core.plan import RECOMPUTE_KINDS
        from lengthwise.cost import microbatches_kept, recompute_capacities

        refuse_recompute(self.recompute, self.capacity)
        if self.capacity is not None:
            return {self.recompute: parse_tokens(self.capacity, "--capacity")}
        kinds = RECOMPUTE_KINDS if self.recompute == "auto" else (self.recompute,)
        kept = microbatches_kept(self.pp, self.virtual or 1)
        return recompute_capacities(shape, hardware, ranks, kinds=kinds, devices=self.tp * self.pp, kept=kept)

    def _ranks(self, devices: int) -> int:
        if (self.ranks is None) == (self.gpus is None):
            got = "neither" if self.ranks is None else "both"
            raise ConfigError("simulate", expected="one of --ranks and --gpus", got=got, remedy="Give exactly one.")
        if self.ranks is not None:
            if self.ranks < 1:
                raise ConfigError(
                    "--ranks", expected="at least 1", got=str(self.ranks), remedy="Give a number of them."
                )
            return self.ranks
        assert self.gpus is not None, "one of the two was checked to be given"
        if self.gpus < 1 or self.gpus % devices:
            raise ConfigError(
                "--gpus",
                expected=f"a multiple of --tp x --pp = {devices}",
                got=str(self.gpus),
                remedy="Give all devices of whole ranks.",
            )
        return self.gpus // devices

    def _batches(self, context: int | None) -> tuple[list[list[int]], int]:
        """Draw the lengths of every batch; return them and the context."""
        from lengthwise.planner import RECIPES, draw_lengths

        if (self.lengths is None) == (self.data is None):
            got = "neither" if self.lengths is None else "both"
            raise ConfigError("simulate", expected="one of --lengths and --data", got=got, remedy="Give exactly one.")
        if self.batches < 1:
            raise ConfigError(
                "--batches", expected="at least 1", got=str(self.batches), remedy="Give a number of them."
            )
        wanted = parse_tokens(self.batch_tokens, "--batch-tokens")
        if self.lengths in RECIPES:
            context = context or parse_tokens("2M", "--context")
            return [draw_lengths(self.lengths, wanted, seed, context) for seed in range(self.batches)], context
        known = self._own_lengths()
        longest = max(known)
        if context is not None and longest > context:
            raise ConfigError(
                "--context", expected=f"at least the longest sequence, {longest}", got=str(context), remedy="Raise it."
            )
        return [drawn_batch(known, wanted, seed) for seed in range(self.batches)], context or longest

    def _own_lengths(self) -> list[int]:
        from lengthwise.planner import RECIPES, lengths_from_file

        if self.lengths is not None:
            if not self.lengths.endswith(".json") and not Path(self.lengths).exists():
                raise unknown_name("--lengths", self.lengths, RECIPES)
            return lengths_from_file(self.lengths)
        from lengthwise.config.schema import DataSource
        from lengthwise.data import load_dataset, load_tokenizer

        dataset = load_dataset(
            [DataSource(path=self.data)],
            tokenizer=lambda: load_tokenizer(self.tokenizer),
            vocab_size=None,
            key="--data",
        )
        return [int(length) for length in dataset.lengths]

    def _held(self, setting: Setting) -> str:
        """Tell what a rank holds, by kind of recomputation where there are several."""
        capacities = dict(setting.capacities or {})
        told = [
            f"{kind} {capacity:,}" if len(capacities) > 1 else f"{capacity:,}" for kind, capacity in capacities.items()
        ]
        return ", ".join(told)

    def _facts(self, setting: Setting, batches: list[list[int]]) -> dict[str, Any]:
        cluster, longest = setting.cluster, max(map(max, batches))
        mesh = f" of {self.tp} x {self.pp} devices" if setting.devices > 1 else ""
        return {
            "about": f"{setting.shape.name} on {cluster.ranks} ranks{mesh} of {setting.hardware.name}, "
            f"{self._held(setting)} tokens a rank; {len(batches)} batches of {sum(batches[0]):,} tokens of "
            f"{self.lengths or self.data}, longest {longest:,}; loader: {self.loader}",
            "model": setting.shape.name,
            "hardware": setting.hardware.name,
            "cost": setting.cost.version,
            "mode": self.mode,
            "offload": self.offload,
            "heads": self.heads,
            "recompute": self.recompute,
            "capacities_tokens": dict(setting.capacities or {}),
            "stages": self.pp,
            "virtual": self.virtual or 1,
            "ranks": cluster.ranks,
            "devices_per_rank": setting.devices,
            "capacity_tokens": cluster.capacity_tokens,
            "context_tokens": setting.context_tokens,
            "lengths": str(self.lengths or self.data),
            "num_sequences": [len(batch) for batch in batches],
            "batch_tokens": [sum(batch) for batch in batches],
            "longest_tokens": longest,
            "loader": self.loader,
        }


def drawn_batch(known: list[int], wanted_tokens: int, seed: int) -> list[int]:
    """Draw sequences without putting back, all of them before any twice, until a batch has `wanted_tokens`."""
    rng = np.random.Generator(np.random.PCG64(seed))
    batch: list[int] = []
    total = 0
    while total < wanted_tokens:
        for place in rng.permutation(len(known)).tolist():
            batch.append(known[place])
            total += known[place]
            if total >= wanted_tokens:
                break
    return batch
