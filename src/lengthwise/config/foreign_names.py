"""Keys of other trainers (Hugging Face, axolotl, LLaMA-Factory, torchtitan): their names here, or why there is none."""

from __future__ import annotations

from collections.abc import Mapping

_BATCH = "`global_batch: {sequences: n}` is the size of a step over all ranks"
_PACKING = "Leave it out: sequences are always packed, and never attend to each other"
_SHARDING = "Leave it out: parameters are sharded if a model needs it; to choose, set `shard: zero3`"
_LONGEST = "`data.0.max_tokens` limits the length of a sequence, `capacity_tokens` the tokens of one rank"
_WARMUP = "Here it is `optimizer.warmup_steps`: a number of steps, or below 1 a share of all"
_BETAS = "Here it is `optimizer.betas: [0.9, 0.95]`"
_DEGREES = "Leave it out: the planner chooses for each sequence how many ranks share it"
_WHOLE = "Not supported: the model is in `precision`, under `lora` too"

FOREIGN_NAMES: Mapping[str, str] = {
    "assistant_only_loss": "Leave it out: in a chat only the assistant's turns have a loss",
    "completion_only_loss": "Leave it out: in rows of prompt and completion only the completion has a loss",
    "train_on_inputs": "Leave it out: prompts and the turns of users have no loss",
    "learning_rate": "Here it is `optimizer.lr`",
    "optim": "Here it is `optimizer.name`",
    "warmup_ratio": _WARMUP,
    "num_warmup_steps": _WARMUP,
    "adam_beta1": _BETAS,
    "adam_beta2": _BETAS,
    "adam_epsilon": "Here it is `optimizer.eps`",
    "lr_scheduler": "Here it is `optimizer.schedule`",
    "lr_scheduler_type": "Here it is `optimizer.schedule`",
    "lr_scheduler_kwargs": "Here it is `optimizer.schedule_args`",
    "num_train_epochs": "Here it is `epochs`",
    "num_epochs": "Here it is `epochs`",
    "max_steps": "Here it is `steps`",
    "base_model": "Here it is `model`",
    "model_name_or_path": "Here it is `model`",
    "datasets": "Here it is `data`",
    "dataset_name": "Here it is `data: [{dataset: org/name, split: train}]`",
    "train_file": "Here it is `data: [{path: train.jsonl}]`",
    "test_datasets": "Here it is `eval: {data: [...]}`",
    "eval_steps": "Here it is `eval.every_steps`",
    "save_steps": "Here it is `checkpoint.every_steps`",
    "save_total_limit": "Here it is `checkpoint.keep_last`",
    "resume_from_checkpoint": "Here it is `--resume` of the command",
    "logging_steps": "Leave it out: every step is written and reported",
    "run_name": "Leave it out: `output` names a run, and trackers read their own environment variables",
    "wandb_project": "Set WANDB_PROJECT in the environment, and `report_to: wandb`",
    "trust_remote_code": "Leave it out: code from a hub is never run",
    "attn_implementation": "Here it is `attention`",
    "flash_attention": "Here it is `attention`",
    "torch_compile": "Here it is `compile`",
    "use_liger_kernel": "Here it is `fused_layers`",
    "lora_r": "Here it is `lora.r`",
    "rank": "Here it is `lora.r`",
    "val_set_size": "Here it is `eval: {data: [{path: held-out.jsonl}]}`: rows of a separate file",
    "bias": "Leave it out: only adapters are trained",
    "modules_to_save": "Leave it out: only adapters are trained",
    "use_dora": "Not supported: use LoRA, or rank-stabilized LoRA by `lora.use_rslora`",
    "lora_target_modules": "Here it is `lora.target_modules`",
    "output_dir": "Here it is `output`",
    "per_device_train_batch_size": _BATCH,
    "micro_batch_size": _BATCH,
    "train_batch_size": _BATCH,
    "batch_size": _BATCH,
    "global_batch_size": _BATCH,
    "gradient_accumulation_steps": f"Leave it out: the planner makes the microbatches; {_BATCH}",
    "max_seq_length": _LONGEST,
    "max_length": _LONGEST,
    "max_seq_len": _LONGEST,
    "seq_len": _LONGEST,
    "sequence_len": _LONGEST,
    "cutoff_len": _LONGEST,
    "sample_packing": _PACKING,
    "packing": _PACKING,
    "gradient_checkpointing": "Here it is `recompute: layer`",
    "bf16": "Here it is `precision: bf16`",
    "load_in_4bit": _WHOLE,
    "load_in_8bit": _WHOLE,
    "fp16": "Not supported: use `precision: bf16`",
    "torch_dtype": "Here it is `precision`",
    "dtype": "Here it is `precision`",
    "tensor_parallel_size": "Leave it out: training has no tensor parallelism",
    "context_parallel_size": _DEGREES,
    "context_parallel_degree": _DEGREES,
    "sequence_parallel_degree": _DEGREES,
    "parallel": "Here it is `shard`, at the top: `shard: zero3`",
    "fsdp": _SHARDING,
    "fsdp_config": _SHARDING,
    "zero_stage": _SHARDING,
    "deepspeed": _SHARDING,
}
