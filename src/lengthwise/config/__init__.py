"""The run file: YAML in, checked settings out. Needs neither torch nor a model library."""

from lengthwise.config.document import dump_values as _dump_values
from lengthwise.config.optimizer_config import FRESH_RATE, LOADED_RATE, LOADED_WARMUP, LORA_RATE, OptimizerConfig
from lengthwise.config.run_file import build_config, load_config
from lengthwise.config.schema import TINY_MODEL, RunConfig
from lengthwise.config.sections import DataSource, GlobalBatch, LoraConfig, OffloadConfig
from lengthwise.config.training import MEASURE_AT_START, MEASURE_NOTHING, TrainingSettings

__all__ = [
    "FRESH_RATE",
    "LOADED_RATE",
    "LOADED_WARMUP",
    "LORA_RATE",
    "MEASURE_AT_START",
    "MEASURE_NOTHING",
    "TINY_MODEL",
    "DataSource",
    "GlobalBatch",
    "LoraConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "RunConfig",
    "TrainingSettings",
    "build_config",
    "dump_config",
    "load_config",
]


def dump_config(config: RunConfig) -> str:
    """Return the resolved settings as YAML, which `load_config` reads back to an equal `RunConfig`."""
    return _dump_values(config.model_dump(mode="json"))
