"""The settings of a run and the rules between them; the keys of a run file are exactly these fields.

Types are strict: `steps: true` is an error. Descriptions give unit and default: users read them beside a wrong value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, ValidationError, WrapValidator, model_validator

from lengthwise.config.optimizer import OptimizerConfig
from lengthwise.config.sections import (
    CheckpointConfig,
    DataSource,
    EvalConfig,
    GlobalBatch,
    LoraConfig,
    OffloadConfig,
    SaveConfig,
    read_meanwhile,
    scheme_of,
)
from lengthwise.config.settings import (
    Attention,
    Experts,
    FusedLayers,
    PathSetting,
    Recompute,
    Settings,
    Shard,
    Tokens,
)
from lengthwise.core.errors import ConfigError
from lengthwise.core.names import BYTES_TOKENIZER, PLANNER_GROUP

DEFAULT_STEPS = 100
TINY_MODEL = "tiny"
MEASURE_AT_START, MEASURE_NOTHING = "auto", "off"


def _take_planner(value: object, of_ours: Callable[[object], str]) -> str:
    """Accept a planner of ours, or one that an installed package names in its entry points."""
    try:
        return of_ours(value)
    except ValidationError:
        if isinstance(value, str) and value in entry_points(group=PLANNER_GROUP).names:
            return value
        raise


def _as_names(value: object) -> object:
    """Read one name as a list of it, and null or none as an empty one."""
    return () if value in (None, "none") else (value,) if isinstance(value, str) else value


class RunConfig(Settings):
    """Everything that decides a run. Made by `load_config`, which also resolves paths; written to the output folder."""

    model: str = Field(min_length=1, description="tiny, a local Hugging Face folder, or a hub name")
    weights: Literal["load", "fresh"] | None = Field(
        default=None,
        description="load (load the model's weights) or fresh (draw random weights from the seed, even if the folder "
        "has weights); default null: load, but fresh for tiny and for a folder that holds only a config, "
        "with or without a tokenizer",
    )
    data: tuple[DataSource, ...] = Field(
        strict=False, min_length=1, description="a list of sources, read in order: [{path: train.jsonl}]"
    )
    eval: EvalConfig | None = Field(default=None, description="data and every_steps; default null (no evaluation)")
    tokenizer: str | None = Field(
        default=None,
        min_length=1,
        description="bytes (one byte is one token), a local Hugging Face folder or a hub name; default null: the "
        "model's own tokenizer, and bytes for tiny",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="the seed of all random numbers, 0 to 2^63 - 1; default 0")
    steps: int | None = Field(
        default=None, ge=1, description=f"optimizer steps; default {DEFAULT_STEPS} where epochs is not given"
    )
    epochs: int | None = Field(default=None, ge=1, description="the number of passes over the data, in place of steps")
    global_batch: GlobalBatch = Field(
        default=GlobalBatch(sequences=64),
        description="the size of a step: {sequences: n} or {tokens: n}; default {sequences: 64}",
    )
    capacity_tokens: Literal["auto"] | Tokens = Field(
        default="auto",
        description="the most tokens that one rank holds in one microbatch, 8192 or 8K; or auto: as many as fit in the "
        "memory that is free at the start; default auto",
    )
    planner: Annotated[
        Literal["lengthwise", "static", "single-degree", "bytescale-naive", "bytescale", "power-of-two", "packed-dp"],
        WrapValidator(_take_planner),
        PlainSerializer(str),
    ] = Field(
        default="lengthwise",
        description="lengthwise plans each step from its lengths; static (one fixed mesh), single-degree, "
        "bytescale-naive, bytescale, power-of-two and packed-dp (no sequence is cut) are baselines to "
        "compare with; other packages may register more planners; default lengthwise",
    )
    recompute: Recompute = Field(
        default="auto",
        description="the activations that backward recomputes (activation checkpointing): none, layer (every decoder "
        "layer) or all_but_attention (every layer, but attention and its ring run once); or auto: the kind "
        "with the fastest step if `capacity_tokens` is auto, none if it is a number; default auto",
    )
    offload: OffloadConfig | None = Field(
        default=None,
        description="{store: disk, path: /scratch}: offload a share of the activations until backward; default null, or"
        " off (all activations stay on the device)",
    )
    shard: Shard = Field(
        default="auto",
        description="zero1: every rank has all parameters and gradients, and its shard of the optimizer states; zero3: "
        "every rank has its shard of all three and gathers a layer when it runs, all ranks in lock-step; hybrid: "
        "parameters and gradients are sharded inside each node, the optimizer states over all ranks; auto: the fastest "
        "that fits, by estimate, on CPUs the first of zero1, hybrid and zero3; default auto",
    )
    ranks_per_node: int | None = Field(
        default=None,
        ge=1,
        description="how many neighbouring ranks shard the parameters under hybrid; it must divide the ranks; default "
        "null: as many as the launcher starts on a machine",
    )
    stages: int = Field(
        default=1,
        ge=1,
        description="the pipeline stages that the decoder layers are cut into; a sequence is cut over ranks / stages "
        "replicas, and each rank has the layers of one stage; default 1",
    )
    virtual: int = Field(
        default=1,
        ge=1,
        description="the chunks of layers that each stage takes in turn (interleaved 1F1B); default 1",
    )
    heads: Literal["auto", "off"] | Annotated[int, Field(ge=1)] = Field(
        default="auto",
        description="whether ranks that share a sequence split attention heads (all-to-all) instead of passing keys "
        "around the ring: auto (the planner chooses), off, or a number (groups of this many ranks, wherever"
        " it divides the ranks of a ring and the model's heads); default auto",
    )
    measurements: str | None = Field(
        default=None,
        min_length=1,
        description="the costs that the planner uses: auto (measured for some seconds before the first step), a file of"
        " `lengthwise profile` (with both a slow rank gets less work, so that plans may differ from run to "
        "run), or off: estimates for the device; default null: auto if the run takes long enough, else off",
    )
    attention: Attention = Field(
        default="auto",
        description="the attention implementation: auto (the fastest that the device, its libraries and the model "
        "allow), on GPUs flash2, flash3, flash_attn (of the package flash-attn, which also caps scores), cudnn (for "
        "long documents, flash2 for the others) or efficient, "
        "anywhere reference (plain matrix products, slow); default auto",
    )
    compile: bool = Field(
        default=False,
        description="true compiles decoder layers around their attention (torch.compile), except in mixtures of "
        "experts; the first step takes some seconds longer; default false",
    )
    fused_layers: FusedLayers = Field(
        default="auto",
        description="fused norms, RoPE and MLPs of Liger Kernel: liger (on GPUs, for families whose results were "
        "checked, not together with compile), off, or auto: liger if that is possible and liger-kernel is "
        "installed; default auto",
    )
    experts: Experts = Field(
        default="auto",
        description="how the experts of a mixture are computed: eager (one by one), grouped_mm (all in one product, "
        "bf16 and fp32), or auto: grouped_mm in bf16 on GPUs, else eager; default auto",
    )
    loss: Literal["chunked", "whole"] = Field(
        default="chunked",
        description="chunked (computes logits for a few tokens at a time; the result is the same) or whole (computes "
        "them for all tokens of a microbatch at once, which takes 14 bytes per token and vocabulary entry "
        "in bf16); default chunked",
    )
    precision: Literal["auto", "fp32", "bf16", "fp64"] = Field(
        default="auto",
        description="fp32, bf16 (with fp32 master weights), fp64, or auto: bf16 on GPUs, fp32 on CPUs; default auto",
    )
    lora: LoraConfig | None = Field(
        default=None,
        description="{r: 16, ...}: train LoRA adapters on the frozen model; default null (train the whole model)",
    )
    overlap: bool | None = Field(
        default=None,
        description="true reduces gradients while a rank's last backward runs, and gathers updated parameters while the"
        " next forward runs, when no ring is active; the result is the same; default null: on GPUs only",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto (GPUs where there are any), cpu or cuda; default auto"
    )
    memory_check: bool | None = Field(
        default=None,
        description="true runs the largest microbatch once before the first step, so that a lack of memory shows at "
        "once; default null: on GPUs only",
    )
    checkpoint: CheckpointConfig | None = Field(
        default=None,
        description="{every_steps: 50}: save what `--resume` needs, also after the last step; default null (save only "
        "the model, at the end)",
    )
    save: SaveConfig | None = Field(
        default=None,
        description="{best: eval_loss}: also keep the model with the best evaluation; default null",
    )
    report_to: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...],
        BeforeValidator(_as_names),
        Field(strict=False),
    ] = Field(
        default=(),
        description="the trackers to which rank 0 reports steps, one or a list: tensorboard, wandb, trackio, mlflow; "
        "default null (none)",
    )
    not_finite: Literal["stop", "skip"] = Field(
        default="stop",
        description="what the run does after a NaN or infinite loss or gradient: stop or skip (make no update in that "
        "step); after such a parameter it stops; default stop",
    )
    optimizer: OptimizerConfig = Field(
        default=OptimizerConfig(), description="the optimizer, AdamW unless you name another; every key has a default"
    )
    output: PathSetting = Field(description="the folder that this run writes; relative to the run file's folder")

    @model_validator(mode="before")
    @classmethod
    def _spell_out(cls, values: object) -> object:
        """Fill in the steps where no end of the run is given, and read `offload: off` as none."""
        if not isinstance(values, dict):
            return values
        ends = values.get("steps") is not None or values.get("epochs") is not None
        offload = {"offload": None} if values.get("offload") == "off" else {}
        return {**values, **offload, **({} if ends else {"steps": DEFAULT_STEPS})}

    @classmethod
    def broken_rules(cls, values: Mapping[str, object]) -> list[ConfigError]:
        """Allow only one end of the run."""
        found = []
        if values.get("steps") is not None and values.get("epochs") is not None:
            remedy = "Take one of them out, or set it to null."
            found.append(
                ConfigError("steps", expected="at most one of `steps` and `epochs`", got="both", remedy=remedy)
            )
        if values.get("save") is not None and values.get("eval") is None:
            remedy = "Add `eval: {data: [{path: eval.jsonl}]}`, or take save out."
            found.append(ConfigError("save", expected="`eval` beside it", got="none", remedy=remedy))
        trackers = values.get("report_to")
        if isinstance(trackers, list | tuple) and len({*map(str, trackers)}) < len(trackers):
            got, remedy = ", ".join(map(str, trackers)), "Leave out what is there before."
            found.append(ConfigError("report_to", expected="each tracker once", got=got, remedy=remedy))
        found += _not_read_meanwhile(values)
        found += _not_where_sharded(values)
        found += _not_with_stages(values)
        if (scheme := scheme_of(output := values.get("output"))) is not None:
            expected, got = "a folder of this machine", f"{output}: {scheme}:// is not written yet"
            found.append(ConfigError("output", expected=expected, got=got, remedy="Mount it, and name that folder."))
        return found

    def precision_on(self, *, gpus: bool) -> str:
        """Return the precision on this kind of device: fp32, bf16 or fp64."""
        if self.precision != "auto":
            return self.precision
        return "bf16" if gpus else "fp32"

    def ranks_in_step(self, ranks: int) -> int:
        """Return how many neighbouring ranks have the parameters together; auto is zero1 until it is settled."""
        within = {"zero3": ranks, "hybrid": self.ranks_per_node or ranks}.get(self.shard, 1)
        return min(within, ranks)

    def plan_mode(self, ranks: int) -> str:
        """Return how ranks run beside each other in plans for this layout."""
        return "free" if self.ranks_in_step(ranks) == 1 else "waves"

    @property
    def most_offload(self) -> float:
        """The share of activations that may be offloaded."""
        ratio = 0.0 if self.offload is None else self.offload.ratio
        return float(ratio == "auto") if isinstance(ratio, str) else ratio

    @property
    def keeps_whole(self) -> str | None:
        """What goes by whole parameters alone, if the run asks for it; as `_not_where_sharded` refuses it."""
        if self.planner != "lengthwise":
            return f"planner {self.planner}"
        if self.compile:
            return "compile: true"
        return f"measurements: {MEASURE_AT_START}" if self.measurements == MEASURE_AT_START else None

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer in use: the one named, else the model's own, and bytes for `tiny`."""
        if self.tokenizer is not None:
            return self.tokenizer
        return BYTES_TOKENIZER if self.model == TINY_MODEL else self.model


def _not_read_meanwhile(values: Mapping[str, object]) -> list[ConfigError]:
    """Refuse sources that are read meanwhile beside others, and what needs a count of all rows."""
    data, found = values.get("data"), []
    data = data if isinstance(data, list | tuple) else ()
    keys = [read_meanwhile(each) for each in data]
    key = next(filter(None, keys), None)
    if key is not None and set(keys) != {key}:
        number = next(number for number, other in enumerate(keys) if other != key)
        remedy = f"Set `{key}: true` on this source, too, or on none."
        found.append(ConfigError(f"data.{number}.{key}", expected=f"all or none {key}", got="some", remedy=remedy))
    numbers = {str(each.get(key) if isinstance(each, Mapping) else getattr(each, key)) for each in data if key}
    if key == "streaming" and len(numbers) > 1:
        got, remedy = " and ".join(sorted(numbers)), "Set the same number."
        expected = "one number of rows to shuffle for all sources, which are one stream"
        found.append(ConfigError("data.0.streaming", expected=expected, got=got, remedy=remedy))
    if key is not None and values.get("epochs") is not None:
        remedy = f"Set steps in its place, or take {key} out."
        expected = f"`steps` beside `{key}` data, whose rows are not counted before they come"
        found.append(ConfigError("epochs", expected=expected, got=f"{values['epochs']}", remedy=remedy))
    return found


def _not_where_sharded(values: Mapping[str, object]) -> list[ConfigError]:
    """Refuse what needs whole parameters, or plans without lock-step, under `shard: zero3`."""
    found, shard = [], values.get("shard", "auto")
    under = f"under `shard: {shard}`"
    if shard in ("zero1", "zero3") and values.get("ranks_per_node") is not None:
        expected, remedy = f"none {under}: hybrid alone shards inside nodes", "Take ranks_per_node out, or set hybrid."
        got = str(values["ranks_per_node"])
        found.append(ConfigError("ranks_per_node", expected=expected, got=got, remedy=remedy))
    if shard not in ("zero3", "hybrid"):
        return found
    if values.get("planner", "lengthwise") != "lengthwise":
        expected, got = f"lengthwise {under}, the only one that plans in lock-step", str(values["planner"])
        found.append(ConfigError("planner", expected=expected, got=got, remedy="Take planner out."))
    if values.get("measurements") == MEASURE_AT_START:
        expected = f"off, or a file of `lengthwise profile`, {under}"
        remedy = "Take measurements out, or measure under zero1 with `lengthwise profile`."
        found.append(ConfigError("measurements", expected=expected, got=MEASURE_AT_START, remedy=remedy))
    if values.get("compile"):
        remedy = "Take compile out."
        found.append(ConfigError("compile", expected=f"false {under}", got="true", remedy=remedy))
    return found


def _not_with_stages(values: Mapping[str, object]) -> list[ConfigError]:
    stages = values.get("stages", 1)
    if stages == 1:
        more = values.get("virtual", 1)
        found = [] if more == 1 else ["virtual"]
        remedy = "Add `stages`, or take virtual out."
        return [ConfigError(each, expected="1 without `stages`", got=str(more), remedy=remedy) for each in found]
    shard = values.get("shard", "auto")
    beside, found = f"beside `stages: {stages}`", list[ConfigError]()

    def refuse(key: str, expected: str, got: object, remedy: str) -> None:
        found.append(ConfigError(key, expected=f"{expected} {beside}", got=str(got), remedy=remedy))

    if shard not in ("auto", "zero1"):
        why = "auto or zero1 (each microbatch would gather the layers of a stage again)"
        refuse("shard", why, shard, "Take shard out, or stages.")
    if values.get("capacity_tokens", "auto") == "auto":
        refuse("capacity_tokens", "a number", "auto", "Give the tokens of a microbatch on a rank: capacity_tokens: 8K")
    if values.get("compile"):
        refuse("compile", "false", "true", "Take compile out.")
    if values.get("ranks_per_node") is not None:
        refuse("ranks_per_node", "none", values["ranks_per_node"], "Take ranks_per_node out.")
    if values.get("memory_check"):
        refuse("memory_check", "false", "true", "Take memory_check out.")
    if values.get("measurements") == MEASURE_AT_START:
        remedy = "Measure the whole model with `lengthwise profile`, and name its file."
        refuse("measurements", f"{MEASURE_NOTHING} or a file", MEASURE_AT_START, remedy)
    return found


# The section each part of a run file is read into, by its config path without list indices.
SECTIONS: Mapping[tuple[str, ...], type[Settings]] = {
    (): RunConfig,
    ("data",): DataSource,
    ("eval",): EvalConfig,
    ("eval", "data"): DataSource,
    ("global_batch",): GlobalBatch,
    ("optimizer",): OptimizerConfig,
    ("lora",): LoraConfig,
    ("offload",): OffloadConfig,
    ("checkpoint",): CheckpointConfig,
    ("save",): SaveConfig,
}
