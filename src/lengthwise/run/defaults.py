"""Defaults of a run that depend on its model and device: precision, learning rate, schedule, warm-up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lengthwise.config import FRESH_RATE, LOADED_RATE, LOADED_WARMUP, LORA_RATE, TINY_MODEL, OptimizerConfig, RunConfig
from lengthwise.models.weights import holds_weights


def settle(config: RunConfig, *, gpus: int) -> tuple[RunConfig, Mapping[str, str]]:
    """Return the settings with these defaults filled in, and the reason of each key that was. Idempotent."""
    loads = _loads_weights(config)
    start = "loaded weights" if loads else "fresh weights"
    rate = LORA_RATE if config.lora is not None else LOADED_RATE if loads else FRESH_RATE
    optimizer, reasons = _settled_optimizer(config.optimizer, rate, loads=loads, start=start)
    if config.lora is not None and "lr" in reasons:
        reasons["lr"] = "the default for LoRA"
    if config.precision == "auto":
        reasons["precision"] = "the default on GPUs" if gpus else "the default on CPUs"
    precision = config.precision_on(gpus=gpus > 0)
    return config.model_copy(update={"precision": precision, "optimizer": optimizer}), reasons


def _settled_optimizer(
    asked: OptimizerConfig, rate: float, *, loads: bool, start: str
) -> tuple[OptimizerConfig, dict[str, str]]:
    schedule = asked.schedule or ("cosine" if loads else "constant")
    warmup = LOADED_WARMUP if loads and schedule != "constant" else 0
    filled = {"lr": rate, "schedule": schedule, "warmup_steps": warmup}
    filled = {key: value for key, value in filled.items() if getattr(asked, key) is None}
    return asked.model_copy(update=filled), dict.fromkeys(filled, f"the default for {start}")


def _loads_weights(config: RunConfig) -> bool:
    """Whether the run starts from weights of its model's folder or hub name; a missing model is reported later."""
    if config.model == TINY_MODEL or config.weights == "fresh":
        return False
    folder = Path(config.model)
    return not folder.is_dir() or holds_weights(folder)
