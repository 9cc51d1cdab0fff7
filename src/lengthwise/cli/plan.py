"""`lengthwise plan`: plan one step, on any machine, without torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from lengthwise.cli.options import PlanChoices, named_alike, parse_speeds, refuse_beside, refuse_but_one, refuse_kind
from lengthwise.cli.output import plain_console, refuse_unwritable_file, write_atomically
from lengthwise.core.errors import Collector, ConfigError
from lengthwise.core.names import counted
from lengthwise.core.plan import images_beside
from lengthwise.core.shape import UNCUT, LayerCut, ModelShape
from lengthwise.core.sizes import MOST_RANKS, parse_tokens, read_whole
from lengthwise.report.figures import count, seconds, unitless

if TYPE_CHECKING:
    from lengthwise.config import RunConfig
    from lengthwise.core.measurements import Measurements
    from lengthwise.core.plan import Images
    from lengthwise.cost import Cost, Hardware
    from lengthwise.planner import PlanOptions
    from lengthwise.planner.service.step_planning import StepPlanning


_NAMES = named_alike(
    "planner ranks mode stages virtual offload heads recompute speeds hardware capacity measurements"
) | {
    "tokens": "--lengths",
    "capacity_tokens": "--capacity",
    "context_tokens": "the longest sequence",
    "make_room": "Give --capacity in place of --recompute auto",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    """A command line that was read.

    lengths: None if a run file's data are not read yet. adapters: number of adapter parameters; None if the whole model
    trains.
    """

    config: RunConfig | None
    lengths: list[int] | None
    shape: ModelShape | None
    cost: Cost
    capacities: dict[str, int]
    options: PlanOptions
    offload_ratio: float | None
    hardware: Hardware | None
    adapters: int | None


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Plan one step, write the plan file and print the step's estimated time. Needs no torch and no GPU."""

    config: Annotated[Path | None, tyro.conf.arg(metavar="CONFIG.yaml", help_behavior_hint="")] = None
    """A run file: plan its first global batch, as training would."""
    lengths: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json", help_behavior_hint="")] = None
    """A JSON list of lengths in tokens, or {"recipe": ..., "tokens": ..., "seed": ...} of a published data
    set ("longest_tokens" clips it), or a plan file, for its "tokens" and "images"."""
    ranks: Annotated[int, tyro.conf.arg(metavar="N")]
    """Ranks of the cluster: model replicas of one device; with `stages` in the run file, devices, as for train."""
    capacity: Annotated[str | None, tyro.conf.arg(metavar="TOKENS", help_behavior_hint="")] = None
    """Tokens that one rank can hold in one microbatch, 8192 or 8K (K = 1024); default: the run file's
    capacity_tokens."""
    out: Annotated[Path, tyro.conf.arg(metavar="PLAN.json")]
    """The plan file to write (JSON)."""
    planner: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """lengthwise, static, single-degree, bytescale-naive, bytescale, power-of-two, packed-dp, or one that a package
    registers; default: the run file's, else lengthwise."""
    stages: Annotated[int | None, tyro.conf.arg(metavar="P", help_behavior_hint="")] = None
    """Pipeline stages of a rank, for mode pipeline; --cost is then of one stage."""
    recompute: Annotated[str | None, tyro.conf.arg(metavar="KIND|auto", help_behavior_hint="")] = None
    """What backward computes again: none, layer, all_but_attention, elementwise, or auto: the kind with the fastest
    step, at the capacity that it leaves beside weights and optimizer, by estimate; default: the run file's, else
    none."""
    model_shape: Annotated[str | None, tyro.conf.arg(metavar="NAME|FOLDER", help_behavior_hint="")] = None
    """The model whose costs the planner uses: a named shape, for example llama-7b, or a Hugging Face folder or its
    config.json; default: the run file's model, else llama-7b. With --config it needs --hardware."""
    hardware: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE.json", help_behavior_hint="")] = None
    """The device of a rank: h100, h200, a100, bytescale-gpu or cpu, or a JSON file with the keys of
    lengthwise/cost/hardware.json; default: cpu with --config (planned as training does), h100 with --lengths."""
    ranks_per_node: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """The number of neighbouring ranks in a node, which share its faster link; default: the hardware's."""
    speeds: Annotated[str | None, tyro.conf.arg(metavar="LIST|FILE.json", help_behavior_hint="")] = None
    """The relative speed of every rank (1: as the costs say): 1,1,0.5,0.5, or runs of neighbours, 8x1.0,8x0.6, or a
    JSON list. Arithmetic and overhead take seconds / speed; transfers do not change; default: all 1. Mode free only;
    planners other than lengthwise plan for equal ranks, and only their estimated times use the speeds."""
    cost: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json", help_behavior_hint="")] = None
    """Plan with these costs in place of a model's and a hardware's: {"quadratic_seconds": q, "linear_seconds": l,
    "fixed_seconds": g, "ring_seconds": c}, left out: 0. A piece of d ranks with S tokens takes (q sum s^2 + l S) / d,
    and if d > 1 also max(0, c S (d - 1) / d - q sum s^2 / d); a microbatch adds g on each of its ranks."""
    measurements: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json", help_behavior_hint="")] = None
    """Plan with a file that `lengthwise profile` wrote, in place of --model-shape and --hardware; a --config must have
    the model and the precision that were measured."""
    planning: tyro.conf.OmitArgPrefixes[PlanChoices]

    def run(self) -> int:
        from lengthwise.report.plans import degree_table, plan_table

        inputs = self._read()
        tokens, images, context, batch = self._lengths(inputs)
        console = plain_console()
        planning, why = self.planning_of(inputs, tokens, context, batch=batch)
        if why:
            console.print(why)
        options = planning.options
        plan = planning.plan(tokens, images=images)
        write_atomically(self.out, plan.to_json())

        cost = planning.cost
        known = None if self.cost else inputs.shape
        named = f"model {known.name} ({cost.version})" if known else f"costs {cost.version}"
        if self._plans_as_training and not self.cost and not self.measurements:
            named += ": priced for this CPU; use --hardware h100 for GPUs"
        console.print(
            f"{counted(len(tokens), 'sequence')}, {count(sum(tokens))} tokens, longest {max(tokens)}; "
            f"{counted(plan.ranks, 'rank')} of {plan.capacity} tokens; {named}"
        )
        duration = unitless if self.cost else seconds
        source = "model, not measured" if self.measurements is None else "model, from measurements"
        source = "times in the unit of --cost" if self.cost else source
        plans = {inputs.options.planner: plan}
        choices = {"recompute": self.recompute, "offload": options.offload, "heads": options.heads}
        chosen = [name for name, value in choices.items() if value == "auto"]
        console.print(plan_table(plans, cost, title=f"one step ({source})", duration=duration, chosen=chosen))
        console.print(degree_table(plan))
        bound = duration(float(plan.notes["bound_seconds"]))
        console.print(f"bound {bound} ({'in the same unit' if self.cost else 'model'}); written to {self.out}")
        return 0

    def names(self) -> dict[str, str]:
        names = _NAMES if self.config is None else {**_NAMES, "tokens": "tokens"}
        if self.config is not None and self.capacity is None:
            names = {**names, "capacity_tokens": "capacity_tokens"}
        return {**names, "model": "--model-shape"} if self.model_shape else names

    def _read(self) -> PlanInput:
        """Read the command line, except the lengths of a run file's data; raise all its problems together."""
        from lengthwise.cli.run_model import adapters_of
        from lengthwise.cost import named_hardware
        from lengthwise.data.recipes import lengths_from_file

        problems = Collector()
        sources = {"--config": self.config is not None, "--lengths": self.lengths is not None}
        problems.attempt(partial(refuse_but_one, "plan", sources))
        problems.attempt(partial(refuse_unwritable_file, self.out))
        ranks = problems.attempt(partial(read_whole, "ranks", self.ranks, most=MOST_RANKS))
        config = problems.attempt(self._read_config)
        if self.cost:
            unused = self._of_hardware() | {"--hardware": self.hardware, "--measurements": self.measurements}
            expected = "nothing beside --cost, which is all that a plan then costs"
            problems.attempt(partial(refuse_beside, unused, expected, "Leave out {option} or --cost."))
        measured = problems.attempt(partial(self._measured, config)) if self.measurements and not self.cost else None
        hardware = None if self.cost or self.measurements else problems.attempt(self._hardware)
        hardware = named_hardware(measured.hardware) if measured else hardware
        shape = problems.attempt(partial(self._shape, config, measured)) if config or not self.config else None
        adapters = problems.attempt(partial(adapters_of, config)) if config and shape and not self.cost else None
        cost = problems.attempt(partial(self._cost, config, shape, hardware, measured, adapters))
        speeds = problems.attempt(partial(parse_speeds, self.speeds)) if self.speeds is not None else None
        planner, layers = self.planner or (config.planner if config else "lengthwise"), shape.layers if shape else 1
        heads = self.planning.heads or (config.heads if config and not self.cost else "off")
        offload, ratio = self._offload(config)
        mode = self.planning.mode or (config.plan_mode(ranks or 1) if config else "free")
        own = {"heads": heads, "offload": offload, "mode": mode, "stages": self.stages}
        if (cut := self._cut(config)) != UNCUT:
            own |= {"mode": "pipeline", **asdict(cut)}
        options = self.planning.options(planner=planner, layers=layers, speeds=speeds, **own)
        replicas = problems.attempt(partial(self._replicas, config, ranks or len(speeds or [1])))
        problems.attempt(partial(options.checked, replicas or 1, cost))
        lengths = problems.attempt(partial(lengths_from_file, self.lengths)) if self.lengths else None
        capacities = problems.attempt(partial(self._capacities, config, shape, ranks, hardware))
        problems.raise_all()
        assert cost is not None, "an input without costs has a problem"
        assert capacities is not None, "an input without capacities has a problem"
        return PlanInput(
            config=config,
            lengths=lengths,
            shape=shape,
            cost=cost,
            capacities=capacities,
            options=options,
            offload_ratio=ratio,
            hardware=hardware,
            adapters=adapters,
        )

    def planning_of(
        self, inputs: PlanInput, lengths: list[int], context: int | None, *, batch: int
    ) -> tuple[StepPlanning, str]:
        """Return (planning of the step, for a run file as in training; reason of its layout, "" if it is given).

        context, batch: tokens that a fixed mesh must hold, and largest number of tokens of a global batch.
        """
        from lengthwise.cli.run_model import setup_of_run, ties_of
        from lengthwise.planner.service.step_planning import StepPlanning, step_planning

        config, hardware, options = inputs.config, inputs.hardware, replace(inputs.options, context_tokens=context)
        if config is None or hardware is None or inputs.shape is None or not self._lays_out(config):
            planning = StepPlanning(
                ranks=self._replicas(config, self.ranks),
                cost=inputs.cost,
                capacities=inputs.capacities,
                options=options,
                offload_ratio=inputs.offload_ratio,
            )
            return planning, ""
        if self.capacity is not None and config.capacity_tokens != "auto":
            config = config.model_copy(update={"capacity_tokens": max(inputs.capacities.values())})
        known: dict[str, Any] = {"longest": context or 1, "batch": batch, "adapters": inputs.adapters}
        known["ties"] = None if self.model_shape else ties_of(config.model)
        known["lengths"] = None if config.data[0].streaming else lengths
        setup = setup_of_run(config, inputs.shape, hardware, inputs.cost, ranks=self.ranks, **known)
        planning = step_planning(
            setup.memory,
            inputs.cost,
            inputs.capacities,
            offload=options.offload if inputs.offload_ratio is None else inputs.offload_ratio,
            **{name: getattr(options, name) for name in ("planner", "heads", "speeds", "context_tokens")},
        )
        why = [setup.why] if setup.why else []
        if setup.memory.offloads:
            end = seconds(planning.cost.step_end_seconds(planning.ranks))
            why.append(f"optimizer.offload: the step's end, which is not in these times, takes at least {end}")
        return planning, "\n".join(why)

    def _lays_out(self, config: RunConfig) -> bool:
        """Return whether parameters and stages are laid out as in training, which no option changes."""
        return not self.planning.mode and (config.stages == 1 or self._cut(config) != UNCUT)

    def _cut(self, config: RunConfig | None) -> LayerCut:
        """Return the stages of a run file that no option changes; ranks are then counted as in training."""
        given = (self.stages, self.planning.mode, self.planning.virtual, self.cost)
        if config is None or config.stages == 1 or given != (None,) * len(given):
            return UNCUT
        return config.cut

    def _replicas(self, config: RunConfig | None, ranks: int) -> int:
        """Return the ranks of a plan."""
        stages = self._cut(config).stages
        if ranks % stages:
            expected, got = f"a multiple of the {stages} stages", str(ranks)
            raise ConfigError("ranks", expected=expected, got=got, remedy="Give others, or change stages.")
        return ranks // stages

    def _offload(self, config: RunConfig | None) -> tuple[str, float | None]:
        """Return (what the planner may offload, ratio that the run file sets for every microbatch, or None)."""
        if self.planning.offload is not None or config is None or config.offload is None or self.cost:
            return self.planning.offload or "off", None
        ratio = config.offload.ratio
        return (ratio, None) if isinstance(ratio, str) else ("off", ratio)

    def _measured(self, config: RunConfig | None) -> Measurements:
        from lengthwise.cli.run_model import adapters_of, shape_of_run
        from lengthwise.cost.measured import misfits, read_measurements

        assert self.measurements is not None, "only called if a file is given"
        unused = {"--model-shape": self.model_shape, "--hardware": self.hardware, "--stages": self.stages}
        problems = Collector()
        expected = "nothing beside --measurements, which are of one model on one kind of machine"
        problems.attempt(partial(refuse_beside, unused, expected, "Leave out {option} or --measurements."))
        found = problems.attempt(partial(read_measurements, self.measurements))
        shape = problems.attempt(partial(shape_of_run, config)) if config else None
        if found and config and shape:
            where, adapters = str(self.measurements), problems.attempt(partial(adapters_of, config))
            precision = found.precision if config.precision == "auto" else config.precision
            for each in misfits(found, where, shape, precision=precision, adapters=adapters):
                problems.add(each)
        problems.raise_all()
        assert found is not None, "a file that cannot be read is a problem"
        return found

    def _capacities(
        self, config: RunConfig | None, shape: ModelShape | None, ranks: int | None, hardware: Hardware | None
    ) -> dict[str, int]:
        """Return the tokens that a rank holds by kind of recomputation; {} after an earlier problem."""
        if config is not None or self.cost is not None:
            expected = "nothing beside --config, whose recompute counts, or --cost, which knows none"
            refuse_beside({"--recompute": self.recompute}, expected, "Leave it out.")
        refuse_kind(self.recompute, self.capacity)
        if self.recompute == "auto":
            from lengthwise.cost import recompute_capacities, step_memory

            if not (shape and ranks and hardware):
                return {}
            cut = LayerCut(stages=max(1, self.stages or 1), virtual=max(1, self.planning.virtual or 1))
            return recompute_capacities(step_memory(shape, hardware, ranks, cut=cut), hardware)
        kind = config.recompute if config and not self.cost else self.recompute or "none"
        if config and self.capacity is None and config.capacity_tokens == "auto":
            expected = "a number for a plan made here: `capacity_tokens: auto` is measured when a run starts"
            raise ConfigError("--capacity", expected=expected, got="nothing", remedy="Add --capacity.")
        kind = "none" if kind == "auto" else kind
        if self.capacity is not None:
            return {kind: parse_tokens(self.capacity, "--capacity")}
        if self.config is None:
            remedy = "Add --capacity." if self.cost else "Add --capacity, or --recompute auto."
            raise ConfigError("--capacity", expected="tokens a rank can hold", got="nothing", remedy=remedy)
        return {kind: int(config.capacity_tokens)} if config else {}

    def _read_config(self) -> RunConfig | None:
        if self.config is None:
            return None
        from lengthwise.config import load_config

        return load_config(self.config)

    def _of_hardware(self) -> dict[str, object]:
        return {"--model-shape": self.model_shape, "--ranks-per-node": self.ranks_per_node}

    def _shape(self, config: RunConfig | None, measured: Measurements | None) -> ModelShape | None:
        from lengthwise.cli.run_model import shape_of_run
        from lengthwise.cost import named_shape

        if self.measurements and not self.cost:
            return measured.model if measured else None
        if self.cost is None:
            if config is not None and not self.model_shape:
                return shape_of_run(config)
            return named_shape(self.model_shape or "llama-7b")
        known = config is not None and (config.model == "tiny" or (Path(config.model) / "config.json").is_file())
        return shape_of_run(config) if config and known else None

    def _hardware(self) -> Hardware:
        from lengthwise.cost import named_hardware

        if self._plans_as_training:
            expected = "--hardware beside it (without, --config plans as training on CPUs does)"
            remedy = "Add --hardware h100, or leave this option out."
            refuse_beside(self._of_hardware() | {"--stages": self.stages}, expected, remedy, got="no --hardware")
            return named_hardware("cpu")
        hardware = named_hardware(self.hardware or "h100")
        if self.ranks_per_node is not None:
            hardware = replace(hardware, ranks_per_node=read_whole("--ranks-per-node", self.ranks_per_node))
        return hardware

    @property
    def _plans_as_training(self) -> bool:
        return self.config is not None and self.hardware is None

    def _cost(
        self,
        config: RunConfig | None,
        shape: ModelShape | None,
        hardware: Hardware | None,
        measured: Measurements | None,
        adapters: int | None,
    ) -> Cost | None:
        """Return the costs; None if the model or the hardware has a problem, which is reported already."""
        from lengthwise.cost import DTYPE_BYTES, all_terms_cost, costs
        from lengthwise.cost.measured import base_cost, measured_cost

        if self.cost is not None:
            return costs(file=self.cost)
        stages = self.stages or self._cut(config).stages
        if measured is not None:
            cost = measured_cost(measured, stages=stages)
            if self.ranks_per_node is not None:
                cost = replace(cost, ranks_per_node=read_whole("--ranks-per-node", self.ranks_per_node))
            return cost
        if shape is None or hardware is None:
            return None
        of_model: dict[str, Any] = {"adapters": adapters, "quantization": config and config.quantization}
        if config is not None and self._plans_as_training:
            precision = config.precision_on(gpus=hardware.compute_dtype_bytes == 2)
            return base_cost(shape, hardware.name, precision=precision, stages=stages, **of_model)
        if config is not None and config.precision != "auto":
            hardware = replace(hardware, compute_dtype_bytes=DTYPE_BYTES[config.precision])
        return all_terms_cost(shape, hardware, stages=stages, **of_model)

    def _lengths(self, inputs: PlanInput) -> tuple[list[int], Images, int | None, int]:
        """Return (lengths and images to plan, context that a fixed mesh must hold, most tokens of a global batch)."""
        config, shape = inputs.config, inputs.shape
        if config is None:
            assert inputs.lengths is not None, "one of the two was checked to be given"
            return inputs.lengths, images_beside(inputs.lengths), None, sum(inputs.lengths)
        from lengthwise.cli.run_model import images_of
        from lengthwise.data import Batches, load_dataset, load_tokenizer
        from lengthwise.data.load import first_rows

        size, is_stream = config.global_batch, bool(config.data[0].streaming)
        read = partial(first_rows, **size.model_dump()) if is_stream else load_dataset
        dataset = read(
            config.data,
            tokenizer=lambda: load_tokenizer(config.tokenizer_name),
            vocab_size=None if self.model_shape or not shape else shape.vocab,
        )
        batches = Batches(dataset, config)
        rows = next(iter(batches)).ids
        lengths, images = dataset.lengths[rows].tolist(), images_of(config, dataset, rows.tolist())
        if is_stream:  # the other rows are unknown
            longest = max(source.max_tokens or 0 for source in config.data)
            return lengths, images, longest, max(longest * (size.sequences or 1), size.tokens or 0)
        return lengths, images, int(dataset.lengths.max()), batches.most_tokens
