"""The run file: YAML in, checked settings out. Needs neither torch nor a model library."""

from lengthwise.config.document import dump_values as _dump_values
from lengthwise.config.optimizer_config import FRESH_RATE as FRESH_RATE
from lengthwise.config.optimizer_config import LOADED_RATE as LOADED_RATE
from lengthwise.config.optimizer_config import LOADED_WARMUP as LOADED_WARMUP
from lengthwise.config.optimizer_config import LORA_RATE as LORA_RATE
from lengthwise.config.optimizer_config import OptimizerConfig as OptimizerConfig
from lengthwise.config.run_file import build_config as build_config
from lengthwise.config.run_file import load_config as load_config
from lengthwise.config.schema import TINY_MODEL as TINY_MODEL
from lengthwise.config.schema import RunConfig as RunConfig
from lengthwise.config.sections import DataSource as DataSource
from lengthwise.config.sections import GlobalBatch as GlobalBatch
from lengthwise.config.sections import LoraConfig as LoraConfig
from lengthwise.config.sections import OffloadConfig as OffloadConfig
from lengthwise.config.training import MEASURE_AT_START as MEASURE_AT_START
from lengthwise.config.training import MEASURE_NOTHING as MEASURE_NOTHING
from lengthwise.config.training import TrainingSettings as TrainingSettings


def dump_config(config: RunConfig) -> str:
    """Return the resolved settings as YAML, which `load_config` reads back to an equal `RunConfig`."""
    return _dump_values(config.model_dump(mode="json"))
