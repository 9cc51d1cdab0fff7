"""Which arguments of a Trainer keep their meaning under a plan, and why the others are refused.

Every field of `TrainingArguments` is in one table here. Unknown fields of later versions are refused unless they have
their default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from lengthwise.core.errors import ConfigError, LengthwiseError, raise_problems
from lengthwise.core.plan import RECOMPUTE_KINDS

_KEPT = """
output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
lr_scheduler_kwargs warmup_steps optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
gradient_accumulation_steps max_grad_norm label_smoothing_factor bf16 tf32 activation_checkpointing
activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs logging_strategy logging_steps
logging_first_step log_on_each_node include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to
run_name project trackio_space_id trackio_bucket_id trackio_static_space_id eval_strategy eval_steps eval_delay
per_device_eval_batch_size eval_on_start save_only_model save_strategy save_steps save_total_limit push_to_hub
hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision load_best_model_at_end
metric_for_best_model greater_is_better ignore_data_skip restore_callback_states_from_checkpoint full_determinism
seed data_seed use_cpu dataloader_drop_last dataloader_num_workers dataloader_persistent_workers
dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns ddp_backend
ddp_timeout skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint local_rank accelerator_config
average_tokens_across_devices use_cache use_liger_kernel prediction_loss_only eval_do_concat_batches
include_for_metrics
"""
KEPT = frozenset(_KEPT.split())
"""Fields with the meaning that they have in a plain Trainer of one process."""

WITHOUT_EFFECT: Mapping[str, str] = {
    **dict.fromkeys(
        ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
        "there is no DistributedDataParallel",
    ),
    **dict.fromkeys(
        ("eval_use_gather_object", "eval_accumulation_steps"),
        "the logits of every batch are gathered by token, and kept on the host",
    ),
    "logging_nan_inf_filter": "a loss that is not finite ends the training",
    "dataloader_pin_memory": "rows are read on the host",
    "length_column_name": "lengths are those of the rows",
    "torch_compile_backend": "torch_compile is refused",
    "torch_compile_mode": "torch_compile is refused",
    "fsdp_config": "fsdp is refused",
}
"""Fields that change nothing here, and why."""

Refusal: TypeAlias = tuple[tuple[Any, ...], str]
"""The values of a field that are accepted, and why others are not."""
OFF: tuple[Any, ...] = (None, False, "", [], {})

REFUSED: Mapping[str, Refusal] = {
    "deepspeed": (OFF, "it would own the optimizer and the gradients"),
    "fsdp": (OFF, "it would shard the parameters itself; use the trainer's shard='zero3', or its default auto"),
    "parallelism_config": (OFF, "it is a fixed mesh; a plan shards each sequence over ranks of its own"),
    "fp16": (OFF, "its loss scale would skip steps; use bf16"),
    "fp16_full_eval": (OFF, "it would convert the model"),
    "bf16_full_eval": (OFF, "it would convert the model"),
    "auto_find_batch_size": (OFF, "one rank alone would restart; capacity_tokens bounds the memory"),
    "torch_compile": (OFF, "it cannot capture planned attention; the trainer's compile=True compiles around it"),
    "liger_kernel_config": (OFF, "fused layers are chosen for the model's family"),
    "neftune_noise_alpha": (OFF, "its noise would depend on the plan"),
    "train_sampling_strategy": (("random", "sequential"), "the plan balances unequal lengths itself"),
    "batch_eval_metrics": (OFF, "metrics are of all rows; preprocess_logits_for_metrics bounds their memory"),
    "enable_jit_checkpoint": (OFF, "one rank alone would save, and all ranks must"),
    "save_on_each_node": (OFF, "all ranks write their states into one folder"),
    "optim_target_modules": (OFF, "its optimizers need whole matrices"),
    "torch_empty_cache_steps": (OFF, "the plan, not Trainer, runs the microbatches"),
    "debug": (OFF, "it watches Trainer's own forward passes"),
    "optim": (
        ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"),
        "a rank updates a slice of the parameters, so the optimizer must compute each entry by itself",
    ),
    "label_names": ((None, ["labels"]), "the labels of a causal language model are its loss"),
}
"""Fields of which some values are refused."""

WITH_PARTS: Mapping[str, str] = {
    "load_best_model_at_end": "it would load weights into a model that lies over the ranks",
    "sync_ref_model": "it reads the model's parameters, which lie over the ranks",
}
"""Fields that are refused if parameters lie over the ranks, and why."""

CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
"""The fields for activation checkpointing, by its new and its old name."""

PLANNED: Mapping[str, str] = {
    **dict.fromkeys(("SFTTrainer", "DPOTrainer", "GRPOTrainer", "RLOOTrainer"), "lengthwise.integrations.trl"),
    "AsyncGRPOTrainer": "lengthwise.integrations.async_grpo",
}
"""TRL's trainers that have a planned class of their own, and its module."""


def problems_of(arguments: Any, *, refused: Mapping[str, Refusal] = MappingProxyType({})) -> list[LengthwiseError]:
    """Return the problems of a planned Trainer's arguments. refused: fields of a subclass of TrainingArguments."""
    from transformers import TrainingArguments

    problems: list[LengthwiseError] = []

    def refuse(where: str, expected: str, got: object, why: str, remedy: str = "Remove it.") -> None:
        problems.append(ConfigError(where, expected=expected, got=f"{got!s:.80}, but {why}", remedy=remedy))

    for name, (fine, why) in {**REFUSED, **refused}.items():
        value = _value(arguments, name)
        if value not in fine:
            others = [str(each) for each in fine if each not in OFF]
            remedy = f"Use {' or '.join(others)}." if others else "Remove it."
            refuse(name, " or ".join(others) or "none", value, why, remedy)
    for name, value in (_checkpointing(arguments) or {}).items():
        if name == "recompute":
            if value not in RECOMPUTE_KINDS:
                expected = f"one of {', '.join(RECOMPUTE_KINDS)}"
                refuse(f"activation_checkpointing_kwargs.{name}", expected, value, "it is no kind of recomputation")
            elif not _checkpoints(arguments):
                expected, remedy = "activation_checkpointing=True beside it", "Set it, or remove this."
                why = "without activation checkpointing nothing reads it"
                refuse(f"activation_checkpointing_kwargs.{name}", expected, value, why, remedy)
        elif name not in ("use_reentrant", "determinism_check", "preserve_rng_state", "debug", "early_stop"):
            refuse(f"activation_checkpointing_kwargs.{name}", "none", value, "the plan recomputes whole layers")
    if not arguments.average_tokens_across_devices and arguments.world_size > 1:
        refuse("average_tokens_across_devices", "True", False, "a token counts the same on every rank")
    if arguments.n_gpu > 1:
        refuse("n_gpu", "one process per GPU", arguments.n_gpu, "DataParallel is not supported", "Start with torchrun.")
    loader = arguments.accelerator_config
    for name in ("split_batches", "dispatch_batches", "use_stateful_dataloader", "gradient_accumulation_kwargs"):
        if getattr(loader, name, None):
            refuse(f"accelerator_config.{name}", "none", getattr(loader, name), "every rank reads the global batch")
    tabled, known = KEPT | WITHOUT_EFFECT.keys() | REFUSED.keys(), dataclasses.fields(TrainingArguments)
    unknown = {each.name for each in known} - tabled  # the trainer's class checks fields of a subclass
    for field in dataclasses.fields(arguments):
        value = getattr(arguments, field.name)
        if field.name in unknown and value != _default(field):
            refuse(field.name, "its default", value, "this version of lengthwise does not know the field")
    return problems


def refuse_mixed(kind: type) -> None:
    """Refuse a class that puts the mixin alone in front of a trainer of TRL that needs a planned class of its own."""
    bases = {(each.__module__.partition(".")[0], each.__name__) for each in kind.__mro__}
    for name, module in PLANNED.items():
        if ("trl", name) in bases and ("lengthwise", name) not in bases:
            expected, got = f"{module}.{name}", f"PlannedTrainerMixin in front of TRL's {name}"
            remedy = f"Take {name} of {module} as the base, before any class of your own."
            raise ConfigError(f"class {kind.__name__}", expected=expected, got=got, remedy=remedy)


def refuse_with_parts(arguments: Any) -> None:
    """Refuse arguments that need whole parameters; one message has all."""
    problems: list[LengthwiseError] = []
    for name, why in WITH_PARTS.items():
        if getattr(arguments, name, False):
            remedy = "Remove it, or give shard='zero1' and no stages."
            got = f"True, but under shard zero3, hybrid or stages {why}"
            problems.append(ConfigError(name, expected="False", got=got, remedy=remedy))
    raise_problems(problems)


def recompute_of(arguments: Any) -> str:
    """Return the kind of recomputation for a Trainer's activation checkpointing; its keywords may name another one."""
    if not _checkpoints(arguments):
        return "none"
    return (_checkpointing(arguments) or {}).get("recompute", "layer")


def _checkpoints(arguments: Any) -> bool:
    return any(_value(arguments, name) for name in CHECKPOINTING)


def _checkpointing(arguments: Any) -> Mapping[str, Any] | None:
    return next(filter(None, (_value(arguments, f"{name}_kwargs") for name in CHECKPOINTING)), None)


def _value(arguments: Any, name: str) -> Any:
    value = getattr(arguments, name, None)  # versions differ in a few
    return getattr(value, "value", value)  # of an enumeration


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default
