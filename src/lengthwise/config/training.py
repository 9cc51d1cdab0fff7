"""The settings of a step, which run files, sessions and trainers share; each adds keys of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PlainSerializer, ValidationError, WrapValidator, model_validator

from lengthwise.config.sections import OffloadConfig
from lengthwise.config.setting_types import Attention, Experts, FusedLayers, Recompute, Settings, Shard, Tokens
from lengthwise.config.together import RUN_FILE, broken, plain
from lengthwise.core.errors import ConfigError
from lengthwise.core.names import PLANNER_GROUP
from lengthwise.core.shape import LayerCut

MEASURE_AT_START, MEASURE_NOTHING = "auto", "off"


def _take_planner(value: object, of_ours: Callable[[object], str]) -> str:
    """Accept a built-in planner, or one that an installed package has as an entry point."""
    try:
        return of_ours(value)
    except ValidationError:
        if isinstance(value, str) and value in entry_points(group=PLANNER_GROUP).names:
            return value
        raise


class TrainingSettings(Settings):
    """The settings of a step. door: where users write them (see `together`). page: documentation page of all keys."""

    door: ClassVar[str] = RUN_FILE
    page: ClassVar[str] = "docs/run-file.md"

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
        "layer), all_but_attention (every layer, but attention and its ring run once) or elementwise (norms, RoPE and "
        "activations alone: products and attention run once); or auto: the kind "
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
        default=1, ge=1, description="the chunks of layers that each stage takes in turn (interleaved 1F1B); default 1"
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
    overlap: bool | None = Field(
        default=None,
        description="true reduces gradients while a rank's last backward runs, and gathers updated parameters while the"
        " next forward runs, when no ring is active; the result is the same; default null: on GPUs only",
    )

    @model_validator(mode="before")
    @classmethod
    def _offload_nothing(cls, values: object) -> object:
        """Read `offload: off` as null."""
        if isinstance(values, dict) and values.get("offload") == "off":
            return {**values, "offload": None}
        return values

    @classmethod
    def broken_rules(cls, values: Mapping[str, object]) -> list[ConfigError]:
        """Return an error for each rule of the table of `together` that `values` break."""
        defaults = {name: field.default for name, field in cls.model_fields.items()}
        known = {**defaults, **values}
        return [rule.error(known) for rule in broken(known, cls.door)]

    @property
    def cut(self) -> LayerCut:
        """Pipeline stages and chunks of a rank's layers."""
        return LayerCut(stages=self.stages, virtual=self.virtual)

    def ranks_in_step(self, ranks: int) -> int:
        """Return the number of neighbouring ranks that shard the parameters; auto counts as zero1."""
        within = {"zero3": ranks, "hybrid": self.ranks_per_node or ranks}.get(self.shard, 1)
        return min(within, ranks)

    def layout(self, ranks: int) -> str:
        """Return the effective sharding: zero1, zero3 (over all ranks), or hybrid (over some)."""
        within = self.ranks_in_step(ranks)
        return "zero1" if within == 1 else "zero3" if within == ranks else "hybrid"

    def plan_mode(self, ranks: int) -> str:
        """Return the planning mode of this layout: free, or waves if ranks shard parameters."""
        return "free" if self.ranks_in_step(ranks) == 1 else "waves"

    def overlaps(self, *, on_gpus: bool) -> bool:
        """Return whether a rank's gradients are reduced during its last backward."""
        return on_gpus if self.overlap is None else self.overlap

    @property
    def most_offload(self) -> float:
        """Largest share of activations that may be offloaded, 0 to 1."""
        ratio = 0.0 if self.offload is None else self.offload.ratio
        return float(ratio == "auto") if isinstance(ratio, str) else ratio

    def keeps_whole(self, **of_model: object) -> str | None:
        """Return the setting, as `key: value`, that needs whole parameters on each rank, or None.

        of_model: values that a session finds in its model, such as `quantization`.
        """
        values = {**vars(self), **of_model, "shard": "hybrid"}
        key = next((rule.key for rule in broken(values, self.door) if rule.beside == "shard"), None)
        return None if key is None else f"{key}: {plain(values[key])}"
