"""`lengthwise plan`: plan one step, on any machine, without torch."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from lengthwise.core.errors import ConfigError, OutputError
from lengthwise.core.shape import ModelShape
from lengthwise.report.figures import count, seconds

if TYPE_CHECKING:
    from lengthwise.config import RunConfig
    from lengthwise.cost import Cost


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Plan one step and write the plan file; prints what the step would take. Needs no torch and no GPU."""

    config: Annotated[Path | None, tyro.conf.arg(metavar="CONFIG.yaml", help_behavior_hint="")] = None
    """A run file: plan its first global batch, as training would."""
    lengths: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json", help_behavior_hint="")] = None
    """A JSON list of lengths in tokens, or {"recipe": ..., "tokens": ..., "seed": ...} of a published data
    set ("longest_tokens" clips it)."""
    ranks: Annotated[int, tyro.conf.arg(metavar="N")]
    """Ranks of the cluster: model replicas, each with its own device."""
    capacity: Annotated[int | None, tyro.conf.arg(metavar="TOKENS", help_behavior_hint="")] = None
    """Tokens that one rank can hold in one microbatch; default: the run file's capacity_tokens."""
    planner: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """lengthwise, static, single-degree, bytescale-naive, bytescale or power-of-two; default: the run file's, else
    lengthwise."""
    mode: Annotated[str, tyro.conf.arg(metavar="free|waves|pipeline", help_behavior_hint="(default: free)")] = "free"
    """How ranks run beside each other: free (each goes on when its own partners are ready; what this version trains),
    waves (all in lock-step, for parameters sharded over all ranks; planner lengthwise only), or pipeline (each rank is
    a pipeline of --stages stages; other planners plan free and run that through the stages)."""
    stages: Annotated[int | None, tyro.conf.arg(metavar="P", help_behavior_hint="")] = None
    """Pipeline stages of a rank, for mode pipeline; --cost is then that of one stage."""
    virtual: Annotated[int | None, tyro.conf.arg(metavar="V", help_behavior_hint="")] = None
    """Chunks of layers of a stage (interleaved 1F1B), for mode pipeline; default: 1."""
    offload: Annotated[str, tyro.conf.arg(metavar="off|auto", help_behavior_hint="(default: off)")] = "off"
    """Whether ranks may keep activations on the host to hold longer sequences: auto (as far as it ends the step sooner;
    this version plans and simulates it, and does not run it) or off."""
    heads: Annotated[str, tyro.conf.arg(metavar="off|auto", help_behavior_hint="(default: off)")] = "off"
    """Whether rings may split attention heads over groups of ranks: auto (where that is quicker; planned and simulated,
    not run by this version) or off."""
    recompute: Annotated[str | None, tyro.conf.arg(metavar="KIND|auto", help_behavior_hint="")] = None
    """What backward computes again: none, layer, all_but_attention, or auto: the kind that ends the step first, each
    with the capacity that it leaves beside weights and optimizer, by estimate; default: the run file's, else none."""
    model_shape: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Whose costs to plan with, llama-7b for example; default: the run file's model, else llama-7b."""
    hardware: Annotated[str | None, tyro.conf.arg(metavar="h100|cpu", help_behavior_hint="")] = None
    """What the ranks are; default: cpu with --config (planned as training does), h100 with --lengths."""
    ranks_per_node: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Neighbouring ranks that share a node and its faster link; default: the hardware's."""
    speeds: Annotated[str | None, tyro.conf.arg(metavar="LIST|FILE.json", help_behavior_hint="")] = None
    """How fast each rank computes, 1 as the costs say: 1,1,0.5,0.5, or runs of neighbours, 8x1.0,8x0.6, or a JSON list.
    Arithmetic and launches take seconds / speed, transfers what they take; default: all 1. Mode free only; planners
    other than lengthwise plan as if all ranks were alike, and are only priced with it."""
    cost: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json", help_behavior_hint="")] = None
    """Plan with these costs in place of a model's and a hardware's: {"quadratic_seconds": q, "linear_seconds": l,
    "fixed_seconds": g, "ring_seconds": c}, left out: 0. A piece of d ranks with S tokens takes (q sum s^2 + l S) / d,
    and if d > 1 also max(0, c S (d - 1) / d - q sum s^2 / d); a microbatch adds g on each of its ranks."""
    out: Annotated[Path, tyro.conf.arg(metavar="PLAN.json")]
    """Where the plan file goes (JSON)."""

    def run(self) -> int:
        """Run the command; return the exit status."""
        from lengthwise.planner import parse_speeds, plan_recomputed
        from lengthwise.report.plans import degree_table, plan_table

        if (self.config is None) == (self.lengths is None):
            got = "neither" if self.config is None else "both"
            raise ConfigError("plan", expected="one of --config and --lengths", got=got, remedy="Give exactly one.")
        config = self._read_config()
        shape = self._shape(config)
        cost = self._cost(shape)
        tokens, context = self._lengths(config, None if self.model_shape or not shape else shape.vocab)
        planner = self.planner or (config.planner if config else "lengthwise")
        layers = shape.layers if shape else 1
        plan = plan_recomputed(
            tokens,
            self.ranks,
            cost,
            self._capacities(config, shape),
            planner=planner,
            layers=layers,
            context_tokens=context,
            offload=self.offload,
            heads=self.heads,
            mode=self.mode,
            speeds=None if self.speeds is None else parse_speeds(self.speeds),
            stages=self.stages,
            virtual=self.virtual,
        )
        write_atomically(self.out, plan.to_json())

        console = Console(highlight=False, soft_wrap=True)
        named = f"model {shape.name} ({cost.version})" if shape and not self.cost else f"costs {cost.version}"
        console.print(
            f"{len(tokens)} sequences, {count(sum(tokens))} tokens, longest {max(tokens)}; "
            f"{plan.ranks} ranks of {plan.capacity} tokens; {named}"
        )
        console.print(plan_table({planner: plan}, cost, title="one step (model, not measured)"))
        console.print(degree_table(plan))
        console.print(f"bound {seconds(float(plan.notes['bound_seconds']))} (model); written to {self.out}")
        return 0

    def _capacities(self, config: RunConfig | None, shape: ModelShape | None) -> dict[str, int]:
        """Tell what a rank holds with each kind of recomputation that may be chosen."""
        if self.recompute is not None and (config is not None or self.cost is not None):
            raise ConfigError(
                "--recompute",
                expected="nothing beside --config, whose recompute counts, or --cost, which knows none",
                got=repr(self.recompute),
                remedy="Leave it out.",
            )
        if self.recompute == "auto":
            from lengthwise.cost import named_hardware, recompute_capacities

            assert shape is not None, "without --cost there is always a shape"
            refuse_capacity(self.capacity)
            return recompute_capacities(shape, named_hardware(self.hardware or "h100"), self.ranks)
        kind = config.recompute if config and not self.cost else self.recompute or "none"
        capacity = config.capacity_tokens if self.capacity is None and config else self.capacity
        if capacity is None:
            remedy = "Add --capacity, or --recompute auto."
            raise ConfigError("--capacity", expected="tokens a rank can hold", got="nothing", remedy=remedy)
        return {kind: capacity}

    def _read_config(self) -> RunConfig | None:
        if self.config is None:
            return None
        from lengthwise.config import load_config

        return load_config(self.config)

    def _shape(self, config: RunConfig | None) -> ModelShape | None:
        """Find the model whose layers, vocabulary and costs count; None where given costs make it needless."""
        from lengthwise.cost import named_shape

        if self.cost is None:
            return _shape_of(config) if config and not self.model_shape else named_shape(self.model_shape or "llama-7b")
        unused = {
            "--model-shape": self.model_shape,
            "--hardware": self.hardware,
            "--ranks-per-node": self.ranks_per_node,
        }
        for option, value in unused.items():
            if value is not None:
                raise ConfigError(
                    option,
                    expected="nothing beside --cost, which is all that a plan then costs",
                    got=repr(value),
                    remedy=f"Leave out {option} or --cost.",
                )
        known = config is not None and (config.model == "tiny" or (Path(config.model) / "config.json").is_file())
        return _shape_of(config) if config and known else None

    def _cost(self, shape: ModelShape | None) -> Cost:
        """Make the costs: those given; those that training plans with; or, for other machines, with all terms."""
        from lengthwise.cost import all_terms_cost, analytic_cost, cost_from_file, named_hardware

        if self.cost is not None:
            return cost_from_file(self.cost)
        assert shape is not None, "without --cost there is always a shape"
        if self.config is not None and self.hardware is None:
            if self.ranks_per_node is not None or self.stages is not None:
                raise ConfigError(
                    "--stages" if self.ranks_per_node is None else "--ranks-per-node",
                    expected="--hardware beside it (without, --config plans as training on CPUs does)",
                    got="no --hardware",
                    remedy="Add --hardware h100, or leave this option out.",
                )
            return analytic_cost(shape, named_hardware("cpu"))
        hardware = named_hardware(self.hardware or "h100")
        if self.ranks_per_node is not None:
            hardware = replace(hardware, ranks_per_node=self.ranks_per_node)
        return all_terms_cost(shape, hardware, stages=1 if self.stages is None else self.stages)

    def _lengths(self, config: RunConfig | None, vocab_size: int | None) -> tuple[list[int], int | None]:
        """Return (lengths to plan, the context that a fixed mesh must hold)."""
        if config is None:
            from lengthwise.planner import lengths_from_file

            assert self.lengths is not None, "one of the two was checked to be given"
            return list(lengths_from_file(self.lengths)), None
        from lengthwise.data import Batches, load_dataset, load_tokenizer

        dataset = load_dataset(
            config.data, tokenizer=lambda: load_tokenizer(config.tokenizer_name), vocab_size=vocab_size
        )
        first = next(iter(Batches(dataset, config)))
        return [int(dataset.lengths[i]) for i in first.ids], int(dataset.lengths.max())


def refuse_capacity(capacity: object) -> None:
    """Refuse a capacity beside `--recompute auto`.

    Raises:
        ConfigError: there is one.
    """
    if capacity is not None:
        expected = "nothing beside --recompute auto: every kind has its own"
        raise ConfigError("--capacity", expected=expected, got=str(capacity), remedy="Leave out one of them.")


def refuse_unwritable(folder: Path) -> None:
    """Refuse a folder that results could not be written into, before what takes long; nothing is made.

    Raises:
        OutputError: it, or what it would be made in, is no folder or may not be written.
    """
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        got = f"{there}, which is no folder" if not there.is_dir() else f"no leave to write into {there}"
        raise OutputError(str(folder), expected="a folder to write into", got=got, remedy="Choose another --out.")


def write_atomically(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        OutputError: it cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise OutputError(
            str(path), expected="a file to write", got=str(error), remedy="Choose another --out."
        ) from None


def _shape_of(config: RunConfig) -> ModelShape:
    """Read the shape of a run file's model without torch: `tiny`, or a folder's config.json."""
    from lengthwise.cost import named_shape, shape_from_config

    if config.model == "tiny":
        return named_shape("tiny")
    path = Path(config.model) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            "model",
            expected="tiny, or a local folder with config.json, to know its costs",
            got=str(error),
            remedy="Add --model-shape llama-7b or another named shape.",
        ) from None
    return shape_from_config(raw)
