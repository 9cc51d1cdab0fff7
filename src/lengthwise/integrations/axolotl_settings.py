"""The section `lengthwise` of an axolotl file, and the file's keys that cannot stand beside it.

Here is no import of axolotl, so that its checks run, and are tested, without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, model_validator

from lengthwise.core.errors import ConfigError, LengthwiseError, raise_problems
from lengthwise.core.names import did_you_mean
from lengthwise.integrations.arguments import OFF, REFUSED, Refusal
from lengthwise.session.keywords import StepOptions, keyword_problems

SECTION = "lengthwise"

_ONE: tuple[Any, ...] = (*OFF, 1)
_MESH = "it is a fixed mesh; a plan shards each sequence over ranks of its own"
_LOSS = "it replaces the loss; planned steps compute the loss in chunks without it"
_LAYERS = "it replaces parts of the model that a plan runs"
_ADAPTER = "of adapters only LoRA over weights that are not quantized was tried here"

REFUSED_KEYS: Mapping[str, Refusal] = {
    **{name: REFUSED[name] for name in ("deepspeed", "fsdp", "torch_compile", "neftune_noise_alpha")},
    **{name: REFUSED[name] for name in ("auto_find_batch_size", "optim_target_modules", "torch_empty_cache_steps")},
    "fp16": REFUSED["fp16"],
    "optimizer": ((None, *REFUSED["optim"][0]), REFUSED["optim"][1]),
    **dict.fromkeys(("fsdp_config", "deepcompile"), (OFF, "shard of the section lengthwise shards the parameters")),
    **dict.fromkeys(("context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size"), (_ONE, _MESH)),
    **dict.fromkeys(("expert_parallel_size", "dp_shard_size", "dp_replicate_size"), (_ONE, _MESH)),
    "context_parallel": ((*OFF, {"size": 1}), _MESH),
    **dict.fromkeys(("group_by_length", "balance_labels"), (OFF, "the plan balances unequal lengths itself")),
    **dict.fromkeys(
        ("activation_offloading", "layer_offloading"),
        (OFF, "its hooks would see a plan's microbatches; use offload of the section lengthwise"),
    ),
    "selective_checkpointing": (OFF, "the plan recomputes whole layers; use gradient_checkpointing: true"),
    **dict.fromkeys(("cut_cross_entropy", "chunked_cross_entropy", "flash_attn_cross_entropy"), (OFF, _LOSS)),
    **dict.fromkeys(("liger_fused_linear_cross_entropy", "liger_cross_entropy"), (OFF, _LOSS)),
    **dict.fromkeys(
        ("liger_rope", "liger_rms_norm", "liger_layer_norm", "liger_glu_activation", "liger_swiglu"),
        (OFF, "it patches transformers; use fused_layers: liger of the section lengthwise"),
    ),
    **dict.fromkeys(
        ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel", "use_kernels"), (OFF, _LAYERS)
    ),
    **dict.fromkeys(("tiled_mlp", "fused_attn_kernel", "flash_attn_fuse_mlp", "scaling_softmax"), (OFF, _LAYERS)),
    **dict.fromkeys(("quantize_moe_experts", "use_onebitllms", "ple_cpu_offload", "fp8"), (OFF, _LAYERS)),
    "adapter": ((None, "", "lora"), _ADAPTER),
    **dict.fromkeys(("load_in_8bit", "load_in_4bit", "gptq", "qat", "model_quantization_config"), (OFF, _ADAPTER)),
    **dict.fromkeys(
        ("relora", "jagged_restart_steps"), (OFF, "it resets the optimizer, whose states lie over the ranks")
    ),
    "lisa_step_interval": (OFF, "it changes which parameters train, and a session fixes them when it opens"),
    **dict.fromkeys(
        ("reward_model", "process_reward_model", "diffusion_lm"), (OFF, "its loss is not that of a causal model")
    ),
    **dict.fromkeys(("pretraining_dataset", "streaming"), (OFF, "it was not tried; give the texts as `datasets`")),
    "processor_type": (OFF, "images were not tried here; use lengthwise.integrations.trl"),
    "use_ray": (OFF, "it was not tried; start with axolotl train or torchrun"),
    **dict.fromkeys(
        ("device_map", "max_memory", "gpu_memory_limit"), (OFF, "a session places the model, whole or in parts")
    ),
    "rl": (OFF, "planned DPO and GRPO need trl 1.16, and axolotl 0.21 pins 1.14.1; use lengthwise.integrations.trl"),
    "trainer_cls": (OFF, "the plugin gives a planned trainer"),
}
"""Keys of an axolotl file of which some values are refused: the accepted values, and why others are not."""

PLUGINS = "axolotl.integrations."
# Those that leave the model, its loss and its trainer as they are; the first two do nothing at a size of 1.
FINE_PLUGINS = ("context_parallel", "expert_parallel", "lm_eval", "spectrum", "swanlab")


class LengthwiseArgs(BaseModel):
    """The key that the plugin adds to an axolotl file; all refused keys of the file are in one message."""

    lengthwise: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def check(cls, values: Any) -> Any:
        """Return the raw values of a file after their check."""
        if isinstance(values, Mapping):
            raise_problems(problems_of_file(values))
        return values


def problems_of_file(values: Mapping[str, Any]) -> list[LengthwiseError]:
    """Return the problems of an axolotl file with this plugin."""
    problems = _problems_of_section(values.get(SECTION))
    for name, (fine, why) in REFUSED_KEYS.items():
        value = values.get(name)
        if value not in fine:
            others = [str(each) for each in fine if each not in _ONE]
            remedy = f"Use {' or '.join(others)}." if others else "Remove it."
            got = f"{value!s:.80}, but {why}"
            problems.append(ConfigError(name, expected=" or ".join(others) or "none", got=got, remedy=remedy))
    for name in values.get("plugins") or []:
        kind = str(name).removeprefix(PLUGINS).partition(".")[0]
        if str(name).startswith(PLUGINS) and kind not in FINE_PLUGINS:
            got = f"{name}, which changes the model, its loss or its trainer"
            expected = f"plugins beside {SECTION} that leave these as they are"
            problems.append(ConfigError("plugins", expected=expected, got=got, remedy="Remove it from `plugins`."))
    return problems


def _problems_of_section(section: Any) -> list[LengthwiseError]:
    if section is None:
        return []
    if not isinstance(section, Mapping):
        expected, remedy = "a mapping of keys", f"Write `{SECTION}: {{capacity_tokens: auto}}`, or leave it out."
        return [ConfigError(SECTION, expected=expected, got=str(section)[:80], remedy=remedy)]
    known, problems = StepOptions.__annotations__, list[LengthwiseError]()
    for name in section.keys() - known.keys():
        remedy = did_you_mean(name, known) or f"The keys are {', '.join(sorted(known))}."
        problems.append(ConfigError(f"{SECTION}.{name}", expected="a key of a trainer", got=str(name), remedy=remedy))
    given = {name: value for name, value in section.items() if name in known}
    for each in keyword_problems(given):
        each.where = f"{SECTION}.{each.where}"
        problems.append(each)
    return problems
